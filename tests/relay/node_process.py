"""A relay node in a process of its own, which can be killed with no chance to tidy up."""

import asyncio
import multiprocessing as mp
from multiprocessing.connection import Connection
from pathlib import Path

from laminar_py.relay.messages import RelayKeys
from laminar_py.relay.node import RelayNode

START_S = 20.0


class NodeProcess:
    """E.g. `endpoint = NodeProcess(store, parent, keys).start()`, then `kill()`, then `start(port)` again."""

    def __init__(self, store: Path, parent: str, keys: RelayKeys) -> None:
        self._settings = (store, parent, keys.public, keys.secret)
        self._process: mp.process.BaseProcess | None = None

    def start(self, port: int = 0) -> str:
        """Returns the endpoint once the node listens."""
        context = mp.get_context("spawn")
        here, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, port, *self._settings), daemon=True)
        self._process.start()
        assert here.poll(START_S), "the node process did not start"
        endpoint: str = here.recv()
        return endpoint

    def kill(self) -> None:
        """SIGKILL."""
        assert self._process is not None
        self._process.kill()
        self._process.join(START_S)


def _serve(started: Connection, port: int, store: Path, parent: str, public: str, secret: str) -> None:
    async def relay() -> None:
        node = RelayNode(
            "relay-1",
            store=store,
            keys=RelayKeys(public, secret),
            parents=[parent],
            port=port,
            chunk_bytes=4096,
            parent_timeout_s=5.0,
        )
        await node.start()
        started.send(node.endpoint)
        await node.run()

    asyncio.run(relay())
