"""Shapes of the relay tree."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.config import TopologyKind
from laminar_py.relay.topology import Topology, build, kary

TREES = st.builds(
    lambda kind, num_nodes, fanout: build(kind, num_nodes=num_nodes, fanout=fanout),
    st.sampled_from(TopologyKind),
    st.integers(1, 60),
    st.integers(1, 5),
)


@given(TREES)
def test_every_node_reaches_the_root_without_a_cycle(tree: Topology) -> None:
    for node in range(1, tree.num_nodes):
        ancestors = tree.ancestors(node)
        assert ancestors[-1] == 0
        assert len(set(ancestors) | {node}) == len(ancestors) + 1


@given(TREES)
def test_parents_and_children_agree(tree: Topology) -> None:
    edges = {(parent, child) for parent in range(tree.num_nodes) for child in tree.children(parent)}
    assert edges == {(tree.parents[child], child) for child in range(1, tree.num_nodes)}


@given(TREES)
def test_fallbacks_are_the_ancestors_above_the_parent_nearest_first(tree: Topology) -> None:
    for node in range(1, tree.num_nodes):
        parent = tree.parents[node]
        assert parent is not None
        assert tree.fallbacks(node) == tree.ancestors(parent)
    assert tree.fallbacks(0) == ()


@given(st.integers(1, 400), st.integers(2, 6))
def test_a_kary_tree_is_as_flat_as_its_fanout_allows(num_nodes: int, fanout: int) -> None:
    tree = kary(num_nodes, fanout)
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


@pytest.mark.parametrize(("nodes", "fanout", "name"), [(0, 2, "relay.nodes=0"), (3, 0, "relay.fanout=0")])
def test_an_impossible_tree_is_refused_by_name(nodes: int, fanout: int, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        build(TopologyKind.KARY, num_nodes=nodes, fanout=fanout)
