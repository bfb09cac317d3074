"""Trajectories that wait for a replica: where they go when replicas die, come back one by one, or never do."""

from collections import Counter
from random import Random

import pytest

from laminar_py.control.waiting import Router
from laminar_py.ledger.recovery import Recovered
from laminar_py.records.events import Dropped
from laminar_py.records.trajectory import DropReason, Kind, Status
from tests.builders import make_prompt
from tests.control.fleet import Fleet, ages_of
from tests.control.test_restore import left

REPLICAS, BATCH, VERSIONS = 16, 128, 4


async def test_what_a_dead_replica_had_is_not_given_to_one_that_is_starting():
    fleet = Fleet(replicas=2, group_size=2, capacity=1, max_staleness=2)
    await fleet.report(0)
    await fleet.lose_replica(0)
    fleet.hand_out()
    assert fleet.scheduler.views.in_flight == 0
    await fleet.report(1)
    assert {"g0.0", "g0.1"} == set(fleet.running[1])


async def pinned_to_the_past():
    """Two replicas, of which the one that died had a group of version 0 and the other serves version 1."""
    fleet = Fleet(replicas=2, group_size=2, capacity=1)
    await fleet.report(0)
    for name in ("g0.0", "g0.1"):
        await fleet.grow(0, name, tokens=3)
    fleet.scheduler.published(1)
    fleet.versions[1] = 1
    await fleet.report(1, admissible=0)
    await fleet.lose_replica(0)
    return fleet


async def test_what_goes_on_under_a_version_waits_for_a_replica_that_comes_back():
    fleet = await pinned_to_the_past()
    await fleet.report(1)
    await fleet.scheduler.incoming.enforce_deadlines()
    assert {item.trajectory_id for item in fleet.scheduler.dispatcher.for_starting(0)} == {"g0.0", "g0.1"}


async def test_what_only_a_replica_without_a_place_could_go_on_with_is_dropped_and_its_prompt_begun_anew():
    fleet = await pinned_to_the_past()
    fleet.scheduler.views.planned([False, True])
    await fleet.report(1)
    await fleet.scheduler.incoming.enforce_deadlines()
    await fleet.report(1)
    dropped = [event for event in fleet.log.events if isinstance(event, Dropped)]
    assert {event.trajectory_id: event.reason for event in dropped} == dict.fromkeys(
        ("g0.0", "g0.1"), DropReason.VERSION_LOST
    )
    assert set(fleet.running[1]) == {"g0.2", "g0.3"}


async def test_nothing_is_given_up_where_no_replica_has_a_place_since_a_resumed_run_goes_on_with_it():
    fleet = await pinned_to_the_past()
    fleet.scheduler.views.planned([False, False])
    await fleet.report(1)
    await fleet.scheduler.incoming.enforce_deadlines()
    assert not [event for event in fleet.log.events if isinstance(event, Dropped)]


async def test_an_evaluation_goes_to_another_replica_if_its_own_has_no_place_any_more():
    fleet = Fleet(replicas=2)
    fleet.scheduler.pause()
    fleet.scheduler.evaluations.request([make_prompt()])
    await fleet.report(0)
    assert set(fleet.running[0]) == {"e0.0"}
    await fleet.lose_replica(0)
    fleet.scheduler.views.planned([False, True])
    await fleet.report(1)
    assert set(fleet.running[1]) == {"e0.0"}


async def test_a_look_at_the_queue_costs_as_much_as_there_are_versions_however_many_wait(monkeypatch):
    fleet = await resumed(per_version=100)
    asked = Counter()
    monkeypatch.setattr(Router, "for_pinned", lambda self, version, limit: asked.update([version]))
    fleet.hand_out()
    assert asked == dict.fromkeys(range(VERSIONS), 1)


async def resumed(*, per_version=REPLICAS * BATCH // VERSIONS):
    """A resumed run whose dead controller left so many running trajectories of each version."""
    fleet = Fleet(replicas=REPLICAS, batch_per_replica=BATCH, group_size=8)
    fleet.scheduler.pause()
    live = [
        left(f"g{index // 8}.{index % 8}", Status.RUNNING, version=index // per_version)
        for index in range(VERSIONS * per_version)
    ]
    await fleet.scheduler.restore(
        Recovered(
            incarnation=2,
            checkpoint=None,
            events=(),
            live=tuple(live),
            next_prompt=len(live) // 8,
            next_evaluation=0,
            next_sample={entry.group_id: 8 for entry in live},
            ages=ages_of(range(VERSIONS)),
        )
    )
    fleet.scheduler.continue_live()
    return fleet


def start(fleet, replica):
    """A replica starts with what it is given, and loads the oldest version of that."""
    assignments = fleet.scheduler.dispatcher.for_starting(replica)
    fleet.running[replica] = {item.trajectory_id: item for item in assignments}
    fleet.versions[replica] = min((item.version for item in assignments), default=VERSIONS - 1)
    return assignments


@pytest.mark.parametrize("seed", range(5))
async def test_replicas_that_start_after_a_resume_divide_what_was_interrupted(seed):
    fleet, order = await resumed(), Random(seed).sample(range(REPLICAS), REPLICAS)
    versions = []
    for place, replica in enumerate(order):
        assignments = start(fleet, replica)
        assert len(assignments) == BATCH
        assert len({item.version for item in assignments}) == 1
        versions.append(assignments[0].version)
        for other in order[: place + 1 : 3]:
            await fleet.report(other, admissible=0)
    assert versions == sorted(versions), "the oldest first"


@pytest.mark.parametrize(("seed", "has_place"), [(0, True), (1, False), (2, True), (3, False)])
async def test_what_a_replica_that_never_starts_would_have_taken_goes_on_as_others_have_room(seed, has_place):
    fleet, random = await resumed(), Random(seed)
    *order, absent = random.sample(range(REPLICAS), REPLICAS)
    for replica in order:
        start(fleet, replica)
        await fleet.report(replica, admissible=0)
    fleet.scheduler.views.planned(has_place or index != absent for index in range(REPLICAS))
    while running := [index for index in order if fleet.running[index]]:
        replica = random.choice(running)
        await fleet.finish(replica, random.choice(list(fleet.running[replica])), admissible=0)
        assert max(len(items) for items in fleet.running.values()) <= BATCH
        assert fleet.scheduler.views.in_flight == sum(len(items) for items in fleet.running.values())
    live = fleet.scheduler.state.live.values()
    assert {trajectory.status for trajectory in live if trajectory.kind is Kind.TRAIN} == {Status.FINISHED}


async def test_a_replica_that_is_full_of_a_version_leaves_the_rest_of_it_to_those_that_start():
    fleet = await resumed(per_version=REPLICAS * BATCH // VERSIONS // 2)
    start(fleet, 3)
    await fleet.report(3, admissible=0)
    assert len(fleet.running[3]) == BATCH // 2
    start(fleet, 9)
    assert len(fleet.running[9]) == BATCH // 2


@pytest.mark.parametrize("rounds", [1, 3])
async def test_evaluations_of_a_version_are_divided_among_the_replicas_that_start(rounds):
    fleet = Fleet(replicas=REPLICAS, batch_per_replica=BATCH, group_size=8)
    fleet.scheduler.pause()
    for _ in range(2):
        fleet.scheduler.evaluations.request([make_prompt(place) for place in range(30)], 0, samples=16)
    for _ in range(rounds):
        given = [len(fleet.scheduler.dispatcher.for_starting(replica)) for replica in range(REPLICAS)]
        assert max(given) <= BATCH
        assert sum(given) == 960
        assert min(given) > 0, "nobody starts idle"
        for replica in range(REPLICAS):
            await fleet.lose_replica(replica)


async def test_replicas_that_start_are_given_every_version_whose_evaluation_was_deferred():
    fleet = Fleet(replicas=2, batch_per_replica=4, group_size=8)
    fleet.scheduler.pause()
    fleet.scheduler.state.newest_version = 50
    for version in (10, 20, 30, 40, 50):
        for _ in range(2):
            fleet.scheduler.evaluations.request([make_prompt(place) for place in range(30)], version)
    given = [fleet.scheduler.dispatcher.for_starting(replica) for replica in range(2)]
    counts = Counter(item.version for items in given for item in items)
    assert {version: counts[version] for version in (10, 20, 30, 40)} == dict.fromkeys((10, 20, 30, 40), 60)
    assert counts[50] <= 2 * 4, "the newest comes again, so it waits for room"
