"""Alarms on data: copies in groups, rewards without information, uneven drops, part groups, evaluations."""

import msgspec
import numpy as np
import pytest

from laminar_py.config.algorithm import Advantage, AlgorithmConfig
from laminar_py.config.rollout import StalenessConfig, StalePolicy
from laminar_py.control.alarms.data import (
    AdvantageCheck,
    BatchCheck,
    CoverageCheck,
    EvaluationCheck,
    GroupCheck,
    LengthCheck,
    RewardsCheck,
    StalenessCheck,
    score_alarms,
)
from laminar_py.learner.losses.advantages import group_advantages, overlong_cost
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.credit import returns_of
from laminar_py.records.events import (
    Assigned,
    Consumed,
    Cut,
    Dropped,
    Evaluated,
    Ready,
    Scored,
    Stepped,
    Undone,
)
from laminar_py.records.scoring import Score, TermValue
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, Kind, Prompt, Status
from tests.builders import make_evaluated
from tests.events import finished, issued

SIZE = 8


def row(group: int, sample: int = 0, *, length: int = 10, task: str = "", kind: Kind = Kind.TRAIN, ids=(1, 2)):
    prompt = Prompt(id=f"p{group}", index=group, text="", ids=np.array(ids, np.int32), task=task)
    return LiveTrajectory(
        id=f"g{group}.{sample}",
        number=1,
        status=Status.QUEUED,
        first_seq=1,
        last_seq=1,
        group_id=f"g{group}",
        prompt_id=prompt.id,
        prompt_index=group,
        sample_index=sample,
        kind=kind,
        prompt=prompt,
        length=length,
        replica=0,
    )


def consumed(live: LiveTrajectory, *, staleness: int = 0) -> Consumed:
    return Consumed(trajectory_id=live.id, step=1, version=1, staleness=staleness, weight=1.0)


def task_of(live: LiveTrajectory) -> str:
    return live.prompt.task


def groups(check: GroupCheck, draw, num_groups: int) -> list:
    """Alarms on groups whose responses `draw(rng)` gives as (digest, log-probability)."""
    rng, alarms = np.random.default_rng(0), []
    for group in range(num_groups):
        for sample in range(SIZE):
            digest, logprob = draw(rng, group, sample)
            score = Score(
                trajectory_id=f"g{group}.{sample}", value=0.0, response_digest=digest, response_logprob=logprob
            )
            alarms += check.observe(score, row(group, sample))
    return alarms


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
def test_samples_of_their_own_are_no_copies_however_sure_the_policy_is(sharpness: float) -> None:
    p = np.exp(-sharpness * np.arange(50.0))
    p /= p.sum()

    def draw(rng, group, sample):
        place = int(rng.choice(50, p=p))
        return place + 1, float(np.log(p[place]))

    assert not groups(GroupCheck(SIZE), draw, 3000)


def test_copies_are_named_within_a_step() -> None:
    def draw(rng, group, sample):
        return group + 1, -3.0

    (alarm, *_) = groups(GroupCheck(SIZE), draw, 32)
    assert alarm.check == "groups"


def scored(check: RewardsCheck, reward_of, *, count: int, task: str = "") -> list:
    rng, alarms = np.random.default_rng(0), []
    for number in range(count):
        live = row(number // SIZE, number % SIZE, length=int(rng.integers(5, 300)), task=task)
        event = Scored(trajectory_id=live.id, reward=reward_of(rng, live), elapsed_s=0.1)
        alarms += check.scored(event, live)
    return alarms


def test_a_reward_that_never_varies_or_follows_length_is_named() -> None:
    first = scored(RewardsCheck(task_of), lambda rng, live: 1.0, count=1000, task="proofs")[0]
    assert first.part == "task 'proofs'"
    assert first.message.startswith("the reward is 1 for each of 256 responses;")
    first = scored(RewardsCheck(task_of), lambda rng, live: live.length / 300, count=1000)[0]
    assert "rises with the length of responses alone (correlation 1.000 within 32 groups)" in first.message
    first = scored(RewardsCheck(task_of), lambda rng, live: -(live.length**1.1), count=1000)[0]
    assert "falls with the length" in first.message


def test_rewards_that_vary_or_only_lean_to_length_are_not_named() -> None:
    assert not scored(RewardsCheck(task_of), lambda rng, live: float(rng.random() < 0.01), count=5000)
    lean = lambda rng, live: live.length / 300 + rng.normal(0, 0.2)  # noqa: E731
    assert not scored(RewardsCheck(task_of), lean, count=5000)


def test_a_resumed_run_that_has_learned_its_task_is_quiet() -> None:
    check = RewardsCheck(task_of)
    check.restore((0.0, 1.0))
    assert not scored(check, lambda rng, live: 1.0, count=1000)


def ended(check: CoverageCheck, dropped, *, count: int = 5000, reason: DropReason = DropReason.STALE) -> list:
    rng, alarms = np.random.default_rng(0), []
    for number in range(count):
        live = row(number, length=int(rng.integers(5, 300)), task="ab"[number % 2])
        if rng.random() < dropped(live):
            alarms += check.dropped(Dropped(live.id, reason), live)
        else:
            alarms += check.consumed(consumed(live), live)
    return alarms


def test_drops_that_prefer_a_task_or_long_responses_are_named_and_even_drops_are_not() -> None:
    found = ended(CoverageCheck(task_of), lambda live: 0.3 if live.prompt.task == "b" else 0.02)
    assert {alarm.part for alarm in found} == {"task 'b'"}
    found = ended(CoverageCheck(task_of), lambda live: 0.5 if live.length > 200 else 0.02)
    assert {alarm.part for alarm in found} == {"long responses"}
    assert not ended(CoverageCheck(task_of), lambda live: 0.3)
    assert not ended(CoverageCheck(task_of), lambda live: 0.02 if live.length > 200 else 0.0)
    lost = ended(
        CoverageCheck(task_of), lambda live: 0.5 if live.length > 200 else 0.02, reason=DropReason.VERSION_LOST
    )
    assert not lost, "their prompts are issued again"


def issue(check: BatchCheck, group: int, members: int) -> list[LiveTrajectory]:
    rows = [row(group, sample) for sample in range(members)]
    for live in rows:
        event = issued(live.id, prompt_id="p")
        assert not list(check.opened(event, live))
    return rows


def consume(check: BatchCheck, live: LiveTrajectory) -> list:
    return list(check.consumed(consumed(live), live))


def stepped() -> Stepped:
    return Stepped(
        step=1, incarnation=1, num_trajectories=2, num_tokens=9, loss=0.1, grad_norm=1.0, reward=0.0, elapsed_s=1.0
    )


def test_a_step_on_part_of_a_group_is_named_and_drops_and_rollbacks_are_not() -> None:
    check = BatchCheck()
    first, second, third = issue(check, 1, 3)
    assert not consume(check, first) + consume(check, second)
    assert not list(check.dropped(Dropped(third.id, DropReason.REWARD_FAILED), third))
    assert not list(check.stepped(stepped(), None))
    for live in (first, second):  # a rollback, and the step again
        assert not list(check.opened(Undone(live.id, 1), live))
    assert not consume(check, first) + consume(check, second)
    assert not list(check.stepped(stepped(), None))
    first, *_ = issue(check, 2, 2)
    assert not consume(check, first)
    (alarm,) = check.stepped(stepped(), None)
    assert "trained on a part of group g2" in alarm.message


def test_a_resumed_run_knows_the_members_that_are_under_way() -> None:
    check, rows = BatchCheck(), [row(1, sample) for sample in range(2)]
    check.restore(rows)
    assert not consume(check, rows[0]) + consume(check, rows[1]) + list(check.stepped(stepped(), None))
    check.restore(rows)
    assert not consume(check, rows[0])
    assert list(check.stepped(stepped(), None))


def test_a_failed_reward_with_a_value_is_named() -> None:
    failed = Score(trajectory_id="g1.0", value=None, failure=DropReason.REWARD_FAILED, raised=True)
    assert not list(score_alarms(failed, row(1)))
    (alarm,) = score_alarms(Score(trajectory_id="g1.0", value=0.0, raised=True), row(1))
    assert alarm.check == "scores"


def test_a_score_of_another_response_is_named() -> None:
    score = Score(trajectory_id="g1.0", value=0.0, length=10)
    assert not list(score_alarms(score, row(1, length=10)))
    (alarm,) = score_alarms(score, row(1, length=11))
    assert "10" in alarm.message


@pytest.mark.parametrize("kind", [Advantage.GROUP_STD, Advantage.GROUP_MEAN, Advantage.LEAVE_ONE_OUT])
@pytest.mark.parametrize("overlong", [None, 4])
def test_advantages_that_do_not_follow_from_rewards_are_named(kind: Advantage, overlong: int | None) -> None:
    """Of one group; a flipped sign, another member's reward and a foreign baseline, but never the group's own."""

    def alarms(change=lambda advantages: advantages, *, scale: float = 1.0) -> list:
        check = AdvantageCheck(AlgorithmConfig(advantage=kind, overlong_tokens=overlong))
        members = [row(1, sample, length=8 + sample) for sample in range(SIZE)]
        cost = overlong_cost(16, overlong)
        for sample, member in enumerate(members):
            member.reward = float(sample % 3 == 0)
        net = [returns_of(member.reward).minus(cost(member.length)) for member in members]
        advantages, unit = group_advantages(kind)(net)
        found = []
        for member, advantage in zip(members, change(advantages).tolist(), strict=True):
            found += check.ready(Ready(member.id, advantage, scale * unit), member)
        (first, *_) = members
        return found + list(check.ended(consumed(first), first))

    assert not alarms()
    assert alarms(lambda advantages: -3 * advantages)
    assert alarms(lambda advantages: advantages + 0.1)
    assert not alarms(scale=1.0)
    if overlong is None:
        assert alarms(lambda advantages: 0.5 * advantages, scale=0.5)
        assert alarms(lambda advantages: np.roll(advantages, 1))


def test_a_trajectory_beyond_the_bound_is_named() -> None:
    member = row(1)
    for policy, named in ((StalePolicy.DROP, 1), (StalePolicy.REWEIGHT, 0)):
        check = StalenessCheck(StalenessConfig(max_staleness=2, policies=(policy,)))
        assert not list(check.consumed(consumed(member, staleness=2), member))
        assert len(list(check.consumed(consumed(member, staleness=3), member))) == named


def test_a_reward_that_is_not_the_sum_of_its_terms_is_named() -> None:
    terms = [TermValue(name="right", value=1.0), TermValue(name="long", value=0.5)]
    score, weights = Score(trajectory_id="g1.0", value=0.75, terms=terms), {"right": 1.0, "long": -0.5}
    assert not score_alarms(score, row(1), weights=weights)
    assert not score_alarms(score, row(1), weights={"right": 1.0})  # a function named its own numbers
    assert not score_alarms(msgspec.structs.replace(score, terms=()), row(1), weights=weights)
    (alarm,) = score_alarms(msgspec.structs.replace(score, value=1.25), row(1), weights=weights)
    assert "has the reward 1.25, and its terms add up to 0.75" in alarm.message


@pytest.mark.parametrize(("length", "has_environment", "named"), [(64, False, 1), (100, False, 0), (64, True, 0)])
def test_a_response_that_is_full_below_the_runs_limit_is_named(
    length: int, has_environment: bool, named: int
) -> None:
    check, live = LengthCheck(has_environment=has_environment), row(1)
    end = finished(
        live.id, (), finish_reason=FinishReason.LENGTH, length=length, digest="", queue_s=0.0, generate_s=0.0
    )
    assert not list(check.was_cut(Cut(live.id, Cap.TOKENS, 100.0), live))
    assert len(list(check.finished(end, live))) == named
    assert not list(check.finished(end, live))  # a response that its policy ended has no cut
    assert not list(check.was_cut(Cut(live.id, Cap.SECONDS, 60.0), live))
    assert not list(check.finished(end, live))


def test_an_evaluation_that_leaves_out_problems_or_answers_is_named() -> None:
    def alarms(event: Evaluated, *, in_set: int) -> list[str]:
        check = EvaluationCheck(lambda live: live.prompt, {event.set_name: in_set})
        for place in range(4):
            live = row(1, place, kind=Kind.EVAL)
            if place:
                assert not list(check.consumed(consumed(live), live))
            else:
                assert not list(check.dropped(Dropped(live.id, DropReason.REWARD_FAILED, ""), live))
        return [alarm.message for alarm in check.evaluated(event, None)]

    def ended(problems: int, *, unscored: int = 0) -> Evaluated:
        return msgspec.structs.replace(
            make_evaluated(version=1, problems=problems, unscored=unscored), pass_id="g1"
        )

    assert not alarms(ended(4, unscored=1), in_set=4)
    (message,) = alarms(ended(4, unscored=1), in_set=8)
    assert "has 4 problems, and its set has 8" in message
    (message,) = alarms(ended(2), in_set=2)
    assert "counts 2 scored answers and 0 others of 3 and 1" in message


def test_a_problem_of_an_evaluation_that_is_trained_on_is_named_once() -> None:
    check = EvaluationCheck(lambda live: live.prompt)
    held_out, other = row(1, kind=Kind.EVAL, ids=(7, 8)), row(2, ids=(7, 9))
    assert not list(check.assigned(Assigned(held_out.id, 0, 1, 0), held_out))
    assert not list(check.trained(Assigned(other.id, 0, 1, 0), other))
    leaked = row(3, ids=(7, 8))
    (alarm,) = check.trained(Assigned(leaked.id, 0, 1, 0), leaked)
    assert alarm.part == "pass g1"
    assert not list(check.trained(Assigned(leaked.id, 0, 2, 0), leaked))
