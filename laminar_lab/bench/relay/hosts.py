"""The relay over many hosts with narrow links: each shape beside its bound, a killed node, gloo and HTTP.

A host is a network namespace.
Invariant: W, by which bounds are told, is what a bare TCP socket moves between two of the hosts in the same run.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from laminar_lab.bench.relay.fleet import CpuWatch, HostsRig, Recovery, TimedBroadcast, fleet
from laminar_lab.bench.relay.hop import VERSION_BYTES, bare_socket
from laminar_lab.bench.relay.namespaces import INTERFACE, Network, require, shared_folder
from laminar_lab.bench.relay.peers import Gloo, Peers, http_side
from laminar_lab.bench.report import Row, Tell
from laminar_py.config.cluster import TopologyKind
from laminar_py.relay import MIN_CHUNK_BYTES, Broadcast, Choice, Links, Shape, broadcast_s, choose_tree, grow_tree

ROWS = (
    "W star_over_bound chain_over_bound kary2_over_bound auto_over_bound recovery_over_undisturbed "
    "gloo_8hosts_over_ours http_8hosts_over_ours"
)
MIB = 2**20
SMALL_BYTES = 2 * MIB  # in chunks of the least size, to find what a chunk costs whatever its size
FANOUT = 2
SATURATED = 0.9  # share of busy cores above which processes wait for each other
MOST_ROUNDS = 3  # each takes a minute
GLOO_PORT = 29500  # in a namespace where nothing else listens


@dataclass(slots=True)
class ShapeRounds:
    """Rounds of one shape of tree."""

    choice: Choice
    bound_s: float
    whole: list[TimedBroadcast] = field(default_factory=list)
    broken: list[Recovery] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Undisturbed."""
        return median(timed.seconds for timed in self.whole)

    @property
    def recovery(self) -> float:
        """Disturbed over undisturbed time, round by round."""
        pairs = zip(self.broken, self.whole, strict=True)
        return median(broken.seconds / whole.seconds for broken, whole in pairs)


def rows(
    *, repeats: int = 7, tell: Tell, num_hosts: int = 8, num_bytes: int = VERSION_BYTES, mbit_per_s: int = 400
) -> list[Row]:
    """Measure each figure, in `MOST_ROUNDS` rounds at most; `tell` gets a line for each. Takes minutes.

    Raises `ConfigError` where there can be no such hosts: without root, iproute2 or network namespaces.
    """
    require((2 * num_hosts + 2) * num_bytes)  # two versions a host, the learner's, a spare
    with Network(num_hosts, mbit_per_s=mbit_per_s) as network, shared_folder() as folder:
        rounds = min(repeats, MOST_ROUNDS)
        rig = HostsRig(network=network, folder=folder, num_bytes=num_bytes, repeats=rounds, tell=tell)
        links = _links(rig)
        told = (
            f"{num_hosts} hosts (network namespaces on one machine of {os.cpu_count()} cores, load"
            f" {os.getloadavg()[0]:.1f} at the start), tbf {mbit_per_s} Mbit/s each way, {num_bytes / MIB:g} MiB;"
            f" W {links.bytes_per_s / 1e6:.1f} MB/s, {links.overhead_s * 1e6:.0f} us a chunk and hop"
        )
        tell(told)
        shapes = {kind: _measure(rig, kind, links) for kind in TopologyKind}
        auto_s = shapes[TopologyKind.AUTO].seconds
        return [
            Row("W", links.bytes_per_s / 1e6, "MB/s", told),
            *(_bound_row(kind, shape, told) for kind, shape in shapes.items()),
            *_recovery_rows(shapes, told),
            _gloo_row(rig, auto_s, told),
            _http_row(rig, auto_s, told),
        ]


# ---- rows


def _bound_row(kind: TopologyKind, shape: ShapeRounds, told: str) -> Row:
    times = [timed.seconds for timed in shape.whole]
    tree = f"{shape.choice.shape.describe(num_zones=1)}, chunks of {shape.choice.chunk_bytes / MIB:.2f} MiB"
    conditions = (
        f"{told}; {tree}, CURVE; {median(times):.2f} s, bound {shape.bound_s:.2f} s; median of {len(times)}"
        f" ({min(times):.2f} to {max(times):.2f} s); {_tell_cores(shape.whole)}"
    )
    name = f"kary{FANOUT}" if kind is TopologyKind.KARY else kind.value
    return Row(f"{name}_over_bound", median(times) / shape.bound_s, "x", conditions)


def _tell_cores(timed: Sequence[TimedBroadcast]) -> str:
    busy, own = median(each.busy for each in timed), median(each.own for each in timed)
    told = f"this machine's cores {busy:.0%} busy, {own:.0%} with these hosts"
    return told if busy < SATURATED else f"{told}: they are the limit, not the links"


def _recovery_rows(shapes: dict[TopologyKind, ShapeRounds], told: str) -> list[Row]:
    """None if there are so few hosts that no node has both a parent and a child."""
    chain, kary = shapes[TopologyKind.CHAIN], shapes[TopologyKind.KARY]
    if not chain.broken:
        return []
    conditions = f"{told}; kill -9 of an inner node of a chain when it had half; {_tell(chain)}"
    if kary.broken:
        conditions += f"; of a tree of fan-out {FANOUT}: {kary.recovery:.2f} x, {_tell(kary)}"
    return [Row("recovery_over_undisturbed", chain.recovery, "x", conditions)]


def _tell(shape: ShapeRounds) -> str:
    seconds = median(broken.seconds for broken in shape.broken)
    noticed_s = median(broken.noticed_s for broken in shape.broken)
    stall_s = median(broken.stall_s for broken in shape.broken)
    return (
        f"{seconds:.2f} s instead of {shape.seconds:.2f} s, noticed after {noticed_s:.2f} s, the others"
        f" byte-identical; the next publish stalled the learner {stall_s * 1e3:.1f} ms and reached them"
    )


# ---- links


def _links(rig: HostsRig) -> Links:
    """W of a bare socket, and what a chunk costs on a hop of a chain of the hosts."""
    network = rig.network
    with bare_socket(rig.folder, rig.num_bytes, start=network.start, host=network.address(0)) as bare:
        bytes_per_s = rig.num_bytes / median(bare(number) for number in range(rig.repeats))
    with fleet(rig, Shape(1), MIN_CHUNK_BYTES) as chain:
        seconds = chain.broadcast(SMALL_BYTES).seconds
    num_paces = SMALL_BYTES // MIN_CHUNK_BYTES + chain.tree.depth - 1
    return Links(bytes_per_s, max(0.0, seconds / num_paces - MIN_CHUNK_BYTES / bytes_per_s))


# ---- ours


def _measure(rig: HostsRig, kind: TopologyKind, links: Links) -> ShapeRounds:
    broadcast = Broadcast(rig.num_bytes)
    choice = choose_tree(kind, fanout=FANOUT, zones=rig.zones, broadcast=broadcast, links=links)
    tree = grow_tree(choice.shape, rig.zones)
    bound_s = rig.num_bytes / links.bytes_per_s
    if kind is TopologyKind.STAR:
        bound_s *= len(rig.zones) - 1
    elif kind is TopologyKind.KARY:
        bare = Links(links.bytes_per_s, 0.0)
        bound_s = broadcast_s(tree, rig.zones, broadcast, bare, chunk_bytes=choice.chunk_bytes)
    inner = [node for node in tree.downward if node and tree.children(node)]
    shape = ShapeRounds(choice, bound_s)
    for _ in range(1 if kind is TopologyKind.STAR else rig.repeats):
        with fleet(rig, choice.shape, choice.chunk_bytes) as relays:
            shape.whole.append(relays.broadcast(rig.num_bytes))
            if inner and kind in (TopologyKind.CHAIN, TopologyKind.KARY):
                shape.broken.append(relays.recover(rig.num_bytes, inner[len(inner) // 2]))
        rig.tell(f"{kind} {shape.whole[-1]} of {bound_s:.2f} s, {shape.broken[-1:]}")
    return shape


# ---- peers


def _gloo_row(rig: HostsRig, auto_s: float, told: str) -> Row:
    gloo = Gloo(
        count=len(rig.zones),
        num_bytes=rig.num_bytes,
        tensor_bytes=rig.num_bytes,
        rendezvous=f"tcp://{rig.network.address(0)}:{GLOO_PORT}",
        interface=INTERFACE,
    )
    with gloo.side(rig.network.start) as peers:
        return _peer_row("gloo", peers, rig, auto_s, told, rounds=rig.repeats)


def _http_row(rig: HostsRig, auto_s: float, told: str) -> Row:
    http = http_side(
        rig.network.start,
        rig.folder / "http",
        count=len(rig.zones),
        num_bytes=rig.num_bytes,
        host=rig.network.address(0),
        with_writing=False,
    )
    with http as peers:
        return _peer_row("http", peers, rig, auto_s, told, rounds=1)


def _peer_row(name: str, peers: Peers, rig: HostsRig, auto_s: float, told: str, *, rounds: int) -> Row:
    timed = []
    for number in range(rounds):
        watch = CpuWatch(peers.workers)
        timed.append(watch.stop(peers.measure(number)))
    peers.check()
    seconds = median(each.seconds for each in timed)
    conditions = (
        f"{told}; {name}: {peers.conditions}, {seconds:.2f} s until the last host has touched every page; `auto`,"
        f" CURVE, {auto_s:.2f} s from the root's announcement until the last host has verified it; median of"
        f" {rounds}; {_tell_cores(timed)}"
    )
    rig.tell(f"{name} {seconds:.2f} s")
    return Row(f"{name}_{len(rig.zones)}hosts_over_ours", seconds / auto_s, "x", conditions)
