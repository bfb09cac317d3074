"""A tree of relays over hosts with narrow links, and a learner beside its root: how long a version takes.

Used by relay_hosts.py. Invariant: a time runs from the root's announcement until the last host has verified what
the learner published, with CURVE, and no chunk travels as a delta.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from laminar_py.bench.relay_host import HostWorker, RelayHost, learn
from laminar_py.bench.relay_network import Network
from laminar_py.records.weights import Published
from laminar_py.relay.planning.topology import Shape, Topology, grow
from laminar_py.relay.store.digests import file_digest
from laminar_py.relay.store.version import folder_name
from laminar_py.relay.wire.transport import RelayKeys

WARM_BYTES = 2**20  # of the version before each that is timed; of another size, so nothing is a delta against it
FILE = "model-00001.safetensors"
POLL_S = 0.005
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """What all parts share."""

    network: Network
    folder: Path  # in shared memory
    num_bytes: int  # of a version
    repeats: int
    tell: Callable[[str], None]

    @property
    def zones(self) -> Sequence[str]:
        """[N] One zone."""
        return [""] * len(self.network.hosts)

    def worker(self, host: int, work: Callable[..., None], *arguments: object) -> HostWorker:
        """A process on that host."""
        return HostWorker(self.network.hosts[host], work, *arguments)


@dataclass(frozen=True, slots=True)
class Timed:
    """A broadcast, e.g. `Timed(5.9, busy=0.8, own=0.7)`."""

    seconds: float
    busy: float  # share of this machine's cores, whoever used them
    own: float  # share that the benchmark's processes used


@dataclass(frozen=True, slots=True)
class Recovery:
    """A broadcast in which a node was killed, e.g. `Recovery(6.8, 1.0, 0.001)`."""

    seconds: float
    noticed_s: float  # from the kill until the last of its children turned to another node
    stall_s: float  # of the learner in the publish after it


@dataclass(slots=True)
class Fleet:
    """A tree of relays, one on each host, and a learner beside the root."""

    tree: Topology
    nodes: dict[int, RelayHost]
    learner: HostWorker
    _version: int = 0

    def broadcast(self, num_bytes: int) -> Timed:
        """Until the last host has a version of that size, all warmed by a small one."""
        self._arrived(self._publish(WARM_BYTES))
        published = self._publish(num_bytes)
        clock = Clock(self.nodes.values())  # what the learner did before is not counted
        return clock.stop(self._arrived(published))

    def recover(self, num_bytes: int, victim: int) -> Recovery:
        """The same while that node is killed when half has arrived there; then a small one goes to the others."""
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
def fleet(rig: Rig, shape: Shape, chunk_bytes: int) -> Iterator[Fleet]:
    """A tree of that shape, all up, but not yet attached."""
    keys, tree = RelayKeys.generate(), grow(shape, rig.zones)
    nodes: dict[int, RelayHost] = {}
    with TemporaryDirectory(dir=rig.folder) as name, ExitStack() as stack:
        folder = Path(name)
        for number in tree.downward:
            node = RelayHost(
                rig.network.hosts[number],
                f"relay-{number}",
                store=folder / str(number),
                keys=keys,
                parents=[nodes[ancestor].endpoint for ancestor in tree.ancestors(number)],
                host=rig.network.address(number),
                chunk_bytes=chunk_bytes,
            )
            nodes[number] = stack.enter_context(node)
        learner = rig.worker(0, learn, nodes[0].store, nodes[0].endpoint, keys, chunk_bytes)
        yield Fleet(tree, nodes, stack.enter_context(learner))


def _await_bytes(path: Path, num_bytes: int) -> None:
    """Until so much of a file that arrives is there."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or path.stat().st_blocks * 512 < num_bytes:
        assert time.monotonic() < deadline, f"{path} did not grow to {num_bytes} bytes"
        time.sleep(POLL_S)


class Clock:
    """How busy the machine's cores are between construction and `stop`, and with those workers."""

    def __init__(self, workers: Iterable[HostWorker]) -> None:
        self._workers = list(workers)
        self._began = self._ticks()

    def stop(self, seconds: float) -> Timed:
        """With a time that was measured elsewhere."""
        total, idle, own = (now - then for now, then in zip(self._ticks(), self._began, strict=True))
        return Timed(seconds, busy=1 - idle / max(1, total), own=own / max(1, total))

    def _ticks(self) -> tuple[int, int, int]:
        """(all, idle, the workers') of all cores since the start."""
        machine = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return sum(machine), machine[3] + machine[4], sum(worker.cpu_ticks() for worker in self._workers)
