"""Time of a version through a tree, the tree and chunk size that take least, and a store's room. Pure.

Used when a run starts and by `laminar relay plan`. The model: a node sends one chunk at a time,
to its children in turn, each as soon as it has arrived; a send takes `overhead_s + bytes / bytes_per_s`. Then the
chunks of a version follow each other at the pace of the slowest node above a receiver, and its time is that of its
first chunk and one such pace for each further chunk: `(p + k - 1)(a + M / (k W))` in a chain of `p` hops. This is
exact where all chunks are of one size, and too long by at most one pace where the last is shorter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

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


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A version on its way, e.g. 15 GB as a delta of 1.1 %: `Broadcast(15 * 10**9, 0.011, 1.5e9, 5e9)`.

    Its chunks are those of the full version, each shorter on the wire.
    """

    num_bytes: int  # of the full version
    wire_share: float = 1.0  # of these that travel
    encode_bytes_per_s: float = math.inf  # of the full version, at the root
    apply_bytes_per_s: float = math.inf  # of the full version, at each receiver, beside its forwarding


def arrivals_s(
    tree: Topology, zones: Sequence[str], broadcast: Broadcast, links: Links, *, chunk_bytes: int
) -> list[float]:
    """Seconds until each node of a tree ([N] zones) has all of a version; 0 for the root, which has it."""
    return list(map(float, _arrivals_s(tree, zones, broadcast, links, [chunk_bytes])[:, 0]))


def broadcast_s(
    tree: Topology, zones: Sequence[str], broadcast: Broadcast, links: Links, *, chunk_bytes: int
) -> float:
    """Seconds until the last receiver has all of a version; 0 if there is none."""
    return max(arrivals_s(tree, zones, broadcast, links, chunk_bytes=chunk_bytes))


def _arrivals_s(
    tree: Topology, zones: Sequence[str], broadcast: Broadcast, links: Links, sizes: Sequence[int]
) -> npt.NDArray[np.float64]:
    """[N, S] `arrivals_s` with chunks of each of these sizes."""
    chunk = np.minimum(sizes, broadcast.num_bytes)
    on_wire = chunk * broadcast.wire_share
    near_s = links.overhead_s + on_wire / links.bytes_per_s
    far_s = links.overhead_s + on_wire / min(links.bytes_per_s, links.zone_bytes_per_s)
    encode_s, apply_s = chunk / broadcast.encode_bytes_per_s, chunk / broadcast.apply_bytes_per_s
    sent = np.zeros((2, tree.num_nodes, 1))  # chunks to near and to far nodes before a node has its first one
    pace_s = np.tile(np.maximum(encode_s, apply_s), (tree.num_nodes, 1))
    for node in tree.downward:
        children = tree.children(node)
        is_far = [zones[child] != zones[node] for child in children]
        far = sum(is_far)
        below_s = np.maximum(pace_s[node], (len(children) - far) * near_s + far * far_s)
        so_far = sent[:, node].copy()
        for child, away in zip(children, is_far, strict=True):
            so_far[int(away)] += 1
            sent[:, child], pace_s[child] = so_far, below_s
    further = -(-broadcast.num_bytes // chunk) - 1
    arrivals = sent[0] * near_s + sent[1] * far_s + (encode_s + apply_s) + further * pace_s
    arrivals[0] = 0.0
    return np.asarray(arrivals)


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
    """A shape over nodes of these zones ([N] labels), with the smallest chunk that is nearly the fastest."""
    took_s = _arrivals_s(grow(shape, zones), zones, broadcast, links, CHUNK_SIZES).max(axis=0)
    best = int(np.argmax(took_s <= NEAR_BEST * took_s.min()))
    return Choice(shape, CHUNK_SIZES[best], float(took_s[best]))


def choose(zones: Sequence[str], broadcast: Broadcast, links: Links) -> Choice:
    """The shape that takes least time, of equals the one with the least depth.

    Tried are chain, trees of fan-out 2 to 8 and star, among zones and within them, and both ways out of a zone.
    Takes a tenth of a second for a thousand nodes of one zone, some seconds where they have many.
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
