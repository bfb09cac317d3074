"""The scoring worker: one score per request, whatever the reward function does."""

import re
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import DropReason, FinishReason
from laminar_py.reward.worker import ScoringWorker


def make_request(response: str, *, index: int = 0) -> ScoringRequest:
    ids = np.array([1], dtype=np.int32)
    return ScoringRequest(
        trajectory_id=f"g0.{index}",
        prompt="prompt",
        response=response,
        answer="7",
        finish_reason=FinishReason.STOP,
        response_ids=ids,
    )


def score(function: Callable[[ScoringRequest], object], *responses: str, timeout_s: float = 0.1) -> list[Score]:
    requests = [make_request(response, index=index) for index, response in enumerate(responses)]
    return ScoringWorker(function, timeout_s=timeout_s).score(requests)  # type: ignore[arg-type]


def spin(request: ScoringRequest) -> float:
    while request.response == "spin":
        try:
            time.sleep(10)
        except Exception:  # noqa: BLE001 - what a careless reward does
            return 5.0
    return 1.0


def test_scores_come_in_order_with_their_ids() -> None:
    scores = score(lambda request: float(request.response), "1", "0", "2.5")
    assert [(s.trajectory_id, s.value) for s in scores] == [("g0.0", 1.0), ("g0.1", 0.0), ("g0.2", 2.5)]
    assert all(s.failure is None and s.elapsed_s >= 0 for s in scores)


@pytest.mark.parametrize("value", [True, 1, np.float32(1), np.float64(1)])
def test_every_real_number_is_a_value(value: object) -> None:
    (verdict,) = score(lambda _: value, "a")
    assert verdict.value == 1.0
    assert type(verdict.value) is float


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), {"reward": 1.0}])
def test_anything_else_is_a_failed_reward(value: object) -> None:
    (verdict,) = score(lambda _: value, "a")
    assert (verdict.value, verdict.failure) == (None, DropReason.REWARD_FAILED)
    assert f"returned {value!r}" in verdict.detail


def test_only_the_trajectory_that_takes_too_long_is_dropped() -> None:
    scores = score(spin, "a", "spin", "b")
    assert [s.failure for s in scores] == [None, DropReason.REWARD_TIMEOUT, None]
    assert "reward.timeout_s=0.1" in scores[1].detail
    assert scores[1].elapsed_s >= 0.1


def test_catastrophic_backtracking_is_interrupted() -> None:
    (verdict,) = score(lambda request: float(bool(re.match(r"(a+)+$", request.response))), "a" * 64 + "b")
    assert verdict.failure is DropReason.REWARD_TIMEOUT


@pytest.mark.parametrize("error", [ValueError("two\nlines"), RecursionError("deep"), SystemExit(3)])
def test_an_exception_is_a_failed_reward_with_type_message_and_place(error: BaseException) -> None:
    def fail(request: ScoringRequest) -> float:
        raise error

    (verdict,) = score(fail, "a")
    assert verdict.failure is DropReason.REWARD_FAILED
    assert verdict.detail.startswith(f"{type(error).__name__}: ")
    assert f"{__file__}:" in verdict.detail
    assert "\n" not in verdict.detail


def test_the_timer_and_the_handler_are_gone_afterwards() -> None:
    before = signal.getsignal(signal.SIGALRM)
    score(spin, "a", "spin")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


def test_an_interrupt_from_the_keyboard_is_not_a_verdict() -> None:
    def interrupt(request: ScoringRequest) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(interrupt, "a")
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_deep_recursion_in_the_reward_is_survived() -> None:
    def recurse(request: ScoringRequest) -> float:
        return recurse(request)

    (verdict,) = score(recurse, "a", timeout_s=10)
    assert verdict.failure is DropReason.REWARD_FAILED


def test_per_token_scores_travel_beside_their_sum() -> None:
    (scored,) = score(lambda request: [0.25 for _ in request.response_ids], "a")
    assert scored.value == 0.25
    assert scored.token_values is not None
    assert scored.token_values.tolist() == [0.25]


def test_per_token_scores_of_another_length_are_a_failed_reward() -> None:
    (scored,) = score(lambda request: [0.5, 0.5], "a")
    assert scored.failure is DropReason.REWARD_FAILED
    assert "one for each of 1 tokens" in scored.detail
