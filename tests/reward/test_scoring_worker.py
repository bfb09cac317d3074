"""The scoring worker: one score per request, whatever the reward function does."""

import asyncio
import json
import re
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest

from laminar_py.records.codec import decode, encode
from laminar_py.records.columns import TOKEN_REWARDS, Column, Dtype
from laminar_py.records.scoring import Reward, Score, ScoringRequest
from laminar_py.records.trajectory import DropReason, FinishReason
from laminar_py.reward import worker
from laminar_py.reward.worker import ScoringWorker

HINTS = Column(name="hints", dtype=Dtype.INT32)
GAINS = Column(name="gains")


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


def score(
    function: Callable[[ScoringRequest], object], *responses: str, timeout_s: float = 30.0, columns: tuple = ()
) -> list[Score]:
    requests = [make_request(response, index=index) for index, response in enumerate(responses)]
    return ScoringWorker(function, timeout_s=timeout_s, columns=columns).score(requests)  # type: ignore[arg-type]


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
    (scored,) = score(lambda _: value, "a")
    assert scored.value == 1.0
    assert type(scored.value) is float


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), 1e300, {"reward": 1.0}])
def test_anything_else_is_a_failed_reward(value: object) -> None:
    (scored,) = score(lambda _: value, "a")
    assert (scored.value, scored.failure) == (None, DropReason.REWARD_FAILED)
    assert f"returned {value!r}" in scored.detail


def test_only_the_trajectory_that_takes_too_long_is_dropped() -> None:
    scores = score(spin, "a", "spin", "b", timeout_s=0.1)
    assert [s.failure for s in scores] == [None, DropReason.REWARD_TIMEOUT], (
        "told at once; the rest is asked for again"
    )
    assert "reward.timeout_s=0.1" in scores[1].detail
    assert scores[1].elapsed_s >= 0.1


def test_slow_rewards_are_told_one_by_one_and_no_response_is_read_before_it_is_begun(monkeypatch) -> None:
    monkeypatch.setattr(worker, "SLICE_S", 0.0)
    requests = iter([make_request("1", index=index) for index in range(3)])
    begun: list[str] = []

    def begin(name: str) -> nullcontext:
        begun.append(name)
        return nullcontext()

    scores = ScoringWorker(lambda request: 1.0, timeout_s=30.0, begin=begin).score(requests)
    assert ([scored.trajectory_id for scored in scores], begun) == (["g0.0"], ["g0.0"])
    assert len(list(requests)) == 2


def test_catastrophic_backtracking_is_interrupted() -> None:
    (scored,) = score(
        lambda request: float(bool(re.match(r"(a+)+$", request.response))), "a" * 64 + "b", timeout_s=0.1
    )
    assert scored.failure is DropReason.REWARD_TIMEOUT


@pytest.mark.parametrize(
    "error",
    [
        ValueError("two\nlines"),
        RecursionError("deep"),
        SystemExit(3),
        KeyboardInterrupt("mine"),
        asyncio.CancelledError("mine"),
        GeneratorExit("mine"),
    ],
)
def test_an_exception_is_a_failed_reward_with_type_message_and_place(error: BaseException) -> None:
    def fail(request: ScoringRequest) -> float:
        raise error

    (scored,) = score(fail, "a")
    assert scored.failure is DropReason.REWARD_FAILED
    assert scored.detail.startswith(f"{type(error).__name__}: ")
    assert f"{__file__}:" in scored.detail
    assert "\n" not in scored.detail


def test_the_timer_and_the_handler_are_gone_afterwards() -> None:
    before = signal.getsignal(signal.SIGALRM)
    score(spin, "a", "spin", timeout_s=0.1)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


class Wordless(Exception):
    def __str__(self) -> str:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (Wordless(), "Wordless: its text cannot be had, KeyboardInterrupt"),
        (ValueError("\ud800 \x00"), "ValueError: \\ud800 \x00"),
        (ValueError("x" * 10_000), "ValueError: xxx"),
        (ValueError(), "ValueError"),
    ],
)
def test_an_exception_whose_text_fails_or_cannot_be_stored_costs_its_own_trajectory(error, words) -> None:
    def fail(request: ScoringRequest) -> float:
        if request.response == "bad":
            raise error
        return 1.0

    scores = decode(list[Score], encode(score(fail, "a", "bad", "b")))
    assert [s.value for s in scores] == [1.0, None, 1.0]
    assert scores[1].detail.startswith(words)
    assert f"(at {__file__}:" in scores[1].detail, "the end of a long text is kept"


def test_the_place_is_the_users_line_and_not_that_of_a_library() -> None:
    def parse(request: ScoringRequest) -> float:
        return json.loads(request.response)

    (scored,) = score(parse, "{")
    assert scored.detail.endswith(f"(at {__file__}:{parse.__code__.co_firstlineno + 1})")


def test_a_wrong_value_is_told_with_the_place_of_the_function_and_a_hang_with_its_line() -> None:
    (wrong,) = score(lambda request: None, "a")
    (late,) = score(spin, "spin", timeout_s=0.1)
    assert f"(at {__file__}:" in wrong.detail
    first = spin.__code__.co_firstlineno
    assert f"(at {__file__}:{first + 3})" in late.detail


def test_reading_what_was_returned_is_limited_as_well() -> None:
    class Slow:
        def __array__(self, dtype=None, copy=None) -> None:
            time.sleep(10)

    (scored,) = score(lambda request: Slow(), "a", timeout_s=0.1)
    assert scored.failure is DropReason.REWARD_TIMEOUT


def test_deep_recursion_in_the_reward_is_survived() -> None:
    def recurse(request: ScoringRequest) -> float:
        return recurse(request)

    (scored,) = score(recurse, "a", timeout_s=10)
    assert scored.failure is DropReason.REWARD_FAILED


def test_per_token_scores_travel_beside_their_sum() -> None:
    (scored,) = score(lambda request: [0.25 for _ in request.response_ids], "a")
    assert scored.value == 0.25
    assert scored.columns[TOKEN_REWARDS].array.tolist() == [0.25]


@pytest.mark.parametrize(
    ("given", "total"), [([3e38, 3e38], "inf"), ([3e38, -3e38], "0"), ([9e29, 9e29], "1.8e+30")]
)
def test_per_token_scores_that_are_too_large_together_are_a_failed_reward(given: list[float], total: str) -> None:
    request = msgspec.structs.replace(make_request("a"), response_ids=np.array([1, 1], np.int32))
    (scored,) = ScoringWorker(lambda request: given, timeout_s=1.0).score([request])
    assert (scored.value, scored.failure) == (None, DropReason.REWARD_FAILED)
    assert f"2 per-token rewards add up to {total};" in scored.detail


def test_per_token_scores_of_another_length_are_a_failed_reward() -> None:
    (scored,) = score(lambda request: [0.5, 0.5], "a")
    assert scored.failure is DropReason.REWARD_FAILED
    assert "one number for each of 1 tokens" in scored.detail


def test_declared_columns_travel_in_their_type_and_others_are_passed_over() -> None:
    reward = Reward(2.0, {"hints": [3], "gains": [1], "more": object()})
    (scored,) = score(lambda request: reward, "a", columns=(HINTS, GAINS))
    found = {name: (values.array.dtype.name, values.array.tolist()) for name, values in scored.columns.items()}
    assert (scored.value, found) == (2.0, {"hints": ("int32", [3]), "gains": ("float32", [1.0])})


def test_process_rewards_and_columns_travel_together() -> None:
    (scored,) = score(lambda request: Reward([0.5], {"hints": np.array([3])}), "a", columns=(HINTS,))
    assert (scored.value, sorted(scored.columns)) == (0.5, ["hints", TOKEN_REWARDS])


def test_an_algorithm_may_ask_for_process_rewards_themselves() -> None:
    asked = (Column(name=TOKEN_REWARDS),)
    given, missing = (score(lambda request, value=value: value, "a", columns=asked)[0] for value in ([0.5], 0.5))
    assert given.columns[TOKEN_REWARDS].array.tolist() == [0.5]
    assert (missing.failure, "'token_rewards'" in missing.detail) == (DropReason.REWARD_FAILED, True)


@pytest.mark.parametrize(
    ("column", "given", "words"),
    [
        (HINTS, None, "gave no column 'hints', which the algorithm needs"),
        (HINTS, [1, 2], r"column 'hints' has shape \(2,\); return one number for each of 1 tokens"),
        (HINTS, 1, r"column 'hints' has shape \(\)"),
        (HINTS, [0.5], "column 'hints' holds float64; return int32"),
        (HINTS, [2**40], "column 'hints' holds a number beyond int32"),
        (GAINS, ["1"], "column 'gains' holds <U1; return float32"),
        (GAINS, [float("nan")], "column 'gains' holds a number that is not finite"),
        (GAINS, [1e300], "column 'gains' holds a number beyond float32"),
        (GAINS, [[1.0]], r"column 'gains' has shape \(1, 1\)"),
    ],
)
def test_a_column_that_is_not_as_declared_is_a_failed_reward_that_names_it(column, given, words) -> None:
    given = {} if given is None else {column.name: given}
    (scored,) = score(lambda request: Reward(1.0, given), "a", columns=(column,))
    assert (scored.value, scored.failure) == (None, DropReason.REWARD_FAILED)
    assert re.search(words, scored.detail)


def test_an_error_in_reading_a_users_object_is_the_users() -> None:
    class Broken:
        def __array__(self, dtype=None, copy=None) -> None:
            raise ZeroDivisionError("mine")

    (scored,) = score(lambda request: Reward(1.0, {"hints": Broken()}), "a", columns=(HINTS,))
    assert (scored.failure, scored.detail[:17]) == (DropReason.REWARD_FAILED, "ZeroDivisionError")


def test_an_error_of_our_own_is_no_failed_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("ours")

    monkeypatch.setattr(worker, "check_columns", broken)
    with pytest.raises(ValueError, match="ours"):
        score(lambda request: 1.0, "a")
