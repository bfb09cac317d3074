"""Failed scores: which are told, how they are counted, and when they end a run. Trials of a reward before RL."""

import msgspec
import numpy as np
import pytest

from laminar_py.records.columns import Dtype, TokenValues
from laminar_py.records.scoring import Score
from laminar_py.records.trajectory import DropReason, Prompt
from laminar_py.reward.failures import FEWEST, ScoreFailures
from laminar_py.reward.trial import trials

STEP = 64


def scored(value: float | None, *, reason: DropReason = DropReason.REWARD_FAILED, detail: str = "None") -> Score:
    if value is not None:
        return Score(trajectory_id="g0.0", value=value)
    return Score(trajectory_id="g0.0", value=None, failure=reason, detail=detail)


def judge(*values: float | None, reason: DropReason = DropReason.REWARD_FAILED, step: int = STEP) -> str | None:
    failures = ScoreFailures("mine.py:score", step=step)
    faults = []
    for value in values:
        failures.add(scored(value, reason=reason), task="", trains=True)
        faults.append(failures.fault)
    return next((fault for fault in faults if fault), None)


def test_the_first_failure_of_each_task_and_reason_is_told_with_what_the_worker_says() -> None:
    failures = ScoreFailures("mine.py:score", step=STEP)
    said = [
        failures.add(scored(value, reason=reason, detail="ValueError: no (at mine.py:3)"), task=task, trains=True)
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
        "reward.function=mine.py:score: g0.0 of task 'add' could not be scored: ValueError: no (at mine.py:3)"
    )
    assert failures.text == "4 of 5 responses could not be scored (reward_failed 3, reward_timeout 1)"


@pytest.mark.parametrize("reason", [DropReason.REWARD_FAILED, DropReason.REWARD_TIMEOUT])
def test_a_step_of_which_nearly_all_fails_ends_the_run_and_not_one_response_sooner(reason) -> None:
    assert judge(*[None] * (STEP - 1), reason=reason) is None
    fault = judge(*[None] * STEP, reason=reason)
    assert fault is not None
    assert fault.startswith(
        f"reward.function=mine.py:score: {STEP} of the last {STEP} responses could not be scored"
    )
    assert fault.endswith("the last: None; mend it and go on with --resume")
    assert judge(*[None] * (FEWEST - 1), step=2) is None, "two failures are no sign, however small a step is"


def test_a_run_that_scores_most_goes_on_whatever_else_fails() -> None:
    assert judge(*[1.0, 0.0, None, None] * STEP) is None
    assert judge(*[1.0, 0.0] * STEP, *[None] * (STEP // 2)) is None


def test_a_reward_without_a_value_for_wrong_answers_ends_the_run() -> None:
    fault = judge(*[1.0, None, 1.0, 1.0] * STEP)
    assert fault is not None
    assert "48 of the last 192 responses could not be scored, and all others got 1, which teaches nothing" in fault


def test_equal_rewards_beside_some_time_outs_end_nothing() -> None:
    assert judge(*[0.0, None, 0.0, 0.0] * STEP, reason=DropReason.REWARD_TIMEOUT) is None
    assert judge(*[0.0] * 4 * STEP) is None


def test_equal_rewards_with_columns_beside_failures_end_nothing() -> None:
    failures = ScoreFailures("mine.py:score", step=STEP)
    columns = {"teacher_logprobs": TokenValues(Dtype.FLOAT32, b"")}
    for value in [0.0, None, 0.0, 0.0] * STEP:
        given = msgspec.structs.replace(scored(value), columns={} if value is None else columns)
        failures.add(given, task="", trains=True)
        assert failures.fault is None, "a teacher teaches whatever the value is"


def test_evaluations_count_for_failures_and_not_for_what_teaches() -> None:
    failures = ScoreFailures("mine.py:score", step=STEP)
    for value in [1.0, None, 1.0] * 3 * STEP:
        failures.add(scored(value), task="", trains=False)
    assert failures.fault is None
    for _ in range(STEP):
        failures.add(scored(None), task="", trains=False)
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
    assert made[0].complaint(scored(None, detail="KeyError: 4 (at mine.py:2)"), function="mine.py:score") == (
        "reward.function=mine.py:score: fails on the right answer to prompt 'p0' of task 'add' (a trial, made up):"
        " KeyError: 4 (at mine.py:2)"
    )
    assert "an empty response to prompt 'p7' (" in made[2].complaint(scored(None), function="f")
