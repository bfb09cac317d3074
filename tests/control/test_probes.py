"""Probes: dropped trajectories that go on, and hold up nothing."""

import pytest

from laminar_py.control.probes import is_chosen
from laminar_py.records.events import Dropped, Finished, Probed
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import DropReason, FinishReason
from tests.control.fleet import Fleet


def of(fleet, kind):
    return [event for event in fleet.log.events if isinstance(event, kind)]


async def overdue(*, tokens=2, **settings):
    """A group of four of which one, with `tokens` so far, is past the deadline; the name of that one."""
    options = {"probe_share": 1.0, "max_probes": 8, "group_deadline_s": 10.0, "capacity": 1, **settings}
    fleet = Fleet(replicas=1, **options)
    await fleet.report(0)
    straggler, *others = list(fleet.running[0])
    for name in others:
        await fleet.finish(0, name, admissible=0)
    await fleet.score_all()
    if tokens:
        await fleet.grow(0, straggler, tokens=tokens)
    fleet.clock.time = 11.0
    await fleet.flow.enforce_deadlines()
    assert [event.reason for event in of(fleet, Dropped)] == [DropReason.GROUP_DEADLINE]
    assert len(fleet.flow.consumption.buffer) == 1, "its group is ready without it"
    return fleet, straggler


async def test_a_probe_is_generated_to_its_end_and_scored_and_stays_dropped():
    fleet, name = await overdue()
    assert fleet.flow.take_aborts() == {}, "it goes on"
    assert not fleet.flow.is_live(name)
    await fleet.finish(0, name, tokens=5)
    assert not fleet.flow.dispatcher.views[0].in_flight
    await fleet.score_all(lambda index: 0.25)
    assert of(fleet, Probed) == [
        Probed(trajectory_id=name, length=7, finish_reason=FinishReason.STOP, reward=0.25, generate_s=0.0)
    ]
    assert name not in [event.trajectory_id for event in of(fleet, Finished)]


@pytest.mark.parametrize("settings", [{"probe_share": 0.0}, {"max_probes": 0}])
async def test_without_a_share_or_a_place_a_straggler_is_aborted(settings):
    fleet, name = await overdue(**settings)
    assert fleet.flow.take_aborts() == {0: [name]}
    assert not fleet.flow.dispatcher.views[0].in_flight


async def test_one_that_only_waits_for_its_score_is_a_probe_too():
    fleet = Fleet(replicas=1, capacity=1, group_deadline_s=10.0, probe_share=1.0, max_probes=8)
    await fleet.report(0)
    await fleet.finish_all(0, admissible=0)
    slow = fleet.unscored.pop()
    await fleet.score_all()
    fleet.clock.time = 11.0
    await fleet.flow.enforce_deadlines()
    await fleet.flow.on_score(Score(trajectory_id=slow.id, value=None, failure=DropReason.REWARD_TIMEOUT))
    assert of(fleet, Probed) == [
        Probed(trajectory_id=slow.id, length=3, finish_reason=FinishReason.STOP, reward=None, generate_s=0.0)
    ]


async def test_a_score_is_awaited_of_what_is_live_and_of_probes_alone():
    fleet, name = await overdue()
    assert fleet.flow.awaits_score(name)
    await fleet.finish(0, name)
    await fleet.score_all()
    assert not fleet.flow.awaits_score(name)
    fleet, name = await overdue(probe_share=0.0)
    assert not fleet.flow.awaits_score(name)


async def lose_replica(fleet, name):
    await fleet.flow.on_replica_lost(0)


async def hand_back(fleet, name):
    await fleet.finish(0, name, tokens=0, reason=FinishReason.ABORT)


async def lose_version(fleet, name):
    await fleet.report(0, lost=[name])


async def refuse(fleet, name):
    await fleet.refuse(0, name)


@pytest.mark.parametrize("break_off", [lose_replica, hand_back, lose_version, refuse])
async def test_a_probe_that_is_broken_off_leaves_nothing_behind(break_off):
    fleet, name = await overdue(tokens=0 if break_off in (lose_version, refuse) else 2)
    await break_off(fleet, name)
    await fleet.flow.on_score(Score(trajectory_id=name, value=1.0))
    assert of(fleet, Probed) == []
    assert name not in fleet.flow.dispatcher.views[0].in_flight


def test_the_hash_chooses_about_the_share_and_always_the_same():
    names = [f"g{number}.0" for number in range(4000)]
    chosen = {name for name in names if is_chosen(name, 0.25)}
    assert 850 < len(chosen) < 1150
    assert chosen <= {name for name in names if is_chosen(name, 0.5)}
    assert not any(is_chosen(name, 0.0) for name in names)
    assert all(is_chosen(name, 1.0) for name in names)
