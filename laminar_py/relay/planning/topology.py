"""Shape of the relay tree: who is whose parent, and whom a replica attaches to. Pure.

Invariant: node 0 is the root and every other node is below it. All shapes over the same zones agree on an order
(zones by their first node, nodes of a zone by number) in which parents come first, so that nodes which were
started under different shapes never form a cycle.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from laminar_py.config.cluster import TopologyKind
from laminar_py.config.section import ConfigError


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
        """[N] all nodes, level by level from the root: the order in which they can be started."""
        order = [0]
        for node in order:  # grows meanwhile
            order += self._children[node]
        return tuple(order)

    def children(self, node: int) -> tuple[int, ...]:
        """Nodes whose parent it is, ascending."""
        return self._children[node]

    def ancestors(self, node: int) -> tuple[int, ...]:
        """The parent and its ancestors up to the root: the order in which a node looks for a parent."""
        path: list[int] = []
        parent = self.parents[node]
        while parent is not None:
            path.append(parent)
            parent = self.parents[parent]
        return tuple(path)

    @cached_property
    def depth(self) -> int:
        """Hops from the root to the node that is farthest."""
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


ALL = 2**31  # a fan-out without bound


@dataclass(frozen=True, slots=True)
class Shape:
    """How a tree is grown over any nodes, e.g. zones in a chain, each a binary tree inside: `Shape(2, heads=1)`.

    A fan-out of 1 makes a chain and `ALL` a star. Each zone is entered once, at its head, which is its first node,
    and left through one node, so that nothing competes for the link between zones: its nearest leaf, whose own
    link is idle, or, with `short`, its head, which is fewer hops away.
    """

    members: int  # children of a node within its zone, at most
    heads: int = 1  # zones that one zone passes versions on to, at most
    short: bool = False

    def __post_init__(self) -> None:
        if min(self.members, self.heads) < 1:
            raise ConfigError(
                f"relay.fanout={min(self.members, self.heads)}: a node needs room for a child; set at least 1"
            )

    def tell(self, *, num_zones: int) -> str:
        """In words, e.g. `a chain`, or with zones `zones in a chain, each left through a leaf; inside, a star`."""
        if num_zones == 1:
            return _tell(self.members)
        door = "its head" if self.short else "a leaf"
        return f"zones in {_tell(self.heads)}, each left through {door}; inside, {_tell(self.members)}"


def _tell(fanout: int) -> str:
    return {1: "a chain", ALL: "a star"}.get(fanout, f"a tree of fan-out {fanout}")


def shape_of(kind: TopologyKind, *, fanout: int) -> Shape:
    """The shape of a config, the same among zones and within them; `cost.choose` finds that of `auto`.

    Raises `ConfigError` if a node could have no child.
    """
    match kind:
        case TopologyKind.STAR:  # everyone below the root: good for few receivers and small models
            return Shape(ALL, heads=ALL, short=True)
        case TopologyKind.CHAIN:  # time approaches M / W for large M, whatever the number of receivers
            return Shape(1, heads=1)
        case TopologyKind.KARY:  # filled level by level
            return Shape(fanout, heads=fanout)
    raise AssertionError(f"{kind} has no shape of its own")


def grow(shape: Shape, zones: Sequence[str]) -> Topology:
    """The tree over nodes of these zones ([N] labels), e.g. `grow(Shape(1), ["a", "b", "a"])`: 0 > 2 > 1.

    Raises `ConfigError` without nodes.
    """
    if not zones:
        raise ConfigError("relay.nodes=0: a tree needs its root; set at least 1")
    members: dict[str, list[int]] = {}
    for node, zone in enumerate(zones):
        members.setdefault(zone, []).append(node)
    parents: list[int | None] = [None] * len(zones)
    doors: list[int] = []  # node through which each zone is left
    for rank, nodes in enumerate(members.values()):
        if rank:
            parents[nodes[0]] = doors[(rank - 1) // shape.heads]
        for place, node in enumerate(nodes[1:]):
            parents[node] = nodes[place // shape.members]
        num_inner = -(-(len(nodes) - 1) // shape.members)
        doors.append(nodes[0] if shape.short else nodes[num_inner])
    return Topology(tuple(parents))
