"""Shapes of the relay tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.config.cluster import TopologyKind
from laminar_py.relay.tree import ALL, Shape, Topology, grow_tree, shape_of


def build(kind: TopologyKind, *, num_nodes: int, fanout: int) -> Topology:
    """The tree of a config without zones."""
    return grow_tree(shape_of(kind, fanout=fanout), [""] * num_nodes)


KINDS = st.sampled_from([TopologyKind.STAR, TopologyKind.CHAIN, TopologyKind.KARY])
FANOUTS = st.integers(1, 5) | st.just(ALL)
SHAPES = st.builds(
    lambda members, heads, short: Shape(members, heads=heads, short=short), FANOUTS, FANOUTS, st.booleans()
)
ZONES = st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=60)
TREES = st.builds(
    lambda kind, num_nodes, fanout: build(kind, num_nodes=num_nodes, fanout=fanout),
    KINDS,
    st.integers(1, 60),
    st.integers(1, 5),
) | st.builds(grow_tree, SHAPES, ZONES)


@given(TREES)
def test_every_node_reaches_the_root_without_a_cycle(tree: Topology) -> None:
    for node in range(1, tree.num_nodes):
        ancestors = tree.ancestors(node)
        assert ancestors[-1] == 0
        assert len(set(ancestors) | {node}) == len(ancestors) + 1


@given(TREES)
def test_downward_names_every_node_after_its_parent(tree: Topology) -> None:
    seen: set[int | None] = {None}
    for node in tree.downward:
        assert tree.parents[node] in seen
        seen.add(node)
    assert seen == {None, *range(tree.num_nodes)}
    assert tree.depth == max(len(tree.ancestors(node)) for node in range(tree.num_nodes))


@given(TREES)
def test_parents_and_children_agree(tree: Topology) -> None:
    edges = {(parent, child) for parent in range(tree.num_nodes) for child in tree.children(parent)}
    assert edges == {(tree.parents[child], child) for child in range(1, tree.num_nodes)}


@given(st.integers(1, 400), st.integers(2, 6))
def test_a_kary_tree_is_as_flat_as_its_fanout_allows(num_nodes: int, fanout: int) -> None:
    tree = build(TopologyKind.KARY, num_nodes=num_nodes, fanout=fanout)
    assert max(len(tree.children(node)) for node in range(num_nodes)) <= fanout
    assert sum(fanout**level for level in range(tree.depth)) < num_nodes or num_nodes == 1
    assert num_nodes <= sum(fanout**level for level in range(tree.depth + 1))


@given(TREES)
def test_replicas_go_to_leaves_first_and_to_every_node_in_turn(tree: Topology) -> None:
    turn = [tree.node_of_replica(replica) for replica in range(2 * tree.num_nodes)]
    assert tuple(turn[: len(tree.leaves)]) == tree.leaves
    assert sorted(turn[: tree.num_nodes]) == list(range(tree.num_nodes))
    assert turn[tree.num_nodes :] == turn[: tree.num_nodes]
    assert turn[tree.num_nodes - 1] == 0


def test_star_and_chain_have_depth_one_and_n_minus_one() -> None:
    assert build(TopologyKind.STAR, num_nodes=5, fanout=2).depth == 1
    assert build(TopologyKind.CHAIN, num_nodes=5, fanout=2).depth == 4


@given(SHAPES, ZONES)
def test_each_zone_is_entered_once_and_left_through_one_node(shape: Shape, zones: list[str]) -> None:
    tree = grow_tree(shape, zones)
    crossings = [
        (parent, node)
        for node, parent in enumerate(tree.parents)
        if parent is not None and zones[parent] != zones[node]
    ]
    assert sorted(zones[node] for _, node in crossings) == sorted(set(zones) - {zones[0]})
    assert len({zones[parent] for parent, _ in crossings}) == len({parent for parent, _ in crossings})
    assert all(zones.index(zones[node]) == node for _, node in crossings)


@given(SHAPES, ZONES)
def test_a_zone_has_no_wider_node_than_its_shape_says(shape: Shape, zones: list[str]) -> None:
    tree = grow_tree(shape, zones)
    for node, zone in enumerate(zones):
        near = [child for child in tree.children(node) if zones[child] == zone]
        assert len(near) <= shape.members
        assert len(tree.children(node)) - len(near) <= shape.heads
        assert shape.short or not near or len(near) == len(tree.children(node))


@given(SHAPES, SHAPES, ZONES, ZONES)
def test_nodes_started_under_different_shapes_form_no_cycle(
    old: Shape, new: Shape, zones: list[str], more: list[str]
) -> None:
    ranks = {zone: rank for rank, zone in enumerate(dict.fromkeys(zones + more))}
    for tree, labels in ((grow_tree(old, zones), zones), (grow_tree(new, zones + more), zones + more)):
        for node in range(1, tree.num_nodes):
            parent = tree.parents[node]
            assert parent is not None
            assert (ranks[labels[parent]], parent) < (ranks[labels[node]], node)


@given(SHAPES, ZONES)
def test_zones_may_come_in_any_order_of_nodes(shape: Shape, zones: list[str]) -> None:
    order = sorted(range(len(zones)), key=lambda node: (zones.index(zones[node]), node))
    sorted_tree = grow_tree(shape, [zones[node] for node in order])
    parents = {
        order[node]: parent if parent is None else order[parent] for node, parent in enumerate(sorted_tree.parents)
    }
    assert grow_tree(shape, zones).parents == tuple(parents[node] for node in range(len(zones)))


@pytest.mark.parametrize("parents", [(None, 2, 1), (None, None), (0, 0), (None, 1), (None, 5), (None, -1), ()])
def test_what_is_not_one_tree_below_node_0_is_no_topology(parents: tuple[int | None, ...]) -> None:
    with pytest.raises(AssertionError):
        Topology(parents)


@pytest.mark.parametrize(
    ("nodes", "fanout", "name"), [(0, 2, "relay.nodes=0"), (3, 0, "relay.fanout: 0 children")]
)
def test_an_impossible_tree_is_refused_by_name(nodes: int, fanout: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build(TopologyKind.KARY, num_nodes=nodes, fanout=fanout)
