"""A tree of relays over hosts with narrow links, and a learner beside its root: how long a version takes.

Used by `hosts`. Invariant: a time runs from the root's announcement until the last host has verified what the
learner published, with CURVE, and no chunk travels as a delta.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import torch

from laminar_lab.bench.processes import PATIENCE_S, Worker
from laminar_lab.bench.relay.namespaces import Network
from laminar_lab.bench.relay.tree import NodeWorker
from laminar_lab.bench.report import Tell
from laminar_py.records.weights import Published
from laminar_py.relay import (
    HEADER_BYTES,
    Publisher,
    RelayKeys,
    Shape,
    Topology,
    file_digest,
    folder_name,
    grow_tree,
)

WARM_BYTES = 2**20  # of the version before each that is timed; of another size, so nothing is a delta against it
FILE = "model-00001.safetensors"
POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsRig:
    """Hosts, and what each measurement on them shares."""

    network: Network
    folder: Path  # in shared memory
    num_bytes: int  # of a version
    repeats: int
    tell: Tell

    @property
    def zones(self) -> Sequence[str]:
        """[N] One zone."""
        return [""] * len(self.network.hosts)


@dataclass(frozen=True, slots=True)
class TimedBroadcast:
    """A broadcast, e.g. `TimedBroadcast(5.9, busy=0.8, own=0.7)`."""

    seconds: float
    busy: float  # share of this machine's cores, whoever used them
    own: float  # share that the processes of the hosts used


@dataclass(frozen=True, slots=True)
class Recovery:
    """A broadcast in which a node was killed, e.g. `Recovery(6.8, 1.0, 0.001)`."""

    seconds: float
    noticed_s: float  # from the kill until the last of its children turned to another node
    stall_s: float  # of the learner in the publish after it


@dataclass(slots=True)
class RelayFleet:
    """A tree of relays, one on each host, and a learner beside the root."""

    tree: Topology
    nodes: dict[int, NodeWorker]
    learner: Worker
    _version: int = 0

    def broadcast(self, num_bytes: int) -> TimedBroadcast:
        """Time until the last host has a version of that size, after a small one that warms up."""
        self._arrived(self._publish(WARM_BYTES))
        published = self._publish(num_bytes)
        watch = CpuWatch(self.nodes.values())  # what the learner did before is not counted
        return watch.stop(self._arrived(published))

    def recover(self, num_bytes: int, victim: int) -> Recovery:
        """Broadcast, and kill a node when half has arrived there; then a small version goes to the others."""
        self._arrived(self._publish(WARM_BYTES))
        published = self._publish(num_bytes)
        dying = self.nodes.pop(victim)
        _await_bytes(dying.store / f"{folder_name(published.version)}.part" / FILE, num_bytes // 2)
        killed = time.monotonic()
        dying.kill()
        seconds = self._arrived(published)
        files = [node.store / folder_name(published.version) / FILE for node in self.nodes.values()]
        digests = {file_digest(path, chunk_bytes=WARM_BYTES) for path in files}
        assert len(digests) == 1, f"version {published.version} differs between hosts: {digests}"
        noticed = max(min(later) for node in self.nodes.values() if (later := node.lost_since(killed)))
        following = self._publish(WARM_BYTES)
        self._arrived(following)
        return Recovery(seconds, noticed - killed, following.stall_s)

    def _publish(self, num_bytes: int) -> Published:
        self._version += 1
        return self.learner.ask((self._version, num_bytes), Published)

    def _arrived(self, published: Published) -> float:
        """Seconds from the root's announcement until the last has it."""
        began, _ = self.nodes[0].completed(published.version)
        ended = began
        for number, node in self.nodes.items():
            if number:
                moment, event = node.completed(published.version)
                assert event.digest == published.digest, f"{event.node} has another version {published.version}"
                assert event.wire_bytes == published.num_bytes, f"{event.node} got deltas of {published.version}"
                ended = max(ended, moment)
        return ended - began


@contextmanager
def fleet(rig: HostsRig, shape: Shape, chunk_bytes: int) -> Iterator[RelayFleet]:
    """A tree of that shape, all up, but not yet attached."""
    keys, tree = RelayKeys.generate(), grow_tree(shape, rig.zones)
    nodes: dict[int, NodeWorker] = {}
    with TemporaryDirectory(dir=rig.folder) as name, ExitStack() as stack:
        folder = Path(name)
        for number in tree.downward:
            node = NodeWorker(
                folder / f"relay-{number}",
                keys=keys,
                parents=[nodes[ancestor].endpoint for ancestor in tree.ancestors(number)],
                host=rig.network.address(number),
                chunk_bytes=chunk_bytes,
                within=rig.network.entry(number),
            )
            nodes[number] = stack.enter_context(node)
        work = partial(_learn, store=nodes[0].store, chunk_bytes=chunk_bytes)
        learner = rig.network.start(0, work)
        yield RelayFleet(tree, nodes, stack.enter_context(learner))


def _learn(pipe: Connection, *, store: Path, chunk_bytes: int) -> None:
    """A learner: told (version, bytes), publishes that many random ones and says `Published`."""
    torch.set_num_threads(1)
    publisher = Publisher(store, chunk_bytes=chunk_bytes)
    while True:
        version, num_bytes = pipe.recv()
        generator = torch.Generator().manual_seed(version)
        size = (num_bytes - HEADER_BYTES,)
        weights = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
        publisher.publish(version, [("weights", weights)])
        pipe.send(publisher.completed(version))


def _await_bytes(path: Path, num_bytes: int) -> None:
    """Wait until so much of an arriving file is there."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or path.stat().st_blocks * 512 < num_bytes:
        assert time.monotonic() < deadline, f"{path} did not grow_tree to {num_bytes} bytes"
        time.sleep(POLL_S)


class CpuWatch:
    """How busy the machine's cores are from construction to `stop`, with whatever and with given workers."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        self._processes = [psutil.Process(worker.pid) for worker in workers]
        self._began, self._used_s = time.monotonic(), self._count()
        psutil.cpu_percent()

    def stop(self, seconds: float) -> TimedBroadcast:
        """Shares of the cores while this watched, beside a time that was measured elsewhere."""
        watched_s = time.monotonic() - self._began
        own = (self._count() - self._used_s) / (watched_s * (os.cpu_count() or 1))
        return TimedBroadcast(seconds, busy=psutil.cpu_percent() / 100, own=own)

    def _count(self) -> float:
        """CPU seconds of the workers."""
        return sum(process.cpu_times().user + process.cpu_times().system for process in self._processes)
