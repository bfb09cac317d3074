"""Relays for measurements: a node in a process of its own, and a small tree with its publisher here.

Invariant: times are taken in a node's process, when the node reports; in a `Tree` a version is published only when
the one before is complete at the last node, so nothing is overtaken.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laminar_lab.bench.processes import PATIENCE_S, Worker
from laminar_py.relay import (
    IPC,
    SPARE,
    ParentLost,
    Publisher,
    RelayEvent,
    RelayKeys,
    RelayNode,
    VersionComplete,
    VersionPulled,
    folder_name,
)

CHUNK_BYTES = 4 * 2**20
WARM_VERSIONS = 4  # the fourth is the first to be written over the pages of another
LOCAL = "127.0.0.1"

Bytes = npt.NDArray[np.uint8]


class NodeWorker(Worker):
    """A node that listens from here on, e.g. `NodeWorker(folder / "root", keys=None)`; `store` names it."""

    def __init__(
        self,
        store: Path,
        *,
        keys: RelayKeys | None,
        parents: Sequence[str] = (),
        host: str = LOCAL,
        chunk_bytes: int = CHUNK_BYTES,
        within: Callable[[], None] | None = None,
    ) -> None:
        relay = partial(_relay, store=store, keys=keys, parents=parents, host=host, chunk_bytes=chunk_bytes)
        super().__init__(relay, within=within)
        self.store = store
        self.endpoint = self.hear(str)
        self._lost: list[float] = []  # when a parent was given up

    def completed(self, version: int) -> tuple[float, VersionComplete]:
        """Moment at which the version was complete and verified there, and the report; ask for each in order."""
        while True:
            moment, event = self.hear(tuple)
            if isinstance(event, ParentLost):
                self._lost.append(moment)
                continue
            assert isinstance(event, VersionComplete), f"waited for version {version}: {event}"
            if event.version == version:
                return moment, event

    def lost_since(self, moment: float) -> list[float]:
        """Later moments at which a parent was given up, as far as `completed` has read."""
        return [lost for lost in self._lost if lost > moment]


def _relay(
    pipe: Connection, *, store: Path, keys: RelayKeys | None, parents: Sequence[str], host: str, chunk_bytes: int
) -> None:
    """Run a node; says its endpoint, then each report on versions and parents, with the time."""

    def report(event: RelayEvent) -> None:
        if not isinstance(event, VersionPulled):
            pipe.send((time.monotonic(), event))

    async def run() -> None:
        node = RelayNode(
            store.name, store=store, keys=keys, parents=parents, host=host, chunk_bytes=chunk_bytes, emit=report
        )
        await node.start()
        pipe.send(node.endpoint)
        await node.run()

    asyncio.run(run())


class Tree:
    """A root and perhaps a leaf on this host, e.g. `Tree(folder, keys=None, leaf=True, ipc=True)`.

    Sockets and stores lie in `folder`.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keys: RelayKeys | None,
        leaf: bool,
        ipc: bool = False,
        adapter_config: bytes | None = None,
    ) -> None:
        folder.mkdir()
        self._version = 0
        with ExitStack() as stack:

            def add(name: str, parents: Sequence[str] = ()) -> NodeWorker:
                host = f"{IPC}{folder / name}.ipc" if ipc else LOCAL
                return stack.enter_context(NodeWorker(folder / name, keys=keys, parents=parents, host=host))

            self.root = add("root")
            self.last = add("leaf", [self.root.endpoint]) if leaf else self.root
            self._publisher = Publisher(self.root.store, chunk_bytes=CHUNK_BYTES, adapter_config=adapter_config)
            stack.callback(self._publisher.close)
            self._stack = stack.pop_all()

    @property
    def last_folder(self) -> Path:
        """Folder of the newest version at the last node, once that is complete."""
        return self.last.store / folder_name(self._version)

    def publish(self, tensors: Iterable[tuple[str, Tensor]]) -> float:
        """Publish the next version. Returns the stall in seconds; the rest goes on in threads and processes."""
        self._version += 1
        return self._publisher.publish(self._version, tensors)

    def await_last(self) -> tuple[float, VersionComplete]:
        """Seconds from complete at the root until complete at the last node, and that node's report."""
        self._publisher.completed(self._version)
        began, report = self.root.completed(self._version)
        ended = began
        if self.last is not self.root:
            ended, report = self.last.completed(self._version)
        return ended - began, report

    def await_spare(self) -> None:
        """Wait until the root has put aside warm pages for the next version, after the first few."""
        deadline = time.monotonic() + PATIENCE_S
        while self._version >= WARM_VERSIONS - 1 and not (self.root.store / SPARE).exists():
            assert time.monotonic() < deadline, f"{self.root.store} has no spare"
            time.sleep(0.01)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()


def raw(tensor: Tensor) -> Bytes:
    """Bytes of a tensor, not copied; the last dimension is as much longer as an element has bytes."""
    data: Bytes = tensor.view(torch.uint8).numpy()
    return data


def copy_s(pairs: Sequence[tuple[Bytes, Bytes]]) -> float:
    """Seconds of a plain copy from the first to the second of each pair."""
    began = time.perf_counter()
    for source, target in pairs:
        np.copyto(target, source)
    return time.perf_counter() - began
