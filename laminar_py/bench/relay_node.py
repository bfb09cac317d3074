"""One relay node of a measurement, in a process of its own, and what that says of the versions it gets.

Used by `relay_tree`, and by `relay_host` within a namespace. Invariant: times are taken in that process, when the
node reports.
"""

import asyncio
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from laminar_py.bench.processes import Worker
from laminar_py.relay.node.relay_node import RelayNode
from laminar_py.relay.wire.messages import RelayEvent, VersionComplete, VersionPulled
from laminar_py.relay.wire.transport import IPC, RelayKeys

CHUNK_BYTES = 4 * 2**20


class NodeWorker(Worker):
    """A node that listens from here on, e.g. `NodeWorker(folder, "root", keys=None, parents=[], ipc=True)`."""

    def __init__(
        self, folder: Path, name: str, *, keys: RelayKeys | None, parents: Sequence[str], ipc: bool
    ) -> None:
        host = f"{IPC}{folder / name}.ipc" if ipc else "127.0.0.1"
        super().__init__(relay, name, folder / name, keys, parents, host, CHUNK_BYTES)
        self.endpoint = self.hear(str)

    def completed(self, version: int) -> tuple[float, VersionComplete]:
        """When the version was complete and verified there, and the report; ask for each in order."""
        while True:
            moment, event = self.hear(tuple)
            assert isinstance(event, VersionComplete), f"waited for version {version}: {event}"
            if event.version == version:
                return moment, event


def relay(
    pipe: Connection,
    name: str,
    store: Path,
    keys: RelayKeys | None,
    parents: Sequence[str],
    host: str,
    chunk_bytes: int,
) -> None:
    """A node; says its endpoint, then all that it reports of versions and parents, with the time."""

    def report(event: RelayEvent) -> None:
        if not isinstance(event, VersionPulled):
            pipe.send((time.monotonic(), event))

    async def run() -> None:
        node = RelayNode(
            name, store=store, keys=keys, parents=parents, host=host, chunk_bytes=chunk_bytes, emit=report
        )
        await node.start()
        pipe.send(node.endpoint)
        await node.run()

    asyncio.run(run())
