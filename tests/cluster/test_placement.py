"""Where parts go: laws of the plan, and real Ray actors that land where it says."""

import asyncio
import os
import threading
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.records.codec import decode, encode
from laminar_py.records.columns import Source
from laminar_py.relay.tree import grow_tree
from laminar_py.runtime.cluster.backend import free_port, nodes, on_node
from laminar_py.runtime.cluster.errors import PartCrashedError, RunFailedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.cluster.placement import Needs, Node, NodeSlot, Placement, Plan, make_plan
from tests.runs.fake_cluster import FakeCluster, joined, wait_for_a_death
from tests.runs.runs import REPO

REFERENCE = ((Source.REFERENCE, 1),)


def hosts(*gpus: int) -> list[Node]:
    """Nodes a, b, c ... with so many GPUs; the controller is on the first."""
    return [
        Node(id="abcdefgh"[index], ip=f"10.0.0.{index}", gpus=count, cpus=8, here=index == 0)
        for index, count in enumerate(gpus)
    ]


def on(places) -> str:
    """Nodes of parts that have one, e.g. "aab"."""
    return "".join(place.node for place in places if place)


@pytest.mark.parametrize(
    ("gpus", "needs", "learner", "replicas", "relays"),
    [
        ((0,), Needs(ranks=2, rank_gpus=0, replicas=2, replica_gpus=0, relays=3), "aa", "aa", "aaa"),  # a laptop
        (
            (0, 0),
            Needs(ranks=1, rank_gpus=0, replicas=4, replica_gpus=0, relays=3),
            "a",
            "baba",
            "ab",
        ),  # CPUs of two nodes
        ((8,), Needs(ranks=2, rank_gpus=1, replicas=6, replica_gpus=1), "aa", "aaaaaa", "a"),
        (
            (8, 8),
            Needs(ranks=2, rank_gpus=1, replicas=6, replica_gpus=1),
            "aa",
            "aaaaaa",
            "a",
        ),  # on one node, if it has room
        ((8,), Needs(ranks=2, rank_gpus=1, replicas=3, replica_gpus=2, relays=3), "aa", "aaa", "aaa"),
        (
            (0, 8),
            Needs(ranks=2, rank_gpus=1, replicas=6, replica_gpus=1, relays=2),
            "bb",
            "bbbbbb",
            "bb",
        ),  # the controller's node has no GPU
        (
            (8, 8, 8),
            Needs(ranks=8, rank_gpus=1, replicas=16, replica_gpus=1),
            "a" * 8,
            "b" * 8 + "c" * 8,
            "abc",
        ),
        (
            (8, 8, 8),
            Needs(ranks=12, rank_gpus=1, replicas=3, replica_gpus=4),
            "a" * 8 + "bbbb",
            "bcc",
            "abc",
        ),  # filled first, as far as needed
        (
            (6, 4),
            Needs(ranks=2, rank_gpus=1, replicas=2, replica_gpus=4),
            "aa",
            "ab",
            "ab",
        ),  # elsewhere the learner would cost a replica
        ((8, 8), Needs(ranks=1, rank_gpus=0, replicas=2, replica_gpus=8), "a", "ab", "ab"),  # a learner on CPUs
        ((0, 8), Needs(ranks=1, rank_gpus=0, replicas=1, replica_gpus=8), "a", "b", "ab"),
        (
            (0, 0, 0),
            Needs(ranks=1, rank_gpus=0, replicas=2, replica_gpus=0, hosts=("10.0.0.2", "127.0.0.1")),
            "a",
            "ca",
            "ac",
        ),  # attached servers
    ],
)
def test_a_plan_is_the_one_expected(gpus, needs, learner, replicas, relays):
    plan = make_plan(needs, hosts(*gpus))
    assert (on(plan.learner), on(plan.replicas), "".join(plan.relays)) == (learner, replicas, relays)
    assert {place.gpus for place in plan.learner} == {needs.rank_gpus}
    assert {place.gpus for place in plan.replicas} == {needs.replica_gpus}


@pytest.mark.parametrize(
    ("gpus", "needs", "reference"),
    [
        (
            (0, 0),
            Needs(ranks=2, rank_gpus=0, replicas=2, replica_gpus=0, stages=((Source.REFERENCE, 0),)),
            "b",
        ),  # on CPUs, where fewest parts are
        ((8,), Needs(ranks=2, rank_gpus=1, replicas=5, replica_gpus=1, stages=REFERENCE), "a"),
        ((8, 8), Needs(ranks=8, rank_gpus=1, replicas=7, replica_gpus=1, stages=REFERENCE), "b"),
        (
            (8, 9),
            Needs(ranks=4, rank_gpus=1, replicas=3, replica_gpus=4, stages=REFERENCE),
            "b",
        ),  # beside the learner it would cost a replica
    ],
)
def test_a_reference_stage_has_a_device_of_its_own_where_it_costs_least(gpus, needs, reference):
    plan = make_plan(needs, hosts(*gpus))
    assert plan.stages == (NodeSlot(reference, needs.stage_gpus),)
    assert None not in plan.replicas


@pytest.mark.parametrize(
    ("gpus", "needs", "servers"),
    [
        ((0, 0), Needs(ranks=1, rank_gpus=0, replicas=2, replica_gpus=0, servers=(("prm", 0),) * 2), "ba"),
        ((8,), Needs(ranks=2, rank_gpus=1, replicas=2, replica_gpus=2, servers=(("prm", 1), ("judge", 1))), "aa"),
        (
            (6, 9),
            Needs(ranks=2, rank_gpus=1, replicas=3, replica_gpus=4, servers=(("prm", 1),)),
            "b",
        ),  # beside the learner it would cost a replica
    ],
)
def test_servers_of_the_reward_have_devices_of_their_own_where_they_cost_least(gpus, needs, servers):
    plan = make_plan(needs, hosts(*gpus))
    assert on(plan.servers) == servers
    assert None not in plan.replicas
    assert_laws(plan, needs, hosts(*gpus))


@pytest.mark.parametrize(
    ("gpus", "needs", "message"),
    [
        (
            (4,),
            Needs(ranks=8, rank_gpus=1, replicas=1, replica_gpus=1),
            r"learner\.world_size=8: needs 8 GPUs, 4 are free on 1 node; lower it",
        ),
        (
            (8,),
            Needs(ranks=2, rank_gpus=1, replicas=7, replica_gpus=1),
            r"rollout\.replicas=7: there is room for 6; .* more than 0 left .* learner's 2 and placed rep",
        ),
        (
            (4, 4),
            Needs(ranks=1, rank_gpus=1, replicas=1, replica_gpus=8, placed_by="dice.size"),
            r"there is room for 0; each of them \(dice\.size\) needs 8 GPUs of one node, .* than 4",
        ),
        (
            (4,),
            Needs(ranks=4, rank_gpus=1, replicas=1, replica_gpus=0, stages=REFERENCE),
            r"algorithm\.reference_pass=stage: it needs .* the learner's 4",
        ),
        (
            (8,),
            Needs(ranks=2, rank_gpus=1, replicas=6, replica_gpus=1, stages=REFERENCE),
            r"the learner's 2, the frozen models' 1 and placed replicas; lower",
        ),
        (
            (4,),
            Needs(ranks=4, rank_gpus=1, replicas=1, replica_gpus=0, stages=((Source.TEACHER, 1),)),
            r"algorithm\.teacher: its model needs .*; name the address of a server, lower learner\.world_size",
        ),
        (
            (8,),
            Needs(ranks=2, rank_gpus=1, replicas=5, replica_gpus=1, servers=(("prm", 2),)),
            r"there is room for 4; .* the learner's 2, reward\.servers' 2 and placed replicas; lower",
        ),
        (
            (2, 2),
            Needs(ranks=1, rank_gpus=1, replicas=1, replica_gpus=0, servers=(("prm", 2), ("prm", 2))),
            r"reward\.servers\.prm\.gpus=2: .* no node has more than 1 left beside the learner's 1",
        ),
        (
            (3, 3),
            Needs(ranks=6, rank_gpus=1, replicas=3, replica_gpus=2, shared=3, placed_by="dice.size"),
            r"cluster\.share=true: replica 1 uses .* ranks 2 to 3, which are on 2 nodes \(dice\.size=2\); lower",
        ),
        (
            (0, 0),
            Needs(ranks=1, rank_gpus=0, replicas=1, replica_gpus=0, hosts=("10.9.9.9",), placed_by="dice.hosts"),
            r"dice\.hosts\[0\]: no Ray node .* 10\.9\.9\.9",
        ),
    ],
)
def test_what_cannot_be_placed_is_one_line_with_a_remedy(gpus, needs, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_plan(needs, hosts(*gpus))
    assert "\n" not in str(caught.value)
    assert ";" in str(caught.value)


@pytest.mark.parametrize(
    ("gpus", "needs", "learner", "replicas", "own"),
    [
        ((1,), Needs(ranks=1, rank_gpus=1, replicas=1, replica_gpus=1, shared=1), "a", "a", 0),  # one GPU for all
        ((8,), Needs(ranks=4, rank_gpus=1, replicas=6, replica_gpus=1, shared=4), "aaaa", "aaaaaa", 2),  # mixed
        ((8,), Needs(ranks=8, rank_gpus=1, replicas=2, replica_gpus=4, shared=2), "a" * 8, "aa", 0),
        ((4, 4), Needs(ranks=8, rank_gpus=1, replicas=4, replica_gpus=2, shared=4), "aaaabbbb", "aabb", 0),
        ((3, 5), Needs(ranks=2, rank_gpus=1, replicas=3, replica_gpus=2, shared=1), "aa", "abb", 2),
    ],
)
def test_a_replica_that_shares_has_the_node_of_its_ranks_and_no_gpu_of_its_own(
    gpus, needs, learner, replicas, own
):
    plan = make_plan(needs, hosts(*gpus))
    assert (on(plan.learner), on(plan.replicas)) == (learner, replicas)
    assert [place.gpus for place in plan.replicas] == [0] * needs.shared + [needs.replica_gpus] * own
    assert_laws(plan, needs, hosts(*gpus))


def test_replicas_that_share_follow_a_learner_that_moves():
    needs = Needs(ranks=2, rank_gpus=1, replicas=3, replica_gpus=1, shared=2)
    first = make_plan(needs, hosts(2, 3))
    assert (on(first.learner), on(first.replicas)) == ("aa", "aab")
    second = make_plan(needs, hosts(2, 3)[1:], keep=first)
    assert (on(second.learner), on(second.replicas)) == ("bb", "bbb")
    assert second.replicas[2] == first.replicas[2]


def test_a_replica_that_shares_has_no_place_once_its_ranks_are_on_two_nodes():
    needs = Needs(ranks=2, rank_gpus=1, replicas=2, replica_gpus=2, shared=1)
    nodes = hosts(2, 1, 3)
    first = make_plan(needs, nodes)
    assert (on(first.learner), on(first.replicas)) == ("aa", "ac")
    second = make_plan(needs, nodes[1:], keep=first)
    assert (on(second.learner), second.replicas) == ("bc", (None, first.replicas[1]))


CLUSTERS = st.lists(st.integers(0, 8), min_size=1, max_size=6).map(lambda gpus: hosts(*gpus))
NEEDS = st.builds(
    Needs,
    ranks=st.integers(1, 10),
    rank_gpus=st.integers(0, 1),
    replicas=st.integers(1, 10),
    replica_gpus=st.sampled_from([0, 1, 2, 4, 8]),
    relays=st.integers(1, 4),
)


SERVERS = st.lists(st.tuples(st.sampled_from(["prm", "judge"]), st.integers(0, 2)), max_size=3).map(tuple)
STAGES = st.sampled_from([(), REFERENCE, ((Source.REFERENCE, 1), (Source.TEACHER, 0))])
REFERRING = st.builds(replace, NEEDS, stages=STAGES, servers=SERVERS)


def sharing(needs: Needs) -> Needs:
    """Needs of a run in which as many replicas share as the ranks have GPUs for."""
    room = needs.ranks * needs.rank_gpus // needs.replica_gpus if needs.replica_gpus else 0
    return replace(needs, shared=min(needs.replicas, room))


ANY = st.one_of(REFERRING, REFERRING.map(sharing))


def planned(needs: Needs, found: list[Node], *, keep: Plan | None = None) -> Plan | None:
    try:
        return make_plan(needs, found, keep=keep)
    except ConfigError:
        return None


def assert_laws(plan: Plan, needs: Needs, found: list[Node]) -> None:
    promised = Counter()
    for place in filter(None, (*plan.learner, *plan.replicas, *plan.servers, *plan.stages)):
        promised[place.node] += place.gpus
    for node in found:
        assert promised[node.id] <= node.gpus, f"{node} promises {promised[node.id]}"
    assert set(promised) <= {node.id for node in found}, "a part is on a node that does not live"
    assert [place.gpus for place in plan.learner] == [needs.rank_gpus] * needs.ranks
    assert {place.gpus for place in plan.replicas[needs.shared :] if place} <= {needs.replica_gpus}
    for index, place in enumerate(plan.replicas[: needs.shared]):
        ranks = plan.learner[index * needs.replica_gpus : (index + 1) * needs.replica_gpus]
        assert place is None or {place.node} == {rank.node for rank in ranks}
        assert place is None or not place.gpus
    assert len(plan.replicas) == needs.replicas
    assert [gpus for _, gpus in needs.servers] == [
        gpus if place is None else place.gpus for (_, gpus), place in zip(needs.servers, plan.servers, strict=True)
    ]
    assert {pool for pool, _ in needs.servers} == {
        pool for (pool, _), place in zip(needs.servers, plan.servers, strict=True) if place is not None
    }, "a pool has a server"
    assert [place and place.gpus for place in plan.stages] == [gpus for _, gpus in needs.stages]
    assert plan.relays[0] == plan.learner[0].node
    tree = grow_tree(len(plan.relays), fanout=2)
    for index, place in enumerate(plan.replicas):
        if place is not None:
            assert plan.relays[plan.relay_of(index, tree)] == place.node, "a replica's relay is on its host"


@given(needs=ANY, found=CLUSTERS)
def test_a_plan_keeps_its_laws(needs, found):
    plan = planned(needs, found)
    if plan is None:
        return
    assert_laws(plan, needs, found)
    assert None not in plan.replicas
    assert None not in plan.servers
    residents = {place.node for place in plan.replicas}
    hosts = residents | {plan.learner[0].node}
    if len(plan.nodes) == 1:
        assert len(plan.relays) == needs.relays
    elif len(hosts) == 1:
        assert set(plan.relays) == hosts, "only a reference or a server is elsewhere"
    else:
        assert Counter(plan.relays) == Counter(hosts), "one relay for each host"


@given(needs=NEEDS, found=CLUSTERS)
def test_the_learner_is_on_as_few_nodes_as_can_be_and_only_the_last_is_not_full(needs, found):
    plan = planned(needs, found)
    if plan is None or not needs.rank_gpus:
        return
    most = sorted((node.gpus for node in found), reverse=True)
    fewest = next(count for count in range(1, len(most) + 1) if sum(most[:count]) >= needs.ranks)
    ranks = Counter(on(plan.learner))
    gpus = {node.id: node.gpus for node in found}
    assert len(ranks) == fewest
    assert sum(1 for node, count in ranks.items() if count < gpus[node]) <= 1


@given(needs=NEEDS.filter(lambda needs: needs.replica_gpus > 0), found=CLUSTERS)
def test_a_learner_of_one_node_never_takes_the_room_that_replicas_need(needs, found):
    ranks = needs.ranks * needs.rank_gpus

    def fits(home: Node) -> bool:
        left = [node.gpus - (ranks if node is home else 0) for node in found]
        return min(left) >= 0 and sum(count // needs.replica_gpus for count in left) >= needs.replicas

    if max(node.gpus for node in found) >= ranks:
        assert (planned(needs, found) is not None) == any(map(fits, found))


@given(needs=ANY, found=CLUSTERS, data=st.data())
def test_after_deaths_what_lives_stays_and_the_laws_hold(needs, found, data):
    """One node dies after the other."""
    plan = planned(needs, found)
    order = data.draw(st.permutations(found))
    for alive in (order[count:] for count in range(1, len(order))):
        before, plan = plan, planned(needs, alive, keep=plan) if plan else None
        if plan is None:
            return
        assert_laws(plan, needs, alive)
        assert len(plan.relays) >= len(before.relays)
        living = {node.id for node in alive}
        own = slice(needs.shared, None)
        for old, new in zip(before.replicas[own], plan.replicas[own], strict=True):
            assert new == old or old is None or old.node not in living
        for old, new in zip(before.servers, plan.servers, strict=True):
            assert new == old or old is None or old.node not in living
        if {place.node for place in before.learner} <= living:
            assert plan.learner == before.learner
            assert plan.replicas[: needs.shared] == before.replicas[: needs.shared]
        for old, new in zip(before.stages, plan.stages, strict=True):
            assert new == old or old is None or old.node not in living


async def test_a_placement_is_made_anew_from_the_nodes_alive():
    seen = hosts(8, 8, 8)
    placement = Placement(Needs(ranks=8, rank_gpus=1, replicas=8, replica_gpus=1), lambda: seen)
    assert on(placement.plan.replicas) == "b" * 8
    del seen[1]
    await placement.refresh()
    assert on(placement.plan.replicas) == "c" * 8
    assert placement.plan.relays == ("a", "c")
    assert (placement.ip("b"), placement.ip("c")) == ("10.0.0.1", "10.0.0.2")
    del seen[1]
    with pytest.raises(RunFailedError, match="no live node has room for a replica"):
        await placement.refresh()


async def test_replicas_of_a_dead_node_that_find_no_room_come_back_with_a_node_that_has_it():
    seen = hosts(8, 8, 8)
    placement = Placement(Needs(ranks=8, rank_gpus=1, replicas=16, replica_gpus=1), lambda: seen)
    del seen[1]
    await placement.refresh()
    assert [place.node if place else None for place in placement.plan.replicas] == [None] * 8 + ["c"] * 8
    assert placement.plan.relays == ("a", None, "c")
    seen.append(Node(id="d", ip="10.0.0.9", gpus=8, cpus=8))
    await placement.refresh()
    assert on(placement.plan.replicas) == "d" * 8 + "c" * 8
    assert placement.plan.relays == ("a", "d", "c")


async def test_a_larger_fleet_has_a_place_where_there_is_room_and_nobody_moves_for_it():
    seen = hosts(4)
    needs = Needs(ranks=1, rank_gpus=1, replicas=2, replica_gpus=1, relays=3)
    placement = Placement(needs, lambda: seen)
    before = placement.plan
    await placement.scale(replicas=6)
    assert placement.plan.replicas[:2] == before.replicas
    assert placement.plan.replicas[3:] == (None, None, None)
    seen.append(Node(id="b", ip="10.0.0.9", gpus=8, cpus=8))
    await placement.refresh()
    assert on(placement.plan.replicas) == "aaabbb"
    assert placement.plan.relays == ("a", "a", "a", "b"), "who pulls from one of the first three stays there"


async def test_a_smaller_fleet_gives_its_places_to_those_that_wait_or_come_later():
    seen = hosts(3)
    needs = Needs(ranks=1, rank_gpus=1, replicas=2, replica_gpus=1)
    placement = Placement(needs, lambda: seen)
    await placement.scale(replicas=3)
    assert placement.plan.replicas[2] is None
    await placement.scale(replicas=3, gone=frozenset({0}))
    assert [place.node if place else None for place in placement.plan.replicas] == [None, "a", "a"]
    seen[0] = Node(id="a", ip="10.0.0.0", gpus=0, cpus=8, here=True)
    await placement.refresh()  # one that has left needs no place, so nobody looks for it
    assert placement.plan.replicas[0] is None


async def test_a_fleet_that_grows_takes_no_gpus_that_others_have_taken_since():
    seen = hosts(2, 8)
    needs = Needs(ranks=1, rank_gpus=1, replicas=1, replica_gpus=1)
    placement = Placement(needs, lambda: seen)
    assert placement.plan.nodes == {"a"}
    seen[1] = Node(id="b", ip="10.0.0.1", gpus=3, cpus=8)
    await placement.scale(replicas=8)
    assert on(placement.plan.replicas) == "abbb"


async def test_a_learner_with_more_ranks_keeps_its_first_ones_and_waits_for_gpus_that_replicas_have():
    seen = hosts(4)
    needs = Needs(ranks=2, rank_gpus=1, replicas=2, replica_gpus=1)
    placement = Placement(needs, lambda: seen)
    assert not await placement.scale_learner(3)
    assert (placement.needs.ranks, on(placement.plan.learner)) == (2, "aa")
    await placement.scale(replicas=2, gone=frozenset({0}))
    assert await placement.scale_learner(3)
    assert on(placement.plan.learner) == "aaa"
    seen.append(Node(id="b", ip="10.0.0.9", gpus=2, cpus=8))
    assert placement.has_room(5) is False
    assert await placement.scale_learner(5)
    assert on(placement.plan.learner) == "aaabb"
    assert await placement.scale_learner(1)
    await placement.scale(replicas=5, gone=frozenset({0}))
    assert (on(placement.plan.learner), on(placement.plan.replicas[1:])) == ("a", "aaab")


async def test_ranks_that_are_added_stay_beside_the_others_where_there_is_room():
    seen = hosts(2, 8)
    seen[0], seen[1] = replace(seen[0], here=False), replace(seen[1], here=True)
    placement = Placement(Needs(ranks=1, rank_gpus=1, replicas=1, replica_gpus=1), lambda: seen)
    home = placement.plan.learner[0].node
    assert await placement.scale_learner(2)
    assert [place.node for place in placement.plan.learner] == [home, home]


async def test_a_fleet_and_a_learner_that_change_at_once_both_get_what_they_need():
    seen = hosts(8)
    placement = Placement(Needs(ranks=1, rank_gpus=1, replicas=2, replica_gpus=1), lambda: seen)
    await asyncio.gather(placement.refresh(), placement.scale(replicas=4), placement.scale_learner(3))
    assert (on(placement.plan.learner), on(placement.plan.replicas)) == ("aaa", "aaaa")


async def test_a_learner_without_a_place_ends_the_run():
    seen = hosts(8, 8)
    placement = Placement(Needs(ranks=8, rank_gpus=1, replicas=8, replica_gpus=1), lambda: seen)
    del seen[0]
    with pytest.raises(RunFailedError, match=r"the live nodes have no room .*: learner\.world_size=8"):
        await placement.refresh()


async def test_those_who_wait_for_a_node_share_a_look_which_does_not_hold_up_the_loop():
    looks = []

    def see():
        looks.append(threading.current_thread())
        return hosts(8)

    placement = Placement(Needs(ranks=1, rank_gpus=1, replicas=1, replica_gpus=1), see)
    looks.clear()
    await asyncio.gather(*(placement.refresh(age_s=60.0) for _ in range(5)))
    assert len(looks) == 1
    assert looks[0] is not threading.main_thread()
    await asyncio.gather(*(placement.refresh() for _ in range(5)))
    assert len(looks) == 3, "the second began after the other four had asked"


async def test_gpus_that_this_run_holds_do_not_count_as_lost_when_the_plan_is_made_anew():
    seen = hosts(8, 8)
    placement = Placement(Needs(ranks=2, rank_gpus=1, replicas=6, replica_gpus=1), lambda: seen)
    seen[0] = Node(id="a", ip="10.0.0.0", gpus=0, cpus=8, here=True)  # as Ray tells once the parts run
    seen[1] = Node(id="c", ip="10.0.0.9", gpus=8, cpus=8)
    await placement.refresh()
    assert on((*placement.plan.learner, *placement.plan.replicas)) == "a" * 8


@pytest.mark.parametrize(
    ("name", "gpus", "learner", "rollout"),
    [
        ("math_long_cot/7b_8gpu", (8,), 4, 4),
        ("math_long_cot/7b_24gpu", (8, 8, 8), 14, 10),
        ("math_long_cot/14b_8gpu", (8,), 4, 4),
        ("math_long_cot/32b_64gpu", (8,) * 8, 36, 28),
        ("math_long_cot/32b_128k_64gpu", (8,) * 8, 16, 48),
        ("code_long_cot/7b_8gpu", (8,), 4, 4),
        ("lora/7b_4gpu", (4,), 4, 0),  # its replica is on GPUs of the learner
        ("lora/32b_8gpu", (8,), 8, 0),
        ("mixture_30b_a3b/32gpu", (8,) * 4, 12, 20),
    ],
)
def test_a_shipped_gpu_config_fits_the_cluster_that_it_names(name, gpus, learner, rollout):
    config = load_config(REPO / "experiments" / f"{name}.yaml", [])
    plan = make_plan(Needs.from_config(config), hosts(*gpus))
    assert_laws(plan, Needs.from_config(config), hosts(*gpus))
    assert sum(place.gpus for place in plan.learner) == learner
    assert sum(place.gpus for place in plan.replicas) == rollout
    assert len(plan.nodes) == len(gpus)


def process_here():
    return encode(os.getpid())


class Witness:
    """An actor that says where it is."""

    def where(self) -> tuple[str, list[str], str]:
        import ray  # after our own package, which sets what Ray reads at its import

        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all of them")
        return ray.get_runtime_context().get_node_id(), visible.split(",") if visible else [], os.getcwd()


@pytest.mark.slow
async def test_actors_land_on_their_nodes_with_gpus_of_their_own_and_one_of_a_dead_node_is_a_death():
    cluster = FakeCluster(8, 8)
    with joined(cluster):
        placement = Placement(Needs(ranks=4, rank_gpus=1, replicas=3, replica_gpus=4), nodes)
        plan = placement.plan
        places = [*plan.replicas, plan.learner[0], NodeSlot(plan.relays[0])]
        parts = [Part(f"part-{i}", Witness, concurrency=1, timeout_s=60, place=p) for i, p in enumerate(places)]
        seen = [await part.call_for(tuple[str, list[str], str], "where") for part in parts]
        assert [node for node, *_ in seen] == [place.node for place in places]
        assert [len(gpus) for _, gpus, _ in seen] == [4, 4, 4, 1, 0]
        held = [(node, gpu) for node, gpus, _ in seen for gpu in gpus]
        assert len(set(held)) == len(held) == 13, "a GPU is visible in two parts"
        assert {folder for *_, folder in seen} == {os.getcwd()}
        other = next(node for node in nodes() if not node.here)
        assert decode(int, await on_node(other.id, free_port, other.ip)) >= 1024
        here = next(node.id for node in nodes() if node.here)
        assert await on_node(here, process_here) == encode(os.getpid())
        assert await on_node(other.id, process_here) != encode(os.getpid())
        cluster.kill(1)
        wait_for_a_death(1)
        with pytest.raises(PartCrashedError):
            await parts[[place.node for place in places].index(other.id)].call("where")
        await placement.refresh()
        assert [place is None for place in placement.plan.replicas].count(True) == 2
