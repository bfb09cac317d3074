"""The relay over many hosts with narrow links: each shape of tree beside its bound, a killed node, and gloo.

A host is a network namespace. A time runs from the root's announcement until the last host has verified the
version, with CURVE, and no chunk travels as a delta. W, the rate in the bounds, is the rate of a bare TCP socket
between two of the hosts in the same run.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from laminar_lab.bench.processes import PATIENCE_S
from laminar_lab.bench.relay.gloo import GLOO, Gloo
from laminar_lab.bench.relay.hop import VERSION_BYTES, bare_socket
from laminar_lab.bench.relay.namespaces import INTERFACE, Network, require, shared_folder
from laminar_lab.bench.relay.tree import Tree
from laminar_lab.bench.report import Row, load_now, log_line
from laminar_py.config.cluster import TopologyKind
from laminar_py.relay import (
    HEADER_BYTES,
    MIN_CHUNK_BYTES,
    Broadcast,
    Choice,
    Links,
    RelayKeys,
    Shape,
    broadcast_s,
    choose_tree,
    file_digest,
    grow_tree,
)

ROWS = (
    "star_over_bound chain_over_bound kary2_over_bound auto_over_bound recovery_over_undisturbed "
    "gloo_8hosts_over_ours"
)
MIB = 2**20
SMALL_BYTES = 2 * MIB  # in chunks of the least size, to find the fixed cost of a chunk
WARM_BYTES = MIB  # of the version before a timed one; another size, so that no chunk is a delta against it
FILE = "model-00001.safetensors"
FANOUT = 2
MOST_ROUNDS = 3  # each takes a minute
GLOO_PORT = 29500  # in a namespace where no other program listens
POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsRig:
    """Hosts, and the common settings of all measurements on them."""

    network: Network
    folder: Path  # in shared memory
    num_bytes: int  # of a version
    repeats: int

    @property
    def zones(self) -> Sequence[str]:
        """[N] One zone."""
        return [""] * len(self.network.hosts)


@dataclass(frozen=True, slots=True)
class Recovery:
    """A broadcast in which a node was killed, e.g. `Recovery(6.8, 1.0, 0.001)`."""

    seconds: float
    noticed_s: float  # from the kill until the last of its children turned to another node
    stall_s: float  # of the learner in the publish after it


@dataclass(slots=True)
class ShapeRounds:
    """Rounds of one shape of tree."""

    choice: Choice
    bound_s: float
    whole: list[float] = field(default_factory=list)  # seconds
    broken: list[Recovery] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Undisturbed."""
        return median(self.whole)

    @property
    def recovery(self) -> float:
        """Disturbed over undisturbed time, round by round."""
        pairs = zip(self.broken, self.whole, strict=True)
        return median(broken.seconds / whole for broken, whole in pairs)

    def recovery_words(self) -> str:
        """Describe the recoveries."""
        seconds = median(broken.seconds for broken in self.broken)
        noticed_s = median(broken.noticed_s for broken in self.broken)
        stall_s = median(broken.stall_s for broken in self.broken)
        return (
            f"{seconds:.2f} s instead of {self.seconds:.2f} s, noticed after {noticed_s:.2f} s, the others"
            f" byte-identical; the next publish stalled the learner {stall_s * 1e3:.1f} ms and reached them"
        )


def rows(
    *, repeats: int = 7, num_hosts: int = 8, num_bytes: int = VERSION_BYTES, mbit_per_s: int = 400
) -> list[Row]:
    """Measure each figure, in `MOST_ROUNDS` rounds at most. Takes minutes.

    Raises `ConfigError` without root, iproute2 or network namespaces.
    """
    require((2 * num_hosts + 2) * num_bytes)  # two versions a host, the learner's, a spare
    torch.set_num_threads(1)
    with Network(num_hosts, mbit_per_s=mbit_per_s) as network, shared_folder() as folder:
        rounds = min(repeats, MOST_ROUNDS)
        rig = HostsRig(network=network, folder=folder, num_bytes=num_bytes, repeats=rounds)
        links = _measure_links(rig)
        setting = (
            f"{num_hosts} hosts (network namespaces on one machine, {load_now()} at the start), tbf {mbit_per_s}"
            f" Mbit/s each way, {num_bytes / MIB:g} MiB; W {links.bytes_per_s / 1e6:.1f} MB/s,"
            f" {links.overhead_s * 1e6:.0f} us a chunk and hop"
        )
        log_line(setting)
        shapes = {kind: _measure_shape(rig, kind, links) for kind in TopologyKind}
        return [
            *(_bound_row(kind, shape, setting) for kind, shape in shapes.items()),
            *_recovery_rows(shapes, setting),
            _gloo_row(rig, shapes[TopologyKind.AUTO].seconds, setting),
        ]


# ---- rows


def _bound_row(kind: TopologyKind, shape: ShapeRounds, setting: str) -> Row:
    times = shape.whole
    tree = f"{shape.choice.shape.describe(num_zones=1)}, chunks of {shape.choice.chunk_bytes / MIB:.2f} MiB"
    conditions = (
        f"{setting}; {tree}, CURVE; {median(times):.2f} s, bound {shape.bound_s:.2f} s; median of {len(times)}"
        f" ({min(times):.2f} to {max(times):.2f} s)"
    )
    name = f"kary{FANOUT}" if kind is TopologyKind.KARY else kind.value
    return Row(f"{name}_over_bound", median(times) / shape.bound_s, "x", conditions)


def _recovery_rows(shapes: dict[TopologyKind, ShapeRounds], setting: str) -> list[Row]:
    """Make the row of the kill; none where so few hosts have no node with both a parent and a child."""
    chain, kary = shapes[TopologyKind.CHAIN], shapes[TopologyKind.KARY]
    if not chain.broken:
        return []
    conditions = f"{setting}; kill -9 of an inner node of a chain when it had half; {chain.recovery_words()}"
    if kary.broken:
        conditions += f"; of a tree of fan-out {FANOUT}: {kary.recovery:.2f} x, {kary.recovery_words()}"
    return [Row("recovery_over_undisturbed", chain.recovery, "x", conditions)]


# ---- ours


@contextmanager
def _open_tree(rig: HostsRig, shape: Shape, chunk_bytes: int) -> Iterator[Tree]:
    """Open a tree of that shape over all hosts."""
    topology = grow_tree(shape, rig.zones)
    with (
        TemporaryDirectory(dir=rig.folder) as name,
        Tree(
            Path(name) / "tree",
            keys=RelayKeys.generate(),
            topology=topology,
            network=rig.network,
            chunk_bytes=chunk_bytes,
        ) as tree,
    ):
        yield tree


def _publish(tree: Tree, num_bytes: int) -> float:
    """Publish random bytes, so that a version has that size with its header. Returns the stall in seconds."""
    weights = torch.randint(0, 256, (num_bytes - HEADER_BYTES,), dtype=torch.uint8)
    return tree.publish([("weights", weights)])


def _await_all(tree: Tree) -> float:
    seconds, report = tree.await_last()
    assert report.wire_bytes == report.num_bytes, f"{report.node} got deltas: {report}"
    return seconds


def _broadcast(tree: Tree, num_bytes: int) -> float:
    """Return the seconds until the last host has a version of that size, after a small version that warms up."""
    _publish(tree, WARM_BYTES)
    tree.await_last()
    _publish(tree, num_bytes)
    return _await_all(tree)


def _recover(tree: Tree, num_bytes: int, victim: int) -> Recovery:
    """Broadcast, and kill a node when it has half of the version; then publish a small version to the others."""
    _publish(tree, WARM_BYTES)
    tree.await_last()
    _publish(tree, num_bytes)
    dying = tree.nodes.pop(victim)
    _await_bytes(dying.store / f"{tree.version_name}.part" / FILE, num_bytes // 2)
    killed = time.monotonic()
    dying.kill()
    seconds = _await_all(tree)
    files = [node.store / tree.version_name / FILE for node in tree.nodes.values()]
    digests = {file_digest(path, chunk_bytes=WARM_BYTES) for path in files}
    assert len(digests) == 1, f"{tree.version_name} differs between hosts: {digests}"
    noticed = max(min(later) for node in tree.nodes.values() if (later := node.lost_since(killed)))
    stall_s = _publish(tree, WARM_BYTES)
    tree.await_last()
    return Recovery(seconds, noticed - killed, stall_s)


def _await_bytes(path: Path, num_bytes: int) -> None:
    """Wait until so much of an arriving file is there."""
    deadline = time.monotonic() + PATIENCE_S
    while not path.exists() or path.stat().st_blocks * 512 < num_bytes:
        assert time.monotonic() < deadline, f"{path} did not grow to {num_bytes} bytes"
        time.sleep(POLL_S)


def _measure_links(rig: HostsRig) -> Links:
    """Measure W with a bare socket, and the cost of a chunk on a hop with a chain over the hosts."""
    network = rig.network
    with bare_socket(rig.folder, rig.num_bytes, start=network.start, host=network.address(0)) as bare:
        bytes_per_s = rig.num_bytes / median(bare(number) for number in range(rig.repeats))
    with _open_tree(rig, Shape(1), MIN_CHUNK_BYTES) as chain:
        seconds = _broadcast(chain, SMALL_BYTES)
    num_paces = SMALL_BYTES // MIN_CHUNK_BYTES + grow_tree(Shape(1), rig.zones).depth - 1
    return Links(bytes_per_s, max(0.0, seconds / num_paces - MIN_CHUNK_BYTES / bytes_per_s))


def _measure_shape(rig: HostsRig, kind: TopologyKind, links: Links) -> ShapeRounds:
    broadcast = Broadcast(rig.num_bytes)
    choice = choose_tree(kind, fanout=FANOUT, zones=rig.zones, broadcast=broadcast, links=links)
    topology = grow_tree(choice.shape, rig.zones)
    bound_s = rig.num_bytes / links.bytes_per_s
    if kind is TopologyKind.STAR:
        bound_s *= len(rig.zones) - 1
    elif kind is TopologyKind.KARY:
        bare = Links(links.bytes_per_s, 0.0)
        bound_s = broadcast_s(topology, rig.zones, broadcast, bare, chunk_bytes=choice.chunk_bytes)
    inner = [node for node in topology.downward if node and topology.children(node)]
    shape = ShapeRounds(choice, bound_s)
    for _ in range(1 if kind is TopologyKind.STAR else rig.repeats):
        with _open_tree(rig, choice.shape, choice.chunk_bytes) as tree:
            shape.whole.append(_broadcast(tree, rig.num_bytes))
            if inner and kind in (TopologyKind.CHAIN, TopologyKind.KARY):
                shape.broken.append(_recover(tree, rig.num_bytes, inner[len(inner) // 2]))
        log_line(f"{kind} {shape.whole[-1]:.2f} of {bound_s:.2f} s, {shape.broken[-1:]}")
    return shape


# ---- gloo


def _gloo_row(rig: HostsRig, auto_s: float, setting: str) -> Row:
    gloo = Gloo(
        count=len(rig.zones),
        num_bytes=rig.num_bytes,
        tensor_bytes=rig.num_bytes,
        rendezvous=f"tcp://{rig.network.address(0)}:{GLOO_PORT}",
        interface=INTERFACE,
    )
    with gloo.side(rig.network.start) as measure:
        seconds = median(measure(number) for number in range(rig.repeats))
    conditions = (
        f"{setting}; gloo: {GLOO}, {seconds:.2f} s until the last host has touched every page; `auto`,"
        f" CURVE, {auto_s:.2f} s from the root's announcement until the last host has verified it; median of"
        f" {rig.repeats}"
    )
    log_line(f"gloo {seconds:.2f} s")
    return Row(f"gloo_{len(rig.zones)}hosts_over_ours", seconds / auto_s, "x", conditions)
