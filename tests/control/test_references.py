"""Groups that wait for stages of frozen models, which may be slower or faster than scoring."""

from laminar_py.config.rollout import WithoutSignal
from laminar_py.records.columns import REFERENCE_LOGPROBS, TEACHER_LOGPROBS
from laminar_py.records.events import Dropped, Ready
from laminar_py.records.trajectory import DropReason
from tests.control.fleet import Fleet


async def finished(**settings):
    """A group of four that is finished and neither scored nor referred."""
    fleet = Fleet(replicas=1, capacity=1, **{"refers": [REFERENCE_LOGPROBS], **settings})
    await fleet.report(0)
    await fleet.finish_all(0)
    return fleet


def ready(fleet):
    return [event.trajectory_id for event in fleet.log.events if isinstance(event, Ready)]


async def test_a_group_is_ready_when_it_is_scored_and_referred_in_either_order():
    for scored_first in (True, False):
        fleet = await finished()
        steps = [fleet.score_all, fleet.refer_all]
        first, second = steps if scored_first else reversed(steps)
        await first()
        assert not ready(fleet)
        await second()
        assert len(ready(fleet)) == 4
        [group] = fleet.scheduler.consumption.buffer.first(1)
        assert {m.columns[REFERENCE_LOGPROBS].at.digest.decode().strip() for m in group.members} == set(
            ready(fleet)
        )


async def test_a_group_waits_for_the_columns_of_all_models_in_any_order():
    for first, second in ((REFERENCE_LOGPROBS, TEACHER_LOGPROBS), (TEACHER_LOGPROBS, REFERENCE_LOGPROBS)):
        fleet = await finished(refers=[REFERENCE_LOGPROBS, TEACHER_LOGPROBS])
        await fleet.refer_all(first)
        await fleet.score_all()
        assert not ready(fleet)
        await fleet.refer_all(second)
        assert len(ready(fleet)) == 4
        [group] = fleet.scheduler.consumption.buffer.first(1)
        assert all(set(m.columns) == {first, second} for m in group.members)


async def test_a_group_that_teaches_nothing_waits_for_no_reference():
    fleet = await finished(without_signal=WithoutSignal.REFILL)
    await fleet.score_all(lambda index: 1.0)
    dropped = [event.reason for event in fleet.log.events if isinstance(event, Dropped)]
    assert dropped == [DropReason.NO_SIGNAL] * 4
    await fleet.refer_all()
    assert not ready(fleet)
    assert not fleet.scheduler.state.live.keys() & {f"g0.{index}" for index in range(4)}


async def test_no_deadline_counts_while_only_the_reference_is_missing():
    fleet = await finished(group_deadline_s=5.0)
    await fleet.score_all()
    fleet.clock.time = 100.0
    await fleet.scheduler.incoming.enforce_deadlines()
    await fleet.refer_all()
    assert len(ready(fleet)) == 4


async def test_no_deadline_counts_for_a_group_that_is_ready():
    fleet = await finished(batch=1, group_deadline_s=5.0)
    await fleet.score_all()
    await fleet.refer_all()
    fleet.clock.time = 100.0
    await fleet.scheduler.incoming.enforce_deadlines()
    batch = await fleet.scheduler.consumption.next_batch(groups=1, version=0)
    await fleet.scheduler.consumption.commit(batch, 1)
    assert not [event for event in fleet.log.events if isinstance(event, Dropped)]


async def test_what_was_undone_keeps_what_the_reference_found():
    fleet = await finished(batch=1)
    await fleet.score_all()
    await fleet.refer_all()
    batch = await fleet.scheduler.consumption.next_batch(groups=1, version=0)
    await fleet.scheduler.consumption.commit(batch, 1)
    assert await fleet.scheduler.consumption.roll_back(0) == 4
    again = await fleet.scheduler.consumption.next_batch(groups=1, version=0)
    assert all(REFERENCE_LOGPROBS in trajectory.columns for trajectory in again.trajectories)
