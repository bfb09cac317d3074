"""Counterfactual trajectories: dropped by a deadline, they go on to their scores and hold up nothing."""

import pytest

from laminar_py.control.deadlines import is_chosen
from laminar_py.records.events import Assigned, CounterfactualScored, Dropped, Finished
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import DropReason, FinishReason
from tests.control.fleet import Fleet, broken_off


def of(fleet, kind):
    return [event for event in fleet.log.events if isinstance(event, kind)]


async def overdue(*, tokens=2, **settings):
    """A group of four of which one, with `tokens` so far, is past the deadline; the name of that one."""
    options = {
        "counterfactual_share": 1.0,
        "max_counterfactual": 8,
        "group_deadline_s": 10.0,
        "capacity": 1,
        **settings,
    }
    fleet = Fleet(replicas=1, **options)
    await fleet.report(0)
    straggler, *others = list(fleet.running[0])
    for name in others:
        await fleet.finish(0, name, admissible=0)
    await fleet.score_all()
    if tokens:
        await fleet.grow(0, straggler, tokens=tokens)
    fleet.clock.time = 11.0
    await fleet.scheduler.enforce_deadlines()
    assert [event.reason for event in of(fleet, Dropped)] == [DropReason.GROUP_DEADLINE]
    assert len(fleet.scheduler.consumption.buffer) == 1, "its group is ready without it"
    return fleet, straggler


async def test_a_chosen_straggler_is_generated_to_its_end_and_scored_and_stays_dropped():
    fleet, name = await overdue()
    assert fleet.scheduler.book.take_aborts() == {}, "it goes on"
    assert not fleet.scheduler.is_live(name)
    beside = list(fleet.scheduler.book.finished_beside(name))
    assert beside == [3, 3, 3], "a repack round may ask what its siblings had"
    await fleet.finish(0, name, tokens=5)
    assert next(iter(fleet.scheduler.book.groups.values())).finished_lengths == beside, (
        "its group knows nothing of it"
    )
    assert not fleet.scheduler.views.by_index[0].in_flight
    await fleet.score_all(lambda index: 0.25)
    assert of(fleet, CounterfactualScored) == [
        CounterfactualScored(
            trajectory_id=name, length=7, finish_reason=FinishReason.STOP, reward=0.25, generate_s=0.0
        )
    ]
    assert name not in [event.trajectory_id for event in of(fleet, Finished)]


@pytest.mark.parametrize("settings", [{"counterfactual_share": 0.0}, {"max_counterfactual": 0}])
async def test_without_a_share_or_a_place_a_straggler_is_aborted(settings):
    fleet, name = await overdue(**settings)
    assert fleet.scheduler.book.take_aborts() == {0: [name]}
    assert not fleet.scheduler.views.by_index[0].in_flight


async def test_one_that_only_waits_for_its_score_goes_on_too():
    fleet = Fleet(replicas=1, capacity=1, group_deadline_s=10.0, counterfactual_share=1.0, max_counterfactual=8)
    await fleet.report(0)
    await fleet.finish_all(0, admissible=0)
    slow = fleet.unscored.pop()
    await fleet.score_all()
    fleet.clock.time = 11.0
    await fleet.scheduler.enforce_deadlines()
    await fleet.scheduler.closing.on_score(
        Score(trajectory_id=slow.id, value=None, failure=DropReason.REWARD_TIMEOUT)
    )
    assert of(fleet, CounterfactualScored) == [
        CounterfactualScored(
            trajectory_id=slow.id, length=3, finish_reason=FinishReason.STOP, reward=None, generate_s=0.0
        )
    ]


async def test_a_score_is_awaited_of_live_and_counterfactual_trajectories_alone():
    fleet, name = await overdue()
    assert fleet.scheduler.awaits_score(name)
    await fleet.finish(0, name)
    await fleet.score_all()
    assert not fleet.scheduler.awaits_score(name)
    fleet, name = await overdue(counterfactual_share=0.0)
    assert not fleet.scheduler.awaits_score(name)


async def lose_replica(fleet, name):
    await fleet.lose_replica(0)


async def hand_back(fleet, name):
    await fleet.finish(0, name, tokens=0, reason=FinishReason.ABORT)


async def lose_version(fleet, name):
    await fleet.report(0, lost=[name])


async def refuse(fleet, name):
    await fleet.refuse(0, name)


@pytest.mark.parametrize("break_off", [lose_replica, hand_back, lose_version, refuse])
async def test_a_counterfactual_trajectory_that_is_broken_off_leaves_nothing_behind(break_off):
    fleet, name = await overdue(tokens=0 if break_off in (lose_version, refuse) else 2)
    await break_off(fleet, name)
    await fleet.scheduler.closing.on_score(Score(trajectory_id=name, value=1.0))
    assert of(fleet, CounterfactualScored) == []
    assert name not in fleet.scheduler.views.by_index[0].in_flight


async def test_it_goes_on_when_its_stream_is_interrupted_for_new_weights():
    fleet, name = await overdue(one_version=False)
    item = fleet.running[0][name]
    await fleet.report(0, progress=[broken_off(item, generate_s=2.0)])
    recorded = len(of(fleet, Assigned))
    await fleet.finish(0, name, tokens=5, generate_s=3.0)
    await fleet.score_all(lambda index: 0.25)
    [scored] = of(fleet, CounterfactualScored)
    assert (scored.length, scored.generate_s) == (7, 3.0)
    assert len(of(fleet, Assigned)) == recorded


def test_the_hash_chooses_about_the_share_and_always_the_same():
    names = [f"g{number}.0" for number in range(4000)]
    chosen = {name for name in names if is_chosen(name, 0.25)}
    assert 850 < len(chosen) < 1150
    assert chosen <= {name for name in names if is_chosen(name, 0.5)}
    assert not any(is_chosen(name, 0.0) for name in names)
    assert all(is_chosen(name, 1.0) for name in names)
