"""The relay tree: who is whose parent, how long a version takes through it, and which tree is fastest. Pure.

`runtime/workers/relays.py` chooses a tree when a run starts; the simulator uses the same model. Node 0 is the root
and every other node is below it. All shapes over the same zones agree on one order of nodes (zones by their first
node, nodes of a zone by number) in which parents come first, so nodes that were started under different shapes
never form a cycle
(`tests/relay/test_topology.py::test_nodes_started_under_different_shapes_form_no_cycle`).

The model of time: a node sends one chunk at a time, to its children in turn, each as soon as it has arrived. A
send takes `overhead_s + bytes / bytes_per_s`. So the chunks of a version follow each other at the pace of the
slowest node above a receiver: a receiver waits for its first chunk, and one such pace for each further chunk. In a
chain of `p` hops that is `(p + k - 1)(a + M / (k W))`. The model is exact where all chunks have one size, and at
most one pace too long where the last chunk is shorter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np
import numpy.typing as npt

from laminar_py.config.cluster import TopologyKind
from laminar_py.config.section import ConfigError

ALL = 2**31  # a fan-out without bound
PAGE_BYTES = 4096
SMALLEST_CHUNK_BYTES = 256 * 2**10  # below, a message's fixed cost is most of it
LARGEST_CHUNK_BYTES = 16 * 2**20  # above, a window of credits takes too much memory
_STEPS = 4  # chunk sizes tried per factor of two: the best of them is within 1 % of the least time
NEAR_BEST = 1.01  # a smaller chunk that takes no longer than this is better: less memory, and less to repeat
CHUNK_SIZES = tuple(
    round(SMALLEST_CHUNK_BYTES * 2 ** (step / _STEPS) / PAGE_BYTES) * PAGE_BYTES
    for step in range(_STEPS * (LARGEST_CHUNK_BYTES // SMALLEST_CHUNK_BYTES).bit_length() - _STEPS + 1)
)
FANOUTS = (*range(1, 9), ALL)  # that `fastest_shape` tries: chain, k-ary trees, star


@dataclass(frozen=True)
class Topology:
    """A rooted tree, e.g. five nodes with fan-out two: `Topology((None, 0, 0, 1, 1))`."""

    parents: tuple[int | None, ...]  # [N] parent of each node, None for the root alone

    def __post_init__(self) -> None:
        assert self.parents[:1] == (None,), f"node 0 is no root in {self.parents}"
        for node, parent in enumerate(self.parents[1:], start=1):
            assert parent in range(self.num_nodes), f"node {node} has parent {parent}"
        assert len(self.downward) == self.num_nodes, f"not all is below node 0 in {self.parents}"

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.parents)

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        lists: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent is not None:
                lists[parent].append(node)
        return tuple(tuple(children) for children in lists)

    @cached_property
    def downward(self) -> tuple[int, ...]:
        """[N] all nodes, level by level from the root, so that parents start before their children."""
        order = [0]
        for node in order:  # grows meanwhile
            order += self._children[node]
        return tuple(order)

    def children(self, node: int) -> tuple[int, ...]:
        """Nodes whose parent is `node`, ascending."""
        return self._children[node]

    def ancestors(self, node: int) -> tuple[int, ...]:
        """The parent of a node, its parent, and so on up to the root: the order in which a node tries parents."""
        path: list[int] = []
        parent = self.parents[node]
        while parent is not None:
            path.append(parent)
            parent = self.parents[parent]
        return tuple(path)

    @cached_property
    def depth(self) -> int:
        """Hops from the root to the farthest node."""
        return len(self.ancestors(self.downward[-1]))

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, ascending; a lone root is one."""
        return tuple(node for node in range(self.num_nodes) if not self._children[node])

    @cached_property
    def _serving_order(self) -> tuple[int, ...]:
        # Inner nodes spend bandwidth on their children, the root most of all: they serve replicas last.
        return self.leaves + tuple(node for node in reversed(self.downward) if self._children[node])

    def node_of_replica(self, replica: int) -> int:
        """The node that serves a replica: leaves first, then inner nodes, root last, then again from the start."""
        return self._serving_order[replica % self.num_nodes]


@dataclass(frozen=True, slots=True)
class Shape:
    """How a tree is grown over any nodes, e.g. zones in a chain, each a binary tree inside: `Shape(2, heads=1)`.

    A fan-out of 1 makes a chain and `ALL` a star. A version enters each zone once, at its first node, the head,
    and leaves it through one node, so that no two nodes compete for the link between zones. That node is the
    zone's nearest leaf, whose own link is idle, or, with `short`, the head, which is fewer hops away.
    """

    members: int  # children of a node within its zone, at most
    heads: int = 1  # zones that one zone passes versions on to, at most
    short: bool = False

    def __post_init__(self) -> None:
        if min(self.members, self.heads) < 1:
            raise ConfigError(
                f"relay.fanout: {self.members} children of a node within its zone and {self.heads} zones below"
                " a zone; each must be at least 1"
            )

    def describe(self, *, num_zones: int) -> str:
        """The shape in words: `a chain`, or `zones in a chain, each left through a leaf; inside, a star`."""
        if num_zones == 1:
            return _describe_fanout(self.members)
        door = "its head" if self.short else "a leaf"
        heads, members = _describe_fanout(self.heads), _describe_fanout(self.members)
        return f"zones in {heads}, each left through {door}; inside, {members}"


def _describe_fanout(fanout: int) -> str:
    return {1: "a chain", ALL: "a star"}.get(fanout, f"a tree of fan-out {fanout}")


def shape_of(kind: TopologyKind, *, fanout: int) -> Shape:
    """The shape that a config names, the same among zones and within them; `auto` names none.

    Raises `ConfigError` if a node could have no child.
    """
    match kind:
        case TopologyKind.STAR:  # all below the root: good for few receivers and small models
            return Shape(ALL, heads=ALL, short=True)
        case TopologyKind.CHAIN:  # time approaches M / W for large M, whatever the number of receivers
            return Shape(1, heads=1)
        case TopologyKind.KARY:  # filled level by level
            return Shape(fanout, heads=fanout)
    raise AssertionError(f"{kind} has no shape of its own")


def grow_tree(shape: Shape, zones: Sequence[str]) -> Topology:
    """The tree over nodes of these zones ([N] labels), e.g. `grow_tree(Shape(1), ["a", "b", "a"])`: 0 > 2 > 1.

    Raises `ConfigError` without nodes.
    """
    if not zones:
        raise ConfigError("relay.nodes=0: a tree needs its root; set at least 1")
    members: dict[str, list[int]] = {}
    for node, zone in enumerate(zones):
        members.setdefault(zone, []).append(node)
    parents: list[int | None] = [None] * len(zones)
    doors: list[int] = []  # node through which a version leaves each zone
    for rank, nodes in enumerate(members.values()):
        if rank:
            parents[nodes[0]] = doors[(rank - 1) // shape.heads]
        for place, node in enumerate(nodes[1:]):
            parents[node] = nodes[place // shape.members]
        num_inner = -(-(len(nodes) - 1) // shape.members)
        doors.append(nodes[0] if shape.short else nodes[num_inner])
    return Topology(tuple(parents))


# ---- time of a version


@dataclass(frozen=True, slots=True)
class Links:
    """Speed of the network, e.g. 100 Gb/s a host and 25 between racks: `Links(12.5e9, 2e-4, 3.125e9)`."""

    bytes_per_s: float  # from a host to another of its zone
    overhead_s: float  # per chunk and hop, whatever its size
    zone_bytes_per_s: float = math.inf  # from all hosts of a zone together to other zones, if that is less


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A version to send, e.g. 15 GB as a delta of 1.1 %: `Broadcast(15 * 10**9, 0.011, 1.5e9, 5e9)`.

    A delta has the chunks of the full version, each shorter on the wire.
    """

    num_bytes: int  # of the full version
    wire_share: float = 1.0  # of these bytes that travel
    encode_bytes_per_s: float = math.inf  # of the full version, at the root
    apply_bytes_per_s: float = math.inf  # of the full version, at each receiver, beside its forwarding


def arrivals_s(
    tree: Topology, zones: Sequence[str], broadcast: Broadcast, links: Links, *, chunk_bytes: int
) -> list[float]:
    """[N] seconds until each node of a tree has all of a version; 0 for the root."""
    return list(map(float, _arrivals_s(tree, zones, broadcast, links, [chunk_bytes])[:, 0]))


def broadcast_s(
    tree: Topology, zones: Sequence[str], broadcast: Broadcast, links: Links, *, chunk_bytes: int
) -> float:
    """Seconds until the last receiver has all of a version; 0 if there is none."""
    return max(arrivals_s(tree, zones, broadcast, links, chunk_bytes=chunk_bytes))


def _arrivals_s(
    tree: Topology, zones: Sequence[str], broadcast: Broadcast, links: Links, sizes: Sequence[int]
) -> npt.NDArray[np.float64]:
    """[N, S] seconds like `arrivals_s`, with chunks of each of S sizes."""
    chunk = np.minimum(sizes, broadcast.num_bytes)
    on_wire = chunk * broadcast.wire_share
    near_s = links.overhead_s + on_wire / links.bytes_per_s
    far_s = links.overhead_s + on_wire / min(links.bytes_per_s, links.zone_bytes_per_s)
    encode_s, apply_s = chunk / broadcast.encode_bytes_per_s, chunk / broadcast.apply_bytes_per_s
    sent = np.zeros((2, tree.num_nodes, 1))  # sends within and between zones before a node has its first chunk
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


# ---- the choice


@dataclass(frozen=True, slots=True)
class Choice:
    """Shape and chunk size for a fleet, e.g. `Choice(Shape(1), chunk_bytes=1048576, seconds=0.31)`."""

    shape: Shape
    chunk_bytes: int
    seconds: float  # until the last receiver has all


def choose_tree(
    kind: TopologyKind, *, fanout: int, zones: Sequence[str], broadcast: Broadcast, links: Links
) -> Choice:
    """The tree for a config: the shape that it names, or the fastest for `auto`; each with its best chunk size.

    Choose once in a run: over more nodes `grow_tree` makes a longer tree of the same shape. Raises `ConfigError`
    like `shape_of`.
    """
    if kind is TopologyKind.AUTO:
        return fastest_shape(zones, broadcast, links)
    return with_best_chunk(shape_of(kind, fanout=fanout), zones, broadcast, links)


def with_best_chunk(shape: Shape, zones: Sequence[str], broadcast: Broadcast, links: Links) -> Choice:
    """A shape over nodes of these zones ([N] labels), with the smallest chunk that is nearly the fastest."""
    took_s = _arrivals_s(grow_tree(shape, zones), zones, broadcast, links, CHUNK_SIZES).max(axis=0)
    best = int(np.argmax(took_s <= NEAR_BEST * took_s.min()))
    return Choice(shape, CHUNK_SIZES[best], float(took_s[best]))


def fastest_shape(zones: Sequence[str], broadcast: Broadcast, links: Links) -> Choice:
    """The shape that takes least time, of equals the one with the least depth.

    Tries the chain, trees of fan-out 2 to 8 and the star, among zones and within them, and both ways out of a
    zone. Takes a tenth of a second for a thousand nodes of one zone, some seconds where they have many.
    """
    one_zone = len(set(zones)) == 1
    shapes = [
        Shape(members, heads=heads, short=short)
        for members, heads, short in product(FANOUTS, FANOUTS[: 1 if one_zone else None], (False, True))
        if not (one_zone and short)
    ]
    choices = [with_best_chunk(shape, zones, broadcast, links) for shape in shapes]
    least = min(choice.seconds for choice in choices)
    equals = [choice for choice in choices if choice.seconds == least]
    return min(equals, key=lambda choice: grow_tree(choice.shape, zones).depth)


def versions_at_peak(*, keep_versions: int, num_replicas: int, num_nodes: int = 1) -> int:
    """Number of versions in the stores of a host's relays at most.

    Each store has the versions that it keeps, an arriving version, and another on which deltas build or which a
    slow child still fetches. Each of the `num_replicas` that pull from them may hold one more. On the root's host
    the publisher's unfinished folder, or the spare folder, takes the place of the arriving version.
    """
    return num_nodes * (keep_versions + 2) + num_replicas
