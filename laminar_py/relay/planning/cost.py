"""Time of a version through a tree, the tree and chunk size that take least, and a store's room. Pure.

Used when a run starts and by `laminar relay plan`. The model: a node sends one chunk at a time,
to its children in turn, each as soon as it has arrived; a send takes `overhead_s + bytes / bytes_per_s`. Then the
chunks of a version follow each other at the pace of the slowest node above a receiver, and its time is that of its
first chunk and one such pace for each further chunk: `(p + k - 1)(a + M / (k W))` in a chain of `p` hops. This is
exact where all chunks are of one size, and too long by at most one pace where the last is shorter.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from laminar_py.config.cluster import TopologyKind
from laminar_py.relay.planning.topology import ALL, Shape, Topology, grow, shape_of

PAGE_BYTES = 4096
SMALLEST_CHUNK_BYTES = 256 * 2**10  # below, a message's fixed cost is most of it
LARGEST_CHUNK_BYTES = 16 * 2**20  # above, a window of credits takes too much memory
_STEPS = 4  # chunk sizes tried per factor of two: at the best of them the time is within 1 % of the least
NEAR_BEST = 1.01  # a smaller chunk that takes no longer than this is better: less memory, and less to repeat
CHUNK_SIZES = tuple(
    round(SMALLEST_CHUNK_BYTES * 2 ** (step / _STEPS) / PAGE_BYTES) * PAGE_BYTES
    for step in range(_STEPS * (LARGEST_CHUNK_BYTES // SMALLEST_CHUNK_BYTES).bit_length() - _STEPS + 1)
)
FANOUTS = (*range(1, 9), ALL)  # that `choose` tries: chain, k-ary trees, star


@dataclass(frozen=True, slots=True)
class Links:
    """Speed of the network, e.g. 100 Gb/s a host and 25 between racks: `Links(12.5e9, 2e-4, 3.125e9)`."""

    bytes_per_s: float  # from a host to another of its zone
    overhead_s: float  # per chunk and hop, whatever its size
    zone_bytes_per_s: float = math.inf  # from all hosts of a zone together to other zones, if that is less

    def near_s(self, num_bytes: float) -> float:
        """Seconds that a chunk takes within a zone."""
        return self.overhead_s + num_bytes / self.bytes_per_s

    def far_s(self, num_bytes: float) -> float:
        """Seconds that a chunk takes into another zone."""
        return self.overhead_s + num_bytes / min(self.bytes_per_s, self.zone_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A version on its way, e.g. 15 GB as a delta of 1.1 %: `Broadcast(15 * 10**9, 0.011, 1.5e9, 5e9)`.

    Its chunks are those of the full version, each shorter on the wire.
    """

    num_bytes: int  # of the full version
    wire_share: float = 1.0  # of these that travel
    encode_bytes_per_s: float = math.inf  # of the full version, at the root
    apply_bytes_per_s: float = math.inf  # of the full version, at each receiver, beside its forwarding

    def codec_s(self, num_bytes: int) -> tuple[float, float]:
        """Seconds to encode and to apply a chunk."""
        return num_bytes / self.encode_bytes_per_s, num_bytes / self.apply_bytes_per_s


@dataclass(frozen=True, slots=True)
class Sends:
    """Chunks sent one after another, e.g. by a head with two children of its own zone: `Sends(2, far=0)`."""

    near: int
    far: int

    def seconds(self, links: Links, num_bytes: float) -> float:
        """Time of them all, for a chunk of `num_bytes` on the wire."""
        return self.near * links.near_s(num_bytes) + self.far * links.far_s(num_bytes)


@dataclass(frozen=True, slots=True)
class Route:
    """The way to one receiver: what it waits for, whatever the network."""

    first: Sends  # until its first chunk is there
    paces: frozenset[Sends]  # by every node above it, for each chunk

    def seconds(self, broadcast: Broadcast, links: Links, chunk_bytes: int) -> float:
        """Until its last chunk is there and applied."""
        size = min(chunk_bytes, broadcast.num_bytes)
        num_chunks = -(-broadcast.num_bytes // size)
        on_wire, codec_s = size * broadcast.wire_share, broadcast.codec_s(size)
        pace_s = max(*codec_s, *(pace.seconds(links, on_wire) for pace in self.paces))
        return self.first.seconds(links, on_wire) + sum(codec_s) + (num_chunks - 1) * pace_s


def routes(tree: Topology, zones: Sequence[str]) -> tuple[Route, ...]:
    """Receivers of a tree ([N] zones) of which one is last, on any network; none for a lone root."""
    last: dict[frozenset[Sends], dict[int, int]] = {}  # of equal paces: far sends -> near sends, at most
    for _, sent, pace in _ways(tree, zones):
        most = last.setdefault(pace, {})
        most[sent.far] = max(sent.near, most.get(sent.far, 0))
    return tuple(Route(first, pace) for pace, most in last.items() for first in _latest(most))


def arrivals_s(
    tree: Topology, zones: Sequence[str], broadcast: Broadcast, links: Links, *, chunk_bytes: int
) -> list[float]:
    """Seconds until each node of a tree ([N] zones) has all of a version; 0 for the root, which has it."""
    arrivals = [0.0] * tree.num_nodes
    for node, first, paces in _ways(tree, zones):
        arrivals[node] = Route(first, paces).seconds(broadcast, links, chunk_bytes)
    return arrivals


def _ways(tree: Topology, zones: Sequence[str]) -> Iterator[tuple[int, Sends, frozenset[Sends]]]:
    """Each receiver, with what is sent until its first chunk is there, and the paces above it."""
    firsts, paces = {0: Sends(0, 0)}, {0: frozenset[Sends]()}
    for node in tree.downward:
        children = tree.children(node)
        far = sum(zones[child] != zones[node] for child in children)
        pace = paces[node] | {Sends(len(children) - far, far)}
        sent = firsts[node]
        for child in children:
            away = zones[child] != zones[node]
            sent = Sends(sent.near + (not away), sent.far + away)
            firsts[child], paces[child] = sent, pace
            yield child, sent, pace


def _latest(most: Mapping[int, int]) -> Iterator[Sends]:
    """Sends that no other exceeds both in far and in near ones."""
    seen = -1
    for far, near in sorted(most.items(), reverse=True):
        if near > seen:
            yield Sends(near, far)
            seen = near


def broadcast_s(ways: Sequence[Route], broadcast: Broadcast, links: Links, *, chunk_bytes: int) -> float:
    """Seconds until the last receiver has all of a version; 0 if there is none."""
    return max((way.seconds(broadcast, links, chunk_bytes) for way in ways), default=0.0)


def best_chunk_bytes(ways: Sequence[Route], broadcast: Broadcast, links: Links) -> int:
    """The smallest of `CHUNK_SIZES` with which a broadcast takes the least time, or hardly more."""
    took_s = {size: broadcast_s(ways, broadcast, links, chunk_bytes=size) for size in CHUNK_SIZES}
    limit_s = NEAR_BEST * min(took_s.values())
    return next(size for size in CHUNK_SIZES if took_s[size] <= limit_s)


def versions_at_peak(*, keep_versions: int, num_replicas: int, num_nodes: int = 1) -> int:
    """Versions in the stores of a host's relays at most.

    In each are those kept, one that arrives, and one that a delta is built on or that a slow child still fetches;
    each of the `num_replicas` that pull from them may hold another. On the root's host the publisher's unfinished
    folder is the one that arrives, or the spare that it will be written over.
    """
    return num_nodes * (keep_versions + 2) + num_replicas


@dataclass(frozen=True, slots=True)
class Choice:
    """Shape and chunk size for a fleet, e.g. `Choice(Shape(1), chunk_bytes=1048576, seconds=0.31)`."""

    shape: Shape
    chunk_bytes: int
    seconds: float  # until the last receiver has all


def weigh(shape: Shape, zones: Sequence[str], broadcast: Broadcast, links: Links) -> Choice:
    """A shape with its best chunk size over nodes of these zones ([N] labels)."""
    ways = routes(grow(shape, zones), zones)
    chunk_bytes = best_chunk_bytes(ways, broadcast, links)
    return Choice(shape, chunk_bytes, broadcast_s(ways, broadcast, links, chunk_bytes=chunk_bytes))


def choose(zones: Sequence[str], broadcast: Broadcast, links: Links) -> Choice:
    """The shape that takes least time, of equals the one with the least depth.

    Tried are chain, trees of fan-out 2 to 8 and star, among zones and within them, and both ways out of a zone.
    Takes a tenth of a second for a thousand nodes of one zone, a second where they have many.
    """
    one_zone = len(set(zones)) == 1
    shapes = [
        Shape(members, heads=heads, short=short)
        for members, heads, short in product(FANOUTS, FANOUTS[: 1 if one_zone else None], (False, True))
        if not (one_zone and short)
    ]
    choices = [weigh(shape, zones, broadcast, links) for shape in shapes]
    least = min(choice.seconds for choice in choices)
    equals = [choice for choice in choices if choice.seconds == least]
    return min(equals, key=lambda choice: grow(choice.shape, zones).depth)


def settle(kind: TopologyKind, *, fanout: int, zones: Sequence[str], broadcast: Broadcast, links: Links) -> Choice:
    """The shape of a config: its own, or with `auto` what `choose` finds. Raises `ValueError` as `shape_of` does.

    Settle once in a run: over more nodes `grow` makes a longer tree of the same shape.
    """
    if kind is TopologyKind.AUTO:
        return choose(zones, broadcast, links)
    return weigh(shape_of(kind, fanout=fanout), zones, broadcast, links)
