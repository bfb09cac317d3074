"""Shape of the relay tree: who is whose parent, and whom a replica attaches to. Pure; the runtime calls it.

Invariant: node 0 is the root and every parent has a lower index than its children, so there are no cycles.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from laminar_py.config import TopologyKind


@dataclass(frozen=True)
class Topology:
    """A tree, e.g. five nodes with fan-out two: `Topology((None, 0, 0, 1, 1))`."""

    parents: tuple[int | None, ...]  # [N] parent of each node, None for the root

    def __post_init__(self) -> None:
        assert self.parents[:1] == (None,), f"node 0 is no root in {self.parents}"
        for node, parent in enumerate(self.parents[1:], start=1):
            assert parent in range(node), f"node {node} has parent {parent}"

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

    def children(self, node: int) -> tuple[int, ...]:
        """Nodes whose parent it is, ascending."""
        return self._children[node]

    def ancestors(self, node: int) -> tuple[int, ...]:
        """Its parent and that one's ancestors up to the root: the order in which it looks for a parent."""
        path: list[int] = []
        parent = self.parents[node]
        while parent is not None:
            path.append(parent)
            parent = self.parents[parent]
        return tuple(path)

    def fallbacks(self, node: int) -> tuple[int, ...]:
        """Whom it turns to, in order, when its parent is lost; empty for the root and its children."""
        return self.ancestors(node)[1:]

    def depth_of(self, node: int) -> int:
        """Hops from the root."""
        return len(self.ancestors(node))

    @cached_property
    def depth(self) -> int:
        """Hops from the root to the node that is farthest."""
        return max(map(self.depth_of, range(self.num_nodes)))

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, ascending; a lone root is one."""
        return tuple(node for node in range(self.num_nodes) if not self._children[node])

    @cached_property
    def _serving_order(self) -> tuple[int, ...]:
        # Inner nodes spend bandwidth on their children, the root most of all: they serve replicas last.
        inner = (node for node in range(self.num_nodes) if self._children[node])
        return self.leaves + tuple(sorted(inner, reverse=True))

    def node_of_replica(self, replica: int) -> int:
        """The node that serves a replica: leaves first, then inner nodes, root last, then again from the start."""
        return self._serving_order[replica % self.num_nodes]


def star(num_nodes: int, fanout: int) -> Topology:
    """Everyone below the root. Time p M / W for p receivers: good for few receivers and small models."""
    return Topology((None, *(0 for _ in range(1, num_nodes))))


def chain(num_nodes: int, fanout: int) -> Topology:
    """A pipeline: time approaches M / W for large M, whatever the number of receivers."""
    return Topology((None, *range(num_nodes - 1)))


def kary(num_nodes: int, fanout: int) -> Topology:
    """A complete tree in which every node has at most `fanout` children, filled level by level."""
    return Topology((None, *((node - 1) // fanout for node in range(1, num_nodes))))


_SHAPES: dict[TopologyKind, Callable[[int, int], Topology]] = {
    TopologyKind.STAR: star,
    TopologyKind.CHAIN: chain,
    TopologyKind.KARY: kary,
}


def build(kind: TopologyKind, *, num_nodes: int, fanout: int) -> Topology:
    """The tree of a config. Raises `ValueError` if it would be empty or a node could have no child."""
    if num_nodes < 1:
        raise ValueError(f"relay.nodes={num_nodes}: a tree needs its root; set at least 1")
    if fanout < 1:
        raise ValueError(f"relay.fanout={fanout}: a node needs room for a child; set at least 1")
    return _SHAPES[kind](num_nodes, fanout)
