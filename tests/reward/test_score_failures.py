"""Failed scores: which are told, how they are counted, and when they end a run. Trials of a reward before RL."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import DropReason, Prompt
from laminar_py.reward.failures import FEWEST, NEARLY_ALL, OUTAGE_S, ScoreFailures, trials
from tests.depth import examples

STEP = 64


def scored(value: float | None, *, reason: DropReason = DropReason.REWARD_FAILED, detail: str = "None") -> Score:
    if value is not None:
        return Score(trajectory_id="g0.0", value=value)
    return Score(trajectory_id="g0.0", value=None, failure=reason, detail=detail)


def judge(
    *values: float | None,
    reason: DropReason = DropReason.REWARD_FAILED,
    step: int = STEP,
    every_s: float = 1.0,
    trained: Callable[[int], bool] = lambda index: True,
    trial: float | None = None,
    run_trains: bool = True,
) -> tuple[str | None, int]:
    """The fault of a run whose rewards these are, one every so many seconds, and how many had come by then."""
    failures = ScoreFailures("mine.py:score", step=step, trains=run_trains)
    failures.add_trial(scored(trial))
    for index, value in enumerate(values):
        score = scored(value, reason=reason)
        failures.add_score(score, task="", trains=trained(index), now_s=index * every_s)
        if failures.fault is not None:
            return failures.fault, index + 1
    return None, len(values)


def test_the_first_failure_of_each_task_and_reason_is_told_with_what_the_worker_says() -> None:
    failures = ScoreFailures("mine.py:score", step=STEP)
    said = [
        failures.add_score(
            scored(value, reason=reason, detail="ValueError: no (at mine.py:3)"), task=task, trains=True, now_s=0.0
        )
        for value, reason, task in (
            (1.0, None, "add"),
            (None, DropReason.REWARD_FAILED, "add"),
            (None, DropReason.REWARD_FAILED, "add"),
            (None, DropReason.REWARD_TIMEOUT, "add"),
            (None, DropReason.REWARD_FAILED, "carry"),
        )
    ]
    assert [line is not None for line in said] == [False, True, False, True, True]
    assert said[1] == (
        "reward.use=mine.py:score: g0.0 of task 'add' could not be scored: ValueError: no (at mine.py:3)"
    )
    assert failures.text == "4 of 5 responses could not be scored (reward_failed 3, reward_timeout 1)"


@pytest.mark.parametrize("reason", [DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT])
@pytest.mark.parametrize("trains", [True, False])
def test_first_responses_of_which_none_is_scored_end_the_run_and_not_one_sooner(reason, trains) -> None:
    fault, count = judge(*[None] * STEP, reason=reason, trained=lambda index: trains, run_trains=trains)
    assert count == FEWEST
    assert fault == (
        f"reward.use=mine.py:score: no response could be scored ({FEWEST} of {FEWEST} failed), the last: None;"
        " mend the reward and continue with --resume"
    )
    assert judge(*[None] * STEP, reason=reason, trial=0.0)[0] is None, "a service that is down is waited for"


def test_evaluations_that_fail_do_not_end_a_run_that_trains() -> None:
    assert judge(*[None] * STEP, trained=lambda index: False)[0] is None
    _, count = judge(*[None] * 2 * STEP, trained=lambda index: index % 2 == 1)
    assert count == 2 * FEWEST, "so many that train, whatever the evaluations between them do"


@pytest.mark.parametrize("value", [1.0, None])
@pytest.mark.parametrize("own_reward", [False, True])
def test_a_value_of_another_reward_in_an_evaluation_is_no_evidence(value, own_reward) -> None:
    failures = ScoreFailures("mine.py:score", step=STEP)
    failures.add_score(scored(value), task="", trains=False, own_reward=own_reward, now_s=0.0)
    for _ in range(FEWEST):
        failures.add_score(scored(None), task="", trains=True, now_s=0.0)
    assert (failures.fault is not None) == (own_reward or value is None)


@settings(deadline=None)
@given(good=st.integers(1, 3 * STEP), seed=st.integers(0, 2**32 - 1))
def test_nearly_all_failing_for_longer_than_an_outage_ends_the_run(good: int, seed: int) -> None:
    draw = random.Random(seed)
    failing = [1.0 * draw.getrandbits(1) if draw.random() < 0.02 else None for _ in range(6 * STEP)]
    fault, count = judge(*[1.0, 0.0] * good, *failing, every_s=OUTAGE_S / STEP, reason=DropReason.REWARD_TIMEOUT)
    if fault is None:  # by chance more was scored
        assert sum(value is not None for value in failing) > (1 - NEARLY_ALL) * STEP
    else:
        assert count > 2 * good + STEP
        assert f"for {OUTAGE_S:g} s nearly no response could be scored" in fault


HEALTHY = {
    "sparse": lambda draw, share: 0.0,
    "sparse, below zero": lambda draw, share: -1.0,
    "solved": lambda draw, share: 1.0,
    "learning": lambda draw, share: float(draw.random() < share),
    "graded": lambda draw, share: draw.random(),
}


@settings(max_examples=examples(60), deadline=None)
@given(
    kind=st.sampled_from(sorted(HEALTHY)),
    flaky=st.floats(0, 0.1),
    share=st.floats(0.1, 0.9),
    outage=st.integers(0, 100 * STEP),
    step=st.sampled_from([2, STEP, 4 * STEP]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_healthy_run_goes_on_whatever_it_learns_and_however_its_verifier_fails(
    kind, flaky, share, outage, step, seed
) -> None:
    """One tenth of the scores fail at random, and all in an outage that is shorter than the limit less a step."""
    draw = random.Random(seed)
    values = [None if draw.random() < flaky else HEALTHY[kind](draw, share) for _ in range(60 * max(step, FEWEST))]
    size = max(step, FEWEST)
    length = 40 * size
    start = size + outage % (19 * size)
    values[0] = HEALTHY[kind](draw, share)
    values[start : start + length] = [None] * length
    assert judge(*values, step=step, every_s=OUTAGE_S / (length + size)) == (None, len(values))


def test_evaluations_are_counted_and_told_and_end_nothing() -> None:
    failures = ScoreFailures("mine.py:score", step=STEP)
    lines = [failures.add_score(scored(None), task="", trains=False, now_s=0.0) for _ in range(4 * STEP)]
    assert failures.fault is None
    assert sum(line is not None for line in lines) == 1
    assert failures.text.startswith(f"{4 * STEP} of {4 * STEP}")


def test_an_outage_is_told_as_it_begins_and_again_each_minute_until_scores_come() -> None:
    failures = ScoreFailures("mine.py:score", step=STEP)

    def step(value: float | None, now_s: float) -> str | None:
        lines = [failures.add_score(scored(value), task="", trains=True, now_s=now_s) for _ in range(STEP)]
        told = [line for line in lines if line is not None and "fail, the last" in line]
        assert len(told) <= 1
        return told[0] if told else None

    assert step(1.0, 0) is None
    assert not failures.is_outage
    assert step(None, 10) == (
        "reward.use=mine.py:score: nearly all responses fail, the last: None; waiting, and the run ends in 600 s"
    )
    assert failures.is_outage
    assert step(None, 30) is None
    assert (step(None, 80) or "").endswith("the run ends in 530 s")
    step(0.0, 90)
    assert not failures.is_outage
    assert (step(None, 605) or "").endswith("the run ends in 600 s"), "another outage"
    assert failures.fault is None


def test_an_outage_ends_with_the_first_value_and_the_run_on_time_however_few_scores_come() -> None:
    failures = ScoreFailures("mine.py:score", step=STEP)

    def add(value: float | None, now_s: float) -> None:
        failures.add_score(scored(value), task="", trains=True, now_s=now_s)

    for value in [1.0, 0.0] * (STEP // 2) + [None] * STEP:
        add(value, 0.0)
    assert failures.is_outage
    add(1.0, 5.0)
    assert not failures.is_outage
    for _ in range(STEP - 1):
        add(None, 10.0)
    assert failures.is_outage
    add(None, OUTAGE_S - 1)
    assert failures.fault is None
    add(None, OUTAGE_S)
    assert failures.fault is not None


def test_a_reward_is_tried_on_the_answer_and_on_nothing_of_each_prompt() -> None:
    ids = np.array([4], np.int32)
    prompts = [
        Prompt(id="p0", index=0, text="2+2=", ids=ids, answer="4", task="add"),
        Prompt(id="p7", index=7, text="free", ids=ids),
    ]
    made = trials(prompts, encode=lambda text: np.array([ord(c) for c in text], np.int32), end=1)
    assert [trial.request.response_ids.tolist() for trial in made] == [[ord("4"), 1], [1], [1]]
    assert len({trial.request.trajectory_id for trial in made}) == 3
    assert made[0].complaint("KeyError: 4 (at mine.py:2)", title="mine.py:score") == (
        "reward.use=mine.py:score: fails on the right answer to prompt 'p0' of task 'add' (a trial, made up):"
        " KeyError: 4 (at mine.py:2)"
    )
    assert "an empty response to prompt 'p7' (" in made[2].complaint("", title="f")
