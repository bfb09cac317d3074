"""A scheduler that takes up what a dead controller left, in every state a trajectory can be in."""

import asyncio
import math
from contextlib import nullcontext

import pytest
from msgspec import structs

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.rollout import WithoutSignal
from laminar_py.config.section import ConfigError
from laminar_py.control.scheduler import check_scored
from laminar_py.ledger.recovery import Recovered
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.columns import REFERENCE_LOGPROBS, Column, Dtype
from laminar_py.records.events import Interrupted
from laminar_py.records.pieces import ColumnRef
from laminar_py.records.replica import Progress
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason, Kind, Status
from tests.builders import make_prompt, make_ref
from tests.control.fleet import Fleet, ages_of, make_tokens

HINTS = {"hints": ColumnRef(Dtype.INT32, make_ref("scorer-0-1-0.1"))}


def left(name, status, *, reward=None, kind=Kind.TRAIN, length=3, version=4, routed=0):
    group, _, index = name.partition(".")
    over = status in (Status.FINISHED, Status.SCORED, Status.READY)
    reason = FinishReason.STOP if over else None
    replica = 0 if status is Status.RUNNING else None
    prompt = make_prompt(int(group[1:]))
    return LiveTrajectory(
        number=0,
        first_seq=0,
        last_seq=0,
        prompt_id=prompt.id,
        prompt_index=prompt.index,
        length=length,
        oldest_version=version if length else None,
        newest_version=version if length else None,
        id=name,
        group_id=group,
        sample_index=int(index),
        kind=kind,
        prompt=prompt,
        status=status,
        epoch=2,
        replica=replica,
        tokens=(make_tokens(0, length, routed=routed),) if length else (),
        token_spans=(Span(version, 0, length),) if length else (),
        finish_reason=reason,
        reward=reward,
        advantage=0.5,
        advantage_scale=1.0,
    )


async def restored(*live, refilled=(), rewards=(math.inf, -math.inf), **settings):
    fleet = Fleet(replicas=1, group_size=2, **settings)
    groups = {entry.group_id: 2 for entry in live}
    fleet.scheduler.pause()
    await fleet.scheduler.restore(
        Recovered(
            incarnation=2,
            checkpoint=None,
            events=(),
            live=tuple(live),
            next_prompt=9,
            next_evaluation=1,
            next_sample=groups,
            ages=ages_of(range(10)),
            refilled=refilled,
            rewards=rewards,
        )
    )
    return fleet


async def test_a_running_one_goes_on_from_its_prefix_under_its_version():
    fleet = await restored(left("g1.0", Status.RUNNING), left("g1.1", Status.QUEUED, length=0))
    fleet.scheduler.continue_live()
    (assignment,) = fleet.scheduler.dispatcher.for_starting(0)
    assert (assignment.trajectory_id, assignment.version, assignment.epoch) == ("g1.0", 4, 3)
    assert assignment.tokens == left("g1.0", Status.RUNNING).tokens


async def test_lengths_of_finished_siblings_are_known_again_and_counted_once():
    fleet = await restored(left("g1.0", Status.FINISHED, length=5), left("g1.1", Status.RUNNING))
    assert list(fleet.scheduler.state.finished_beside("g1.1")) == [5]
    fleet.scheduler.continue_live()
    await fleet.report(0)
    await fleet.finish(0, "g1.1", tokens=4)
    assert list(fleet.scheduler.state.groups["g1"].finished_lengths) == [5, 7]


async def test_the_cap_on_seconds_does_not_start_over():
    used = structs.replace(left("g1.0", Status.RUNNING), used_s=7.5)
    fleet = await restored(used, left("g1.1", Status.QUEUED, length=0))
    (interrupted,) = [event for event in fleet.log.events if isinstance(event, Interrupted)]
    assert interrupted.used_s == 7.5
    fleet.scheduler.continue_live()
    (assignment,) = fleet.scheduler.dispatcher.for_starting(0)
    assert assignment.used_s == 7.5


async def test_refill_counts_on_and_judges_by_the_rewards_of_before():
    fleet = await restored(
        without_signal=WithoutSignal.REFILL, max_refill=2, batch=1, refilled=(0.0, 0.0), rewards=(0.0, 1.0)
    )
    batch = await asyncio.wait_for(fleet.scheduler.consumption.next_batch(groups=1, version=4), 60)
    event = fleet.scheduler.consumption.refill_stopped(batch, 5)
    assert (event.num_taken, event.num_without_signal, event.num_worst, event.only_reward) == (0, 2, 2, None)


async def test_a_running_one_goes_on_with_the_experts_it_has():
    fleet = await restored(left("g1.0", Status.RUNNING, routed=5))
    fleet.scheduler.continue_live()
    (assignment,) = fleet.scheduler.dispatcher.for_starting(0)
    assert assignment.routed == 5
    trajectory = fleet.scheduler.state.live["g1.0"]
    last = Progress(
        trajectory_id="g1.0",
        epoch=3,
        start=3,
        tokens=make_tokens(3, 4, routed=6),
        spans=(Span(4, 3, 4),),
    )
    await fleet.report(0, progress=[last])
    assert max(one.routed for one in trajectory.tokens) == 6


async def test_a_finished_one_is_scored_and_closes_its_group():
    fleet = await restored(left("g1.0", Status.FINISHED), left("g1.1", Status.SCORED, reward=1.0))
    await fleet.score_all(lambda index: 0.0)
    assert len(fleet.scheduler.consumption.buffer) == 1


async def test_a_scored_group_is_closed_and_a_ready_one_is_buffered():
    scored = [left("g1.0", Status.SCORED, reward=1.0), left("g1.1", Status.SCORED, reward=0.0)]
    ready = [left("g2.0", Status.READY, reward=1.0), left("g2.1", Status.READY, reward=0.0)]
    fleet = await restored(*scored, *ready)
    assert len(fleet.scheduler.consumption.buffer) == 2


async def test_an_evaluation_is_dropped_and_new_prompts_follow_the_last_one():
    fleet = await restored(left("e0.0", Status.RUNNING, kind=Kind.EVAL))
    assert not fleet.scheduler.state.live
    fleet.scheduler.admit()
    await fleet.report(0)
    assert {name.split(".")[0] for name in fleet.running[0]} >= {"g9"}


async def test_the_reference_is_asked_anew_before_the_learner_gets_what_was_finished():
    scored = [left("g1.0", Status.SCORED, reward=1.0), left("g1.1", Status.SCORED, reward=0.0)]
    ready = [left("g2.0", Status.READY, reward=1.0), left("g2.1", Status.READY, reward=0.0)]
    fleet = await restored(*scored, *ready, left("g3.0", Status.RUNNING), refers=[REFERENCE_LOGPROBS])
    assert {trajectory.id for _, trajectory in fleet.unreferred} == {"g1.0", "g1.1", "g2.0", "g2.1"}
    assert len(fleet.scheduler.consumption.buffer) == 0
    await fleet.refer_all()
    assert len(fleet.scheduler.consumption.buffer) == 2
    assert all(
        REFERENCE_LOGPROBS in m.columns for g in fleet.scheduler.consumption.buffer.first(2) for m in g.members
    )


async def test_what_was_scored_keeps_its_columns():
    ready = [structs.replace(left(f"g1.{index}", Status.READY, reward=index), columns=HINTS) for index in range(2)]
    fleet = await restored(*ready)
    assert all(member.columns == HINTS for member in fleet.scheduler.consumption.buffer[0].members)


class Hinted(AlgorithmConfig):
    @property
    def columns(self):
        return (Column(name="hints", dtype=Dtype.INT32),)


@pytest.mark.parametrize(
    ("entry", "fits"),
    [
        (left("g1.0", Status.READY, reward=1.0), False),
        (
            structs.replace(
                left("g1.0", Status.SCORED, reward=1.0), columns={"hints": ColumnRef(Dtype.FLOAT32, make_ref())}
            ),
            False,
        ),
        (structs.replace(left("g1.0", Status.SCORED, reward=1.0), columns=HINTS), True),
        (left("g1.0", Status.FINISHED), True),
        (left("g1.0", Status.SCORED, reward=1.0, kind=Kind.EVAL), True),
    ],
)
def test_an_algorithm_that_needs_a_column_which_is_not_on_record_is_refused_by_its_name(entry, fits):
    words = r"^algorithm\.name=grpo: needs the column 'hints' in int32, which g1\.0 lacks; resume with"
    with nullcontext() if fits else pytest.raises(ConfigError, match=words):
        check_scored([entry], Hinted())
    check_scored([entry], AlgorithmConfig())
