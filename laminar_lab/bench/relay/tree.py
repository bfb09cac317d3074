"""A tree of relays for measurements, each node in a process of its own; this process publishes to the root.

Times are taken in the process of a node when the node reports. A version is published only after every node has
the one before, so that no version overtakes another.
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
from laminar_lab.bench.relay.namespaces import Network
from laminar_py.relay import (
    IPC,
    SPARE,
    ParentLost,
    Publisher,
    RelayEvent,
    RelayKeys,
    RelayNode,
    Topology,
    VersionComplete,
    VersionPulled,
    folder_name,
)

CHUNK_BYTES = 4 * 2**20
WARM_VERSIONS = 4  # the fourth is the first to be written over the pages of another
LOCAL = "127.0.0.1"
ROOT, ROOT_AND_LEAF = Topology((None,)), Topology((None, 0))

Bytes = npt.NDArray[np.uint8]


class NodeWorker(Worker):
    """A node that listens as soon as it is made, e.g. `NodeWorker(folder / "root", keys=None)`."""

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
        self.endpoint = self.receive(str)
        self._lost: list[float] = []  # moments at which the node gave up a parent

    def completed(self, version: int) -> tuple[float, VersionComplete]:
        """Wait until the node has verified a version; return the moment and its report.

        Ask for versions in order.
        """
        while True:
            moment, event = self.receive(tuple)
            if isinstance(event, ParentLost):
                self._lost.append(moment)
                continue
            assert isinstance(event, VersionComplete), f"waited for version {version}: {event}"
            if event.version == version:
                return moment, event

    def lost_since(self, moment: float) -> list[float]:
        """Return later moments at which the node gave up a parent, as far as `completed` has read."""
        return [lost for lost in self._lost if lost > moment]


def _relay(
    pipe: Connection, *, store: Path, keys: RelayKeys | None, parents: Sequence[str], host: str, chunk_bytes: int
) -> None:
    """Run a node. Sends its endpoint, then each report on versions and parents with the time."""

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
    """Relays of a topology on this host or on the hosts of a `network`, e.g. `Tree(folder, keys=None, ipc=True)`.

    Sockets and stores lie in `folder`. A context that ends the nodes.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keys: RelayKeys | None,
        topology: Topology = ROOT_AND_LEAF,
        network: Network | None = None,
        ipc: bool = False,
        chunk_bytes: int = CHUNK_BYTES,
        adapter_config: bytes | None = None,
    ) -> None:
        folder.mkdir()
        self._version = 0
        self.nodes: dict[int, NodeWorker] = {}
        with ExitStack() as stack:
            for number in topology.downward:
                host = f"{IPC}{folder}/relay-{number}.ipc" if ipc else LOCAL
                node = NodeWorker(
                    folder / f"relay-{number}",
                    keys=keys,
                    parents=[self.nodes[ancestor].endpoint for ancestor in topology.ancestors(number)],
                    host=host if network is None else network.address(number),
                    chunk_bytes=chunk_bytes,
                    within=None if network is None else network.entry(number),
                )
                self.nodes[number] = stack.enter_context(node)
            self.root = self.nodes[0]
            self._publisher = Publisher(self.root.store, chunk_bytes=chunk_bytes, adapter_config=adapter_config)
            stack.callback(self._publisher.close)
            self._stack = stack.pop_all()

    @property
    def version_name(self) -> str:
        """Folder of the newest version in the store of each node that has it."""
        return folder_name(self._version)

    def publish(self, tensors: Iterable[tuple[str, Tensor]]) -> float:
        """Publish the next version. Returns the stall in seconds; threads and processes do the rest."""
        self._version += 1
        return self._publisher.publish(self._version, tensors)

    def await_last(self) -> tuple[float, VersionComplete]:
        """Wait until all nodes have the version.

        Returns the seconds from complete at the root until complete at the last node, and the report of the node
        with the highest number.
        """
        published = self._publisher.completed(self._version)
        began, report = self.root.completed(self._version)
        ended = began
        for number, node in self.nodes.items():
            if number:
                moment, report = node.completed(self._version)
                assert report.digest == published.digest, f"{report.node} has another version {self._version}"
                ended = max(ended, moment)
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
    """View a tensor as bytes; the last dimension is as many times longer as an element has bytes."""
    data: Bytes = tensor.view(torch.uint8).numpy()
    return data


def copy_s(pairs: Sequence[tuple[Bytes, Bytes]]) -> float:
    """Copy the first of each pair to the second and return the seconds."""
    began = time.perf_counter()
    for source, target in pairs:
        np.copyto(target, source)
    return time.perf_counter() - began
