"""Trajectories on their way: groups, staleness, interruptions, and the accounting law."""

import asyncio
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.config.rollout import Schedule, StalePolicy, WithoutSignal
from laminar_py.control.evaluation import EvaluationLostError
from laminar_py.ledger.machine import IllegalEventError
from laminar_py.records.columns import TOKEN_REWARDS, Dtype, token_values
from laminar_py.records.credit import earned_by
from laminar_py.records.evaluations import set_figures
from laminar_py.records.events import Consumed, Cut, Dropped, Issued, Ready
from laminar_py.records.pieces import ColumnRef
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import DropReason, FinishReason, Kind, Status
from tests.builders import make_prompt, make_ref
from tests.control.fleet import Fleet, broken_off, settle
from tests.depth import examples


def names(fleet, kind):
    return [event.trajectory_id for event in fleet.log.events if isinstance(event, kind)]


async def test_a_group_is_ready_when_its_last_member_is_scored():
    fleet = Fleet(replicas=1, capacity=1)
    await fleet.report(0)
    await fleet.finish_all(0)
    for trajectory in fleet.unscored[:3]:
        await fleet.scheduler.incoming.on_score(Score(trajectory_id=trajectory.id, value=1.0))
    assert not names(fleet, Ready)
    await fleet.scheduler.incoming.on_score(Score(trajectory_id=fleet.unscored[3].id, value=0.0))
    assert len(names(fleet, Ready)) == 4
    assert len(fleet.scheduler.consumption.buffer) == 1


async def test_no_group_waits_for_another():
    fleet = Fleet(replicas=1, capacity=2)
    await fleet.report(0)
    for trajectory_id in [name for name in fleet.running[0] if name.startswith("g1.")]:
        await fleet.finish(0, trajectory_id)
    await fleet.score_all()
    batch = await asyncio.wait_for(fleet.scheduler.consumption.next_batch(groups=1, version=0), 1)
    assert {trajectory.group_id for trajectory in batch.trajectories} == {"g1"}


async def test_a_report_of_an_older_epoch_counts_for_nothing():
    fleet = Fleet(replicas=2, capacity=1)
    await fleet.report(0)
    [owner] = [index for index in fleet.running if fleet.running[index]]
    name = next(iter(fleet.running[owner]))
    await fleet.lose_replica(owner)
    late = fleet.running[owner][name]
    await fleet.report(1 - owner)
    assert fleet.running[1 - owner][name].epoch == late.epoch + 1
    await fleet.finish(owner, name, epoch=late.epoch)
    assert not fleet.unscored


async def test_what_a_dead_replica_had_goes_at_once_to_one_that_admits_nothing_more():
    fleet = Fleet(replicas=2, capacity=2, one_version=False)
    await fleet.report(0, admissible=4)
    await fleet.report(1, admissible=4)
    displaced, before = set(fleet.running[0]), set(fleet.running[1])
    assert len(displaced) == len(before) == 4
    await fleet.lose_replica(0)
    fleet.hand_out()
    assert set(fleet.running[1]) == displaced | before


async def test_an_interrupted_trajectory_goes_on_from_its_prefix_under_its_version():
    fleet = Fleet(replicas=2, capacity=1)
    await fleet.report(0)
    [owner] = [index for index in fleet.running if fleet.running[index]]
    name = next(iter(fleet.running[owner]))
    fleet.scheduler.pause()
    await fleet.finish(owner, name, tokens=5, reason=FinishReason.ABORT)
    fleet.versions[1 - owner] = 3
    fleet.scheduler.admit()
    await fleet.report(1 - owner)  # idle, and so may load version 0 for it
    place = next(index for index in fleet.running if name in fleet.running[index])
    assert fleet.running[place][name].version == 0
    assert fleet.running[place][name].length == 5


async def test_a_lost_version_drops_the_trajectory_and_issues_its_prompt_anew():
    fleet = Fleet(replicas=1, capacity=1)
    await fleet.report(0)
    name = next(iter(fleet.running[0]))
    await fleet.report(0, lost=(name,))
    dropped = [event for event in fleet.log.events if isinstance(event, Dropped)]
    assert [(event.trajectory_id, event.reason) for event in dropped] == [(name, DropReason.VERSION_LOST)]
    assert names(fleet, Issued)[-1] == "g0.4"
    assert "g0.4" in fleet.running[0]
    assert fleet.scheduler.state.num_version_lost == 1


@pytest.mark.parametrize(
    ("policy", "dropped", "places"),
    [(WithoutSignal.TRAIN, 0, 1), (WithoutSignal.SKIP, 4, 1), (WithoutSignal.REFILL, 4, 0)],
)
async def test_a_group_without_signal_trains_is_skipped_or_refilled(policy, dropped, places):
    fleet = Fleet(replicas=1, capacity=1, without_signal=policy)
    await fleet.report(0)
    await fleet.finish_all(0, admissible=0)
    await fleet.score_all(lambda index: 1.0)
    assert Counter(event.reason for event in fleet.log.events if isinstance(event, Dropped)) == Counter(
        {DropReason.NO_SIGNAL: dropped} if dropped else {}
    )
    assert len(fleet.scheduler.consumption.buffer) == places
    await fleet.report(0)
    assert bool(fleet.running[0]) == (policy is WithoutSignal.REFILL)


@pytest.mark.parametrize(("masks", "counted"), [(False, [3, 7]), (True, [3, 0])])
async def test_a_skipped_group_counts_in_its_step_with_the_tokens_it_would_have_trained(masks, counted):
    settings = {"without_signal": WithoutSignal.SKIP, "masks_truncated": masks}
    fleet = Fleet(replicas=1, capacity=1, group_size=2, batch=1, **settings)
    await fleet.report(0)
    await fleet.finish(0, "g0.0", tokens=3)
    await fleet.finish(0, "g0.1", tokens=7, reason=FinishReason.LENGTH)
    await fleet.score_all(lambda index: 1.0)
    batch = await fleet.scheduler.next_batch(groups=1, version=0)
    assert (batch.trajectories, batch.tokens_without_signal) == ([], counted)


@pytest.mark.parametrize(("rewards", "ready"), [([1.0, 1.0], 0), ([1.0, 0.0], 2)])
async def test_length_changes_advantages_and_not_whether_a_group_has_signal(rewards, ready):
    fleet = Fleet(
        replicas=1, capacity=1, group_size=2, without_signal=WithoutSignal.REFILL, length_cost=lambda n: n / 10
    )
    await fleet.report(0)
    for index, tokens in enumerate((1, 9)):
        await fleet.finish(0, f"g0.{index}", tokens=tokens)
    await fleet.score_all(lambda index: rewards[index])
    events = [event for event in fleet.log.events if isinstance(event, Ready)]
    assert len(events) == ready
    assert [event.advantage for event in events] == pytest.approx([0.707, -0.707][:ready], abs=1e-3)


@pytest.mark.parametrize(
    ("rewards", "ready"),
    [([[1, 0, 0], [0, 0, 1]], 2), ([[0, 0, 1], [0, 0, 1]], 0), ([[0, 0, 0], [0, 0, 0]], 0)],
)
async def test_signal_is_a_matter_of_token_rewards_where_there_are_any(rewards, ready):
    """Of their returns: equal totals teach something where the tokens that earned them differ."""
    fleet = Fleet(replicas=1, capacity=1, group_size=2, without_signal=WithoutSignal.REFILL)
    await fleet.report(0)
    await fleet.finish_all(0, tokens=3)
    for trajectory in fleet.unscored:
        values = np.array(rewards[trajectory.sample_index], np.float32)
        await fleet.scheduler.incoming.on_score(
            Score(
                trajectory_id=trajectory.id,
                value=float(values.sum()),
                columns={TOKEN_REWARDS: ColumnRef(Dtype.FLOAT32, make_ref())},
                earned=earned_by({TOKEN_REWARDS: token_values(values)}),
            )
        )
    assert sum(isinstance(event, Ready) for event in fleet.log.events) == ready


async def test_a_straggler_past_the_deadline_is_dropped_with_an_event_and_its_replica_told():
    fleet = Fleet(replicas=1, capacity=1, group_deadline_s=10.0)
    await fleet.report(0)
    straggler, *others = list(fleet.running[0])
    for name in others:
        await fleet.finish(0, name, admissible=0)
    await fleet.score_all()
    fleet.clock.time = 11.0
    await fleet.scheduler.incoming.enforce_deadlines()
    assert names(fleet, Dropped) == [straggler]
    assert fleet.scheduler.state.take_aborts() == {0: [straggler]}
    assert len(fleet.scheduler.consumption.buffer) == 1


async def test_a_group_with_too_few_survivors_is_dropped():
    fleet = Fleet(replicas=1, capacity=1, min_group_survivors=4)
    await fleet.report(0)
    await fleet.finish_all(0, admissible=0)
    failed = fleet.unscored.pop(0)
    await fleet.scheduler.incoming.on_score(
        Score(trajectory_id=failed.id, value=None, failure=DropReason.REWARD_TIMEOUT)
    )
    await fleet.score_all()
    reasons = Counter(event.reason for event in fleet.log.events if isinstance(event, Dropped))
    assert reasons == {DropReason.REWARD_TIMEOUT: 1, DropReason.GROUP_LOST: 3}
    assert not fleet.scheduler.state.groups


async def test_a_group_that_was_dropped_does_not_hold_up_the_next_batch():
    fleet = Fleet(replicas=1, batch=1, schedule=Schedule.ONE_STEP, min_group_survivors=4)
    await fleet.report(0)
    await fleet.finish_all(0)
    failed = fleet.unscored.pop(0)
    await fleet.scheduler.incoming.on_score(
        Score(trajectory_id=failed.id, value=None, failure=DropReason.REWARD_FAILED)
    )
    await fleet.score_all()
    await fleet.report(0)
    assert {name.split(".")[0] for name in fleet.running[0]} == {"g1"}


async def test_a_replica_that_starts_is_given_an_evaluation_whose_version_nobody_serves():
    fleet = Fleet(replicas=2)
    fleet.scheduler.pause()
    fleet.scheduler.evaluations.request([make_prompt()], version=3)
    (assignment,) = fleet.scheduler.dispatcher.for_starting(0)
    assert (assignment.trajectory_id, assignment.version) == ("e0.0", 3)


async def test_a_transition_that_is_not_allowed_ends_in_an_error_that_names_the_trajectory():
    fleet = Fleet(replicas=1, capacity=1)
    await fleet.report(0)
    running = fleet.scheduler.state.live["g0.0"]
    with pytest.raises(IllegalEventError, match=r"g0\.0.* cannot happen: it is running"):
        fleet.scheduler.state.record(running.consumed(step=1, version=0, staleness=0, weight=1.0))
    assert running.status is Status.RUNNING


async def test_reaching_the_token_cap_is_an_event():
    fleet = Fleet(replicas=1, capacity=1)
    await fleet.report(0)
    await fleet.finish(0, "g0.0", reason=FinishReason.LENGTH)
    assert names(fleet, Cut) == ["g0.0"]


@pytest.mark.parametrize(
    ("policies", "weights"),
    [((StalePolicy.WAIT,), [1.0] * 4), ((StalePolicy.REWEIGHT,), [0.4] * 4), ((StalePolicy.DROP,), [])],
)
async def test_what_exceeds_the_bound_at_consumption_is_kept_reweighted_or_dropped(policies, weights):
    fleet = Fleet(replicas=1, capacity=1, max_staleness=1, policies=policies)
    await fleet.report(0)
    await fleet.finish_all(0, admissible=0)
    await fleet.score_all()
    fleet.learned(4)
    take = asyncio.create_task(fleet.scheduler.consumption.next_batch(groups=1, version=4))
    await settle()
    if weights:
        assert [trajectory.weight for trajectory in take.result().trajectories] == weights
    else:
        assert {event.reason for event in fleet.log.events if isinstance(event, Dropped)} == {DropReason.STALE}
        assert not fleet.scheduler.state.groups
        take.cancel()


async def test_the_bound_counts_steps_that_the_learner_does_not_publish():
    fleet = Fleet(replicas=1, capacity=1, max_staleness=1, policies=(StalePolicy.REWEIGHT,))
    await fleet.report(0)
    await fleet.finish_all(0, admissible=0)
    await fleet.score_all()
    for _ in range(4):
        fleet.scheduler.state.ages.record_step(learned=True)
    batch = await fleet.scheduler.consumption.next_batch(groups=1, version=0)
    assert [trajectory.weight for trajectory in batch.trajectories] == [0.4] * 4
    await fleet.scheduler.consumption.commit(batch, 5)
    assert [event.staleness for event in fleet.log.events if isinstance(event, Consumed)] == [4] * 4


async def test_sync_admits_a_batch_only_when_the_one_before_is_consumed_and_weights_are_new():
    fleet = Fleet(replicas=1, batch=2, schedule=Schedule.SYNC)
    await fleet.report(0)
    assert len(fleet.running[0]) == 8
    await fleet.finish_all(0)
    await fleet.score_all()
    assert not fleet.running[0]
    await fleet.scheduler.consumption.commit(await fleet.scheduler.consumption.next_batch(groups=2, version=0), 1)
    fleet.scheduler.published(1)
    await fleet.report(0)
    assert not fleet.running[0], "it still serves version 0"
    fleet.versions[0] = 1
    await fleet.report(0)
    assert len(fleet.running[0]) == 8


async def test_rolled_back_trajectories_are_ready_again_and_consumed_once_more():
    fleet = Fleet(replicas=1, capacity=1)
    await fleet.report(0)
    await fleet.finish_all(0, admissible=0)
    await fleet.score_all()
    first = await fleet.scheduler.consumption.next_batch(groups=1, version=0)
    await fleet.scheduler.consumption.commit(first, 1)
    assert await fleet.scheduler.consumption.roll_back(0) == 4
    again = await asyncio.wait_for(fleet.scheduler.consumption.next_batch(groups=1, version=0), 1)
    assert {t.id for t in again.trajectories} == {t.id for t in first.trajectories}
    await fleet.scheduler.consumption.commit(again, 1)
    fleet.scheduler.consumption.checkpointed(1)
    assert await fleet.scheduler.consumption.roll_back(1) == 0


async def test_a_cancelled_wait_for_a_batch_loses_no_group():
    fleet = Fleet(replicas=1, capacity=1)
    await fleet.report(0)
    await fleet.finish_all(0, admissible=0)
    await fleet.score_all()
    take = asyncio.create_task(fleet.scheduler.consumption.next_batch(groups=2, version=0))
    await settle()
    take.cancel()
    await asyncio.wait([take])
    assert len(fleet.scheduler.consumption.buffer) == 1


async def test_what_an_engine_refuses_is_dropped_with_its_words_and_its_group_goes_on():
    fleet = Fleet(replicas=1, capacity=1)
    await fleet.report(0)
    refused, *others = fleet.running[0]
    await fleet.refuse(0, refused)
    for name in others:
        await fleet.finish(0, name)
    await fleet.score_all()
    (dropped,) = [event for event in fleet.log.events if isinstance(event, Dropped)]
    assert dropped == Dropped(refused, DropReason.REFUSED, "too long")
    assert names(fleet, Ready) == others


async def test_seconds_of_generation_count_once_though_new_weights_broke_the_stream():
    fleet = Fleet(replicas=2, capacity=1, one_version=False, max_seconds=9.0)
    await fleet.report(0)
    item = fleet.running[0]["g0.0"]
    await fleet.report(0, progress=[broken_off(item, generate_s=2.0)])
    await fleet.finish(0, "g0.0", tokens=0, reason=FinishReason.ABORT, generate_s=3.0)
    assert fleet.running[0]["g0.0"].used_s == 3.0


async def test_an_evaluation_is_greedy_and_never_trains():
    fleet = Fleet(replicas=2, capacity=1)
    fleet.scheduler.pause()
    done = fleet.scheduler.evaluations.request([make_prompt(index) for index in range(6)], version=0)
    await fleet.report(0)
    await fleet.report(1)
    items = [item for running in fleet.running.values() for item in running.values()]
    assert {(item.kind, item.sampling.temperature, item.version) for item in items} == {(Kind.EVAL, 0.0, 0)}
    for index in fleet.running:
        await fleet.finish_all(index)
    await fleet.score_all(lambda index: 1.0)
    assert [answer.reward for answer in (await done).answers.values()] == [1.0] * 6
    assert not fleet.scheduler.state.live


async def test_answers_that_could_not_be_scored_are_no_zeros_of_an_evaluation():
    fleet = Fleet(replicas=1)
    fleet.scheduler.pause()
    for rewards, mean in (([1.0, None, 0.0], 0.5), ([None, None, None], None)):
        done = fleet.scheduler.evaluations.request([make_prompt(index) for index in range(3)], version=0)
        await fleet.report(0)
        await fleet.finish_all(0)
        for reward in rewards:
            failure = DropReason.REWARD_FAILED if reward is None else None
            id = fleet.unscored.pop().id
            await fleet.scheduler.incoming.on_score(Score(trajectory_id=id, value=reward, failure=failure))
        found = await done
        figures = set_figures(found.answers.values(), samples=1)
        assert (figures and figures.mean.value, found.version) == (mean, 0)
        assert [answer.reward for answer in found.answers.values()].count(None) == rewards.count(None)


async def test_an_evaluation_whose_version_is_lost_fails_loudly():
    fleet = Fleet(replicas=1)
    fleet.scheduler.pause()
    done = fleet.scheduler.evaluations.request([make_prompt()], version=5)
    await fleet.report(0)
    await fleet.report(0, lost=tuple(fleet.running[0]))
    with pytest.raises(EvaluationLostError):
        await done


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["finish", "score", "fail", "kill", "step", "die", "lose", "refuse"]), st.integers(0, 9)
    ),
    max_size=60,
)


@settings(max_examples=examples(60), deadline=None)
@given(ACTIONS, st.sampled_from(list(WithoutSignal)), st.sampled_from(list(Schedule)))
def test_issued_is_consumed_plus_dropped_plus_live_whatever_happens(actions, without_signal, schedule):
    """Law 1, by events alone, under deaths, failures and rollbacks in any order."""
    asyncio.run(play(actions, without_signal, schedule))


async def play(actions, without_signal, schedule):
    fleet = Fleet(batch=2, capacity=8, schedule=schedule, without_signal=without_signal)
    step = 0
    for name, number in actions:
        index = number % 2
        await fleet.report(index)
        running = list(fleet.running[index])
        if name == "finish" and running:
            await fleet.finish(index, running[number % len(running)])
        elif name == "score":
            await fleet.score_all()
        elif name == "fail" and fleet.unscored:
            await fleet.scheduler.incoming.on_score(
                Score(trajectory_id=fleet.unscored.pop().id, value=None, failure=DropReason.REWARD_FAILED)
            )
        elif name == "kill":
            fleet.running[index].clear()
            fleet.received[index] = 0
            await fleet.lose_replica(index)
        elif name == "lose" and running:
            fleet.running[index].pop(running[0])
            await fleet.report(index, lost=(running[0],))
        elif name == "refuse" and running:
            await fleet.refuse(index, running[0])
        elif name == "step" and len(fleet.scheduler.consumption.buffer) >= 2:
            step += 1
            await fleet.scheduler.consumption.commit(
                await fleet.scheduler.consumption.next_batch(groups=2, version=0), step
            )
        elif name == "die":
            await fleet.scheduler.consumption.roll_back(0)
            step = 0
        assert_law_one(fleet)


def assert_law_one(fleet):
    counts = Counter(event.__class__.__name__ for event in fleet.log.events)
    live = sum(trajectory.kind is Kind.TRAIN for trajectory in fleet.scheduler.state.live.values())
    assert counts["Issued"] == counts["Consumed"] - counts["Undone"] + counts["Dropped"] + live
    on_replicas = fleet.scheduler.views.in_flight
    assert on_replicas == sum(trajectory.runs_on is not None for trajectory in fleet.scheduler.state.live.values())
    assert counts["Assigned"] - counts["Interrupted"] >= on_replicas


async def test_a_barrier_schedule_shares_a_batch_though_one_replica_reports_first():
    fleet = Fleet(replicas=2, batch=4, schedule=Schedule.SYNC)
    await fleet.report(0)
    assert len(fleet.running[0]) == 8
    await fleet.report(1)
    assert len(fleet.running[1]) == 8


async def test_waiting_admission_passes_over_a_replica_whose_weights_are_as_old_as_the_bound_forbids():
    fleet = Fleet(replicas=1, max_staleness=1, policies=(StalePolicy.DROP,))
    fleet.learned(2)
    await fleet.report(0)
    assert not fleet.running[0]
    fleet.versions[0] = 1
    await fleet.report(0)
    assert fleet.running[0]


async def test_an_evaluation_left_to_a_replica_goes_on_under_the_version_it_began_with():
    fleet = Fleet(replicas=2)
    fleet.scheduler.pause()
    done = fleet.scheduler.evaluations.request([make_prompt(0), make_prompt(1)])
    await fleet.report(0)
    assert {item.version for item in fleet.running[0].values()} == {None}
    await fleet.finish(0, "e0.0", tokens=2, reason=FinishReason.ABORT)
    assert fleet.running[0]["e0.0"].version == 0
    await fleet.finish_all(0)
    await fleet.score_all()
    assert (await done).version == 0
