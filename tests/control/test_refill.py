"""Dynamic sampling: its ceiling; responses that a cap has cut, out of the loss."""

import asyncio

import pytest

from laminar_py.config.algorithm import AlgorithmConfig, Truncated
from laminar_py.config.rollout import Schedule, StalePolicy, WithoutSignal
from laminar_py.learner.packing.buffer import Packing
from laminar_py.records.events import Consumed, Ready
from laminar_py.records.trajectory import FinishReason
from tests.control.fleet import Fleet, settle

PATIENCE_S = 60.0


def refilling(**settings):
    """Steps of two groups of two, for which five are generated at most."""
    return Fleet(
        replicas=1,
        group_size=2,
        batch=2,
        without_signal=WithoutSignal.REFILL,
        max_refill=2.5,
        packing=Packing(max_tokens=128),
        **settings,
    )


async def generate(fleet, *rewards):
    """Groups one after another, the members of each with these rewards."""
    for pair in rewards:
        await fleet.report(0)
        group = min((id.split(".")[0] for id in fleet.running[0]), key=lambda id: int(id[1:]))
        for id in [f"{group}.0", f"{group}.1"]:
            await fleet.finish(0, id)
        await fleet.score_all(lambda index, pair=pair: pair[index])


def asks(fleet):
    return asyncio.create_task(fleet.scheduler.consumption.next_batch(groups=2, version=0))


SOLVED, HOPELESS, SIGNAL = (1.0, 1.0), (0.0, 0.0), (1.0, 0.0)


async def test_a_step_goes_on_with_what_there_is_at_the_ceiling_of_refill_and_says_why():
    fleet = refilling(schedule=Schedule.SYNC)
    task = asks(fleet)
    await generate(fleet, SIGNAL, SOLVED, SOLVED, HOPELESS)
    await settle()
    assert not task.done()
    await generate(fleet, SOLVED)
    assert not fleet.running[0]
    batch = await asyncio.wait_for(task, PATIENCE_S)
    assert [group.group_id for group in batch.groups] == ["g0"]
    event = fleet.scheduler.consumption.refill_stopped(batch, 1)
    assert (event.num_wanted, event.num_taken, event.num_without_signal) == (2, 1, 4)
    assert (event.num_best, event.num_worst) == (3, 1)
    assert "75% are solved" in event.describe()
    await fleet.scheduler.consumption.commit(batch, 1)
    task = asks(fleet)
    await generate(fleet, *[SOLVED] * 4)
    await settle()
    assert not task.done(), "the next step counts anew"
    task.cancel()


async def test_async_waits_for_nobody_at_the_ceiling_and_goes_on_generating():
    fleet = refilling(schedule=Schedule.ASYNC)
    task = asks(fleet)
    await generate(fleet, SIGNAL, SOLVED, SOLVED, HOPELESS, HOPELESS)
    issued = fleet.scheduler.state.next_prompt
    await fleet.report(0)
    batch = await asyncio.wait_for(task, PATIENCE_S)
    assert len(batch.groups) == 1
    assert fleet.running[0], "which are of later steps"
    assert fleet.scheduler.state.next_prompt > issued
    await fleet.scheduler.consumption.commit(batch, 1)
    task = asks(fleet)
    await generate(fleet, SIGNAL, SIGNAL)
    batch = await asyncio.wait_for(task, PATIENCE_S)
    assert len(batch.groups) == 2


async def test_what_is_too_old_at_the_ceiling_does_not_count_towards_it():
    fleet = refilling(schedule=Schedule.ASYNC, max_staleness=1, policies=(StalePolicy.WAIT, StalePolicy.DROP))
    await generate(fleet, SIGNAL, *[HOPELESS] * 4)
    fleet.learned(3)
    task = asks(fleet)
    await settle()
    assert not task.done(), "four groups without signal, and none that is ready, are no ceiling"
    fleet.versions[0] = 3
    await fleet.finish_all(0)
    await fleet.score_all(lambda index: None)
    await generate(fleet, SIGNAL, SIGNAL)
    batch = await asyncio.wait_for(task, PATIENCE_S)
    assert len(batch.groups) == 2


async def test_what_is_ready_ahead_of_the_next_step_is_not_held_against_it():
    fleet = refilling(schedule=Schedule.ASYNC)
    await generate(fleet, SIGNAL, SIGNAL, *[SOLVED] * 6)
    await fleet.report(0)
    state = fleet.scheduler.state
    assert (len(state.groups), state.num_generating) == (16, 14), "a full step has no ceiling"


@pytest.mark.parametrize(("schedule", "num_without_signal", "num_running"), [("sync", 4, 0), ("one_step", 5, 4)])
async def test_a_short_step_opens_no_batch_before_its_time(schedule, num_without_signal, num_running):
    """A short step takes the room of a full one: what follows would else begin too early, and be too old."""
    fleet = refilling(schedule=Schedule(schedule))
    task = asks(fleet)
    await generate(fleet, SIGNAL, *[HOPELESS] * num_without_signal)
    batch = await asyncio.wait_for(task, PATIENCE_S)
    assert len(batch.groups) == 1
    await fleet.report(0)
    assert len(fleet.running[0]) == num_running
    await generate(fleet, *[SIGNAL] * (len(fleet.running[0]) // 2))
    await fleet.report(0)
    assert not fleet.running[0], "the batch after next waits for the step in hand"
    await fleet.scheduler.consumption.commit(batch, 1)
    await fleet.report(0)
    assert fleet.running[0]


async def test_a_step_does_not_wait_for_a_group_that_fits_no_microbatch():
    fleet = refilling(schedule=Schedule.SYNC)
    task = asks(fleet)
    await generate(fleet, *[HOPELESS] * 5)
    await settle()
    assert not task.done()
    assert len(fleet.running[0]) == 2, "one group is still generating"
    await fleet.finish_all(0, tokens=200)
    await fleet.score_all()
    batch = await asyncio.wait_for(task, PATIENCE_S)
    assert (batch.groups, len(batch.refilled)) == ([], 5)


@pytest.mark.parametrize("pair", [SOLVED, HOPELESS])
async def test_a_run_that_has_seen_one_reward_alone_tells_neither_solved_nor_hopeless(pair):
    fleet = refilling(schedule=Schedule.SYNC)
    task = asks(fleet)
    await generate(fleet, *[pair] * 6)
    batch = await asyncio.wait_for(task, PATIENCE_S)
    event = fleet.scheduler.consumption.refill_stopped(batch, 1)
    assert (event.num_without_signal, event.num_best, event.num_worst, event.only_reward) == (6, 0, 0, pair[0])
    assert f"every reward of the run is {pair[0]:g}, so they are all solved or all hopeless" in event.describe()


@pytest.mark.parametrize("schedule", list(Schedule))
async def test_a_step_without_any_group_comes_to_its_end(schedule):
    fleet = refilling(schedule=schedule)
    task = asks(fleet)
    fleet.scheduler.state.rewards = 0.0, 1.0
    async with asyncio.timeout(PATIENCE_S):
        while not task.done():
            await generate(fleet, HOPELESS)
            await settle()
    batch = task.result()
    assert not batch.groups
    assert bool(fleet.running[0]) is (schedule is Schedule.ASYNC), "which has work for later steps"
    event = fleet.scheduler.consumption.refill_stopped(batch, 1)
    assert event.num_worst == event.num_without_signal >= 5
    assert event.num_best == 0
    task = asks(fleet)
    await generate(fleet, SIGNAL, SIGNAL)
    batch = await asyncio.wait_for(task, PATIENCE_S)
    assert len(batch.groups) == 2, "others are generated in their places"


async def test_under_a_barrier_the_ceiling_leaves_nothing_in_flight():
    fleet = refilling(schedule=Schedule.SYNC)
    task = asks(fleet)
    await generate(fleet, SIGNAL, HOPELESS, HOPELESS, HOPELESS)
    await fleet.report(0)
    await generate(fleet, HOPELESS)
    batch = await asyncio.wait_for(task, PATIENCE_S)
    assert len(batch.groups) == 1
    assert not fleet.running[0]


async def test_a_full_step_has_no_event_and_a_batch_that_is_put_back_keeps_its_count():
    fleet = refilling()
    task = asks(fleet)
    await generate(fleet, SOLVED, SOLVED, SIGNAL, SIGNAL)
    batch = await asyncio.wait_for(task, PATIENCE_S)
    assert fleet.scheduler.consumption.refill_stopped(batch, 1) is None
    await fleet.scheduler.consumption.put_back(batch)
    assert fleet.scheduler.state.refilled == [1.0, 1.0]


@pytest.mark.parametrize("masks", [True, False])
async def test_a_response_that_was_cut_counts_for_its_group_and_not_in_the_loss(masks):
    packing = Packing(max_tokens=128)
    fleet = Fleet(replicas=1, capacity=1, group_size=2, batch=1, masks_truncated=masks, packing=packing)
    await fleet.report(0)
    await fleet.finish(0, "g0.0", reason=FinishReason.LENGTH)
    await fleet.finish(0, "g0.1")
    await fleet.score_all()
    ready = [event.advantage for event in fleet.log.events if isinstance(event, Ready)]
    assert ready == pytest.approx([-0.707, 0.707], abs=1e-3)
    batch = await fleet.scheduler.consumption.next_batch(groups=1, version=0)
    await fleet.scheduler.consumption.commit(batch, 1)
    assert sum(trajectory.num_trained for trajectory in batch.trajectories) == (3 if masks else 6)
    weights = {event.trajectory_id: event.weight for event in fleet.log.events if isinstance(event, Consumed)}
    assert weights == {"g0.0": 0.0 if masks else 1.0, "g0.1": 1.0}


def test_dapo_masks_what_was_cut_as_published_and_grpo_trains_on_it():
    assert AlgorithmConfig(name="dapo").truncated is Truncated.MASK
    assert AlgorithmConfig(name="dapo", truncated=Truncated.TRAIN).truncated is Truncated.TRAIN
    assert AlgorithmConfig(name="grpo").truncated is Truncated.TRAIN
