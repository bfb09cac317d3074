"""Shapes of the relay tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.relay.tree import Topology, grow_tree

TREES = st.builds(
    lambda num_nodes, fanout: grow_tree(num_nodes, fanout=fanout), st.integers(1, 60), st.integers(1, 6)
)


@given(TREES)
def test_every_node_reaches_the_root_without_a_cycle(tree: Topology) -> None:
    for node in range(1, tree.num_nodes):
        ancestors = tree.ancestors(node)
        assert ancestors[-1] == 0
        assert len(set(ancestors) | {node}) == len(ancestors) + 1


@given(TREES)
def test_a_parent_has_a_lower_number(tree: Topology) -> None:
    """In every tree, so that nodes of a smaller and of a larger tree form no cycle."""
    for node, parent in enumerate(tree.parents[1:], 1):
        assert parent is not None
        assert parent < node


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
def test_a_tree_is_as_flat_as_its_fanout_allows(num_nodes: int, fanout: int) -> None:
    tree = grow_tree(num_nodes, fanout=fanout)
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
    assert grow_tree(5, fanout=4).depth == 1
    assert grow_tree(5, fanout=1).depth == 4


@pytest.mark.parametrize("parents", [(None, 2, 1), (None, None), (0, 0), (None, 1), (None, 5), (None, -1), ()])
def test_what_is_not_one_tree_below_node_0_is_no_topology(parents: tuple[int | None, ...]) -> None:
    with pytest.raises(AssertionError):
        Topology(parents)


def test_a_tree_without_nodes_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"relay\.nodes=0"):
        grow_tree(0, fanout=2)
