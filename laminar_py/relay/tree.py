"""The relay tree: who is whose parent, how long a version takes through it, and which chunks suit it. Pure.

`runtime/workers/relays.py` grows a tree when a run starts; the simulator uses the same model. Node 0 is the root,
and every other node has a parent with a lower number. So nodes that were started in a smaller tree never form a
cycle with later ones (`tests/relay/test_topology.py::test_a_parent_has_a_lower_number`).

The model of time: a node sends one chunk at a time, to its children in turn, each as soon as it has arrived. A
send takes `overhead_s + bytes / bytes_per_s`. So the chunks of a version follow each other at the pace of the
slowest node above a receiver: a receiver waits for its first chunk, and one such pace for each further chunk. In a
chain of `p` hops that is `(p + k - 1)(a + M / (k W))`. The model is exact where all chunks have one size, and at
most one pace too long where the last chunk is shorter.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from laminar_py.config.section import ConfigError

PAGE_BYTES = 4096
SMALLEST_CHUNK_BYTES = 256 * 2**10  # below, a message's fixed cost is most of it
LARGEST_CHUNK_BYTES = 16 * 2**20  # above, a window of credits takes too much memory
_STEPS = 4  # chunk sizes tried per factor of two: the best of them is within 1 % of the least time
NEAR_BEST = 1.01  # times the least time; a smaller chunk within it is better: less memory, less to repeat
CHUNK_SIZES = tuple(
    round(SMALLEST_CHUNK_BYTES * 2 ** (step / _STEPS) / PAGE_BYTES) * PAGE_BYTES
    for step in range(_STEPS * (LARGEST_CHUNK_BYTES // SMALLEST_CHUNK_BYTES).bit_length() - _STEPS + 1)
)


@dataclass(frozen=True)
class Topology:
    """A rooted tree, e.g. five nodes with fan-out two: `Topology((None, 0, 0, 1, 1))`."""

    parents: tuple[int | None, ...]  # [N] parent of each node, None for the root alone

    def __post_init__(self) -> None:
        assert self.parents[:1] == (None,), f"node 0 is no root in {self.parents}"
        for node, parent in enumerate(self.parents[1:], start=1):
            assert parent in range(self.num_nodes), f"node {node} has parent {parent}, which is no node"
        assert len(self.downward) == self.num_nodes, f"a node is not below node 0 in {self.parents}"

    @property
    def num_nodes(self) -> int:
        """Number of nodes, N."""
        return len(self.parents)

    @cached_property
    def _children(self) -> tuple[tuple[int, ...], ...]:
        """[N] nodes whose parent is each node, ascending."""
        lists: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents):
            if parent is not None:
                lists[parent].append(node)
        return tuple(tuple(children) for children in lists)

    @cached_property
    def downward(self) -> tuple[int, ...]:
        """[N] all nodes, level by level from the root, so that parents start before their children."""
        order = [0]
        for node in order:  # the list grows during the loop
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
        """Nodes without children, ascending; a lone root is a leaf."""
        return tuple(node for node in range(self.num_nodes) if not self._children[node])

    @cached_property
    def _serving_order(self) -> tuple[int, ...]:
        # Inner nodes spend bandwidth on their children, the root most of all: they serve replicas last.
        return self.leaves + tuple(node for node in reversed(self.downward) if self._children[node])

    def node_of_replica(self, replica: int) -> int:
        """The node that serves a replica: leaves first, then inner nodes, root last, then again from the start."""
        return self._serving_order[replica % self.num_nodes]


@lru_cache
def grow_tree(num_nodes: int, *, fanout: int) -> Topology:
    """The tree in which each node has up to `fanout` children, filled level by level; 1 makes a chain.

    Raises `ConfigError` without nodes.
    """
    if num_nodes < 1:
        raise ConfigError(f"relay.nodes={num_nodes}: a tree needs its root; set at least 1")
    return Topology((None, *((node - 1) // fanout for node in range(1, num_nodes))))


# ---- time of a version


@dataclass(frozen=True, slots=True)
class Links:
    """Speed of the network, e.g. 100 Gb/s a host: `Links(12.5e9, 2e-4)`."""

    bytes_per_s: float  # from one host to another
    overhead_s: float  # per chunk and hop, whatever its size


@dataclass(frozen=True, slots=True)
class Broadcast:
    """A version to send, e.g. 15 GB as a delta of 1.1 %: `Broadcast(15 * 10**9, 0.011, 1.5e9, 5e9)`.

    A delta has the chunks of the full version, each shorter on the wire.
    """

    num_bytes: int  # of the full version
    wire_share: float = 1.0  # share of `num_bytes` that travels
    encode_bytes_per_s: float = math.inf  # of the full version, at the root
    apply_bytes_per_s: float = math.inf  # of the full version, at each receiver, beside its forwarding


def arrivals_s(tree: Topology, broadcast: Broadcast, links: Links, *, chunk_bytes: int) -> list[float]:
    """[N] seconds until each node of a tree has all of a version; 0 for the root."""
    return list(map(float, _arrivals_s(tree, broadcast, links, [chunk_bytes])[:, 0]))


def choose_chunk_bytes(tree: Topology, broadcast: Broadcast, links: Links) -> int:
    """Return the smallest chunk size with which the last receiver waits at most 1 % longer than with the best.

    Choose once in a run, since all nodes must use the same size.
    """
    took_s = _arrivals_s(tree, broadcast, links, CHUNK_SIZES).max(axis=0)
    return CHUNK_SIZES[int(np.argmax(took_s <= NEAR_BEST * took_s.min()))]


def _arrivals_s(
    tree: Topology, broadcast: Broadcast, links: Links, sizes: Sequence[int]
) -> npt.NDArray[np.float64]:
    """[N, S] seconds until each node has all of a version, with chunks of each of S sizes."""
    chunk = np.minimum(sizes, broadcast.num_bytes)
    send_s = links.overhead_s + chunk * broadcast.wire_share / links.bytes_per_s
    encode_s, apply_s = chunk / broadcast.encode_bytes_per_s, chunk / broadcast.apply_bytes_per_s
    sent = np.zeros((tree.num_nodes, 1))  # sends before a node has its first chunk
    pace_s = np.tile(np.maximum(encode_s, apply_s), (tree.num_nodes, 1))
    for node in tree.downward:
        children = tree.children(node)
        for turn, child in enumerate(children, 1):
            sent[child] = sent[node] + turn
            pace_s[child] = np.maximum(pace_s[node], len(children) * send_s)
    further = -(-broadcast.num_bytes // chunk) - 1
    arrivals = sent * send_s + (encode_s + apply_s) + further * pace_s
    arrivals[0] = 0.0
    return np.asarray(arrivals)


def versions_at_peak(*, keep_versions: int, num_replicas: int, num_nodes: int = 1) -> int:
    """Return the most versions that the stores of a host's relays hold at a time.

    Each store has the versions that it keeps, an arriving version, and another on which deltas build or which a
    slow child still fetches. Each of the `num_replicas` that pull from them may hold one more. On the root's host
    the publisher's unfinished folder, or the spare folder, takes the place of the arriving version.
    """
    return num_nodes * (keep_versions + 2) + num_replicas
