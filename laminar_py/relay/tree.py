"""The relay tree: who is whose parent, and which chunks suit it. Pure.

`runtime/workers/relays.py` grows a tree when a run starts; the simulator uses the same. Node 0 is the root, and
every other node has a parent with a lower number. So nodes that were started in a smaller tree never form a cycle
with later ones (`tests/relay/test_topology.py::test_a_parent_has_a_lower_number`).
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from laminar_py.config.section import ConfigError

CHUNK_OVERHEAD_S = 2e-4  # of a chunk on a link, as measured on hosts of one rack
PAGE_BYTES = 4096
SMALLEST_CHUNK_BYTES = 256 * 2**10  # below, a message's fixed cost is most of it
LARGEST_CHUNK_BYTES = 16 * 2**20  # above, a window of credits takes too much memory


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

    def sources(self, node: int, *, count: int) -> tuple[int, ...]:
        """Up to `count` nodes besides parent and root of which `node` may request chunks when it joins late.

        They lie far apart, so that nodes which join together do not count on each other.
        """
        stride = max(1, self.num_nodes // (count + 1))
        others = ((node + number * stride) % self.num_nodes for number in range(1, count + 1))
        return tuple(dict.fromkeys(other for other in others if other not in (0, node, self.parents[node])))

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


def choose_chunk_bytes(tree: Topology, num_bytes: int, *, bytes_per_s: float, overhead_s: float) -> int:
    """Return the chunk size with which the last receiver has a version of `num_bytes` soonest, within 2 %.

    A send takes `overhead_s + bytes / bytes_per_s`, and a node sends each chunk to its F children in turn. If the
    farthest node gets its first chunk in the S-th send, it has all of k chunks after `S + (k - 1) F` sends, which
    is least for k = sqrt((S / F - 1) num_bytes / (overhead_s bytes_per_s)). Larger chunks than a hundred overheads
    gain less than 1 %, and take memory. Choose once in a run, since all nodes must use the same size.
    """
    sends = [0] * tree.num_nodes
    for node in tree.downward:
        for turn, child in enumerate(tree.children(node), 1):
            sends[child] = sends[node] + turn
    fanout = max(len(tree.children(node)) for node in tree.downward)
    cost = overhead_s * bytes_per_s  # bytes that could be sent in a chunk's overhead
    waits = max(sends) / max(fanout, 1) - 1
    best = min(math.sqrt(num_bytes * cost / waits) if waits > 0 else num_bytes, num_bytes, 100 * cost)
    chunk = min(max(best, SMALLEST_CHUNK_BYTES), LARGEST_CHUNK_BYTES)
    return round(chunk / PAGE_BYTES) * PAGE_BYTES


def versions_at_peak(*, keep_versions: int, num_replicas: int, num_nodes: int = 1) -> int:
    """Return the most versions that the stores of a host's relays hold at a time.

    Each store has the versions that it keeps, an arriving version, and another on which deltas build or which a
    slow child still fetches. Each of the `num_replicas` that pull from them may hold one more. On the root's host
    the publisher's unfinished folder, or the spare folder, takes the place of the arriving version.
    """
    return num_nodes * (keep_versions + 2) + num_replicas
