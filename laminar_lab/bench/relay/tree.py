"""A root and its child, each in a process of its own; this process publishes to the root.

`hop` and `experiments/gpu/publish.py` measure with it. The time of a report is taken in the process that sends it.
A version is published only after both nodes have the version before, so no version overtakes another.
"""

import asyncio
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from torch import Tensor

from laminar_lab.bench.processes import PATIENCE_S, Worker
from laminar_py.relay import IPC, SPARE, Publisher, RelayEvent, RelayKeys, RelayNode, VersionComplete

CHUNK_BYTES = 4 * 2**20
WARM_VERSIONS = 4  # the fourth is the first to be written over the pages of another
LOCAL = "127.0.0.1"


class NodeWorker(Worker):
    """A node that listens as soon as it is made, e.g. `NodeWorker(folder / "root", keys=None, host=LOCAL)`."""

    def __init__(self, store: Path, *, keys: RelayKeys | None, host: str, parents: Sequence[str] = ()) -> None:
        super().__init__(partial(_relay, store=store, keys=keys, host=host, parents=parents))
        self.store = store
        self.endpoint = self.receive(str)

    def completed(self, version: int) -> tuple[float, VersionComplete]:
        """Wait until the node has verified a version; return the moment and its report.

        Ask for versions in order.
        """
        while True:
            moment, event = self.receive(tuple)
            assert isinstance(event, VersionComplete), f"waited for version {version}: {event}"
            if event.version == version:
                return moment, event


def _relay(pipe: Connection, *, store: Path, keys: RelayKeys | None, host: str, parents: Sequence[str]) -> None:
    """Run a node. Sends its endpoint, then the time and the report of each version that the node has verified."""

    def report(event: RelayEvent) -> None:
        if isinstance(event, VersionComplete):
            pipe.send((time.monotonic(), event))

    async def run() -> None:
        node = RelayNode(
            store.name, store=store, keys=keys, parents=parents, host=host, chunk_bytes=CHUNK_BYTES, emit=report
        )
        await node.start()
        pipe.send(node.endpoint)
        await node.run()

    asyncio.run(run())


class Tree:
    """A publisher, its root and the root's child, e.g. `Tree(folder, keys=None, ipc=True)`.

    Sockets and stores lie in `folder`. The end of the context ends both nodes.
    """

    def __init__(self, folder: Path, *, keys: RelayKeys | None, ipc: bool = False) -> None:
        folder.mkdir()
        self._version = 0
        hosts = [f"{IPC}{folder}/{name}.ipc" if ipc else LOCAL for name in ("root", "child")]
        with ExitStack() as stack:
            self._root = stack.enter_context(NodeWorker(folder / "root", keys=keys, host=hosts[0]))
            child = NodeWorker(folder / "child", keys=keys, host=hosts[1], parents=[self._root.endpoint])
            self._child = stack.enter_context(child)
            self._publisher = Publisher(self._root.store, chunk_bytes=CHUNK_BYTES)
            stack.callback(self._publisher.close)
            self._stack = stack.pop_all()

    def publish(self, tensors: Iterable[tuple[str, Tensor]]) -> float:
        """Publish the next version. Returns the stall in seconds; threads and processes do the rest."""
        self._version += 1
        return self._publisher.publish(self._version, tensors)

    def await_last(self) -> tuple[float, VersionComplete]:
        """Wait until both nodes have the newest version.

        Returns the seconds from complete at the root until complete at the child, and the child's report.
        """
        published = self._publisher.completed(self._version)
        began, _ = self._root.completed(self._version)
        ended, report = self._child.completed(self._version)
        assert report.digest == published.digest, f"{report.node} has another version {self._version}"
        return ended - began, report

    def await_spare(self) -> None:
        """Wait until the root has put aside warm pages for the next version, after the first few."""
        deadline = time.monotonic() + PATIENCE_S
        while self._version >= WARM_VERSIONS - 1 and not (self._root.store / SPARE).exists():
            assert time.monotonic() < deadline, f"{self._root.store} has no spare"
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
