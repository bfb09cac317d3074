"""A reward function with a limit: one outcome for each call, whatever the function does."""

import asyncio
import json
import re
import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from laminar_py.records.codec import decode, encode
from laminar_py.records.columns import TOKEN_REWARDS, Column, Dtype
from laminar_py.records.scoring import Reward, ScoringRequest, TryAgainError
from laminar_py.records.trajectory import DropReason
from laminar_py.reward import outcome
from laminar_py.reward.calls.child import CALLS_AT_ONCE, LimitedFunction
from laminar_py.reward.outcome import Outcome
from tests.reward.requests import make_request

HINTS = Column(name="hints", dtype=Dtype.INT32)
GAINS = Column(name="gains")


def call(function: Callable[[ScoringRequest], object], *responses: str, **settings: object) -> list[Outcome]:
    limited = LimitedFunction(function, **({"timeout_s": 30.0} | settings))
    return [limited.call(make_request(response)) for response in responses]


async def call_async(function: Callable, *responses: str, timeout_s: float = 30.0) -> list[Outcome]:
    limited = LimitedFunction(function, timeout_s=timeout_s)
    return await asyncio.gather(*(limited.call_async(make_request(response)) for response in responses))


def spin(request: ScoringRequest) -> float:
    while request.response == "spin":
        try:
            time.sleep(10)
        except Exception:  # noqa: BLE001 - what a careless reward does
            return 5.0
    return 1.0


@pytest.mark.parametrize("value", [True, 1, np.float32(1), np.float64(1)])
def test_every_real_number_is_a_value(value: object) -> None:
    (scored,) = call(lambda _: value, "a")
    assert scored.value == 1.0
    assert type(scored.value) is float


@pytest.mark.parametrize("value", [None, "1", float("nan"), float("inf"), 1e300, {"reward": float("nan")}])
def test_anything_else_is_a_failed_reward(value: object) -> None:
    (scored,) = call(lambda _: value, "a")
    assert (scored.value, scored.failure) == (None, DropReason.REWARD_FAILED)
    assert f"returned {value!r}" in scored.detail


def test_only_the_call_that_takes_too_long_is_given_up() -> None:
    outcomes = call(spin, "a", "spin", "b", timeout_s=0.1)
    assert [o.failure for o in outcomes] == [None, DropReason.REWARD_TIMEOUT, None]
    assert "within 0.1 s" in outcomes[1].detail
    assert outcomes[1].elapsed_s >= 0.1


def test_catastrophic_backtracking_is_interrupted() -> None:
    (scored,) = call(
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

    (scored,) = call(fail, "a")
    assert scored.failure is DropReason.REWARD_FAILED
    assert scored.detail.startswith(f"{type(error).__name__}: ")
    assert f"{__file__}:" in scored.detail
    assert "\n" not in scored.detail


def test_the_timer_and_the_handler_are_gone_afterwards() -> None:
    before = signal.getsignal(signal.SIGALRM)
    call(spin, "a", "spin", timeout_s=0.1)
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

    scores = decode(list[Outcome], encode(call(fail, "a", "bad", "b")))
    assert [s.value for s in scores] == [1.0, None, 1.0]
    assert scores[1].detail.startswith(words)
    assert f"(at {__file__}:" in scores[1].detail, "the end of a long text is kept"


def test_the_place_is_the_users_line_and_not_that_of_a_library() -> None:
    def parse(request: ScoringRequest) -> float:
        return json.loads(request.response)

    (scored,) = call(parse, "{")
    assert scored.detail.endswith(f"(at {__file__}:{parse.__code__.co_firstlineno + 1})")


def test_a_wrong_value_is_told_with_the_place_of_the_function_and_a_hang_with_its_line() -> None:
    (wrong,) = call(lambda request: None, "a")
    (late,) = call(spin, "spin", timeout_s=0.1)
    assert f"(at {__file__}:" in wrong.detail
    first = spin.__code__.co_firstlineno
    assert f"(at {__file__}:{first + 3})" in late.detail


def test_reading_what_was_returned_is_limited_as_well() -> None:
    class Slow:
        def __array__(self, dtype=None, copy=None) -> None:
            time.sleep(10)

    (scored,) = call(lambda request: Slow(), "a", timeout_s=0.1)
    assert scored.failure is DropReason.REWARD_TIMEOUT


def test_deep_recursion_in_the_reward_is_survived() -> None:
    def recurse(request: ScoringRequest) -> float:
        return recurse(request)

    (scored,) = call(recurse, "a", timeout_s=10)
    assert scored.failure is DropReason.REWARD_FAILED


def test_per_token_scores_travel_beside_their_sum() -> None:
    (scored,) = call(lambda request: [0.25 for _ in request.response_ids], "a")
    assert scored.value == 0.25
    assert scored.columns[TOKEN_REWARDS].array.tolist() == [0.25]


@pytest.mark.parametrize(
    ("given", "total"), [([3e38, 3e38], "inf"), ([3e38, -3e38], "0"), ([9e29, 9e29], "1.8e+30")]
)
def test_per_token_scores_that_are_too_large_together_are_a_failed_reward(given: list[float], total: str) -> None:
    scored = LimitedFunction(lambda request: given, timeout_s=30.0).call(make_request("a", num_tokens=2))
    assert (scored.value, scored.failure) == (None, DropReason.REWARD_FAILED)
    assert f"2 per-token rewards add up to {total};" in scored.detail


def test_per_token_scores_of_another_length_are_a_failed_reward() -> None:
    (scored,) = call(lambda request: [0.5, 0.5], "a")
    assert scored.failure is DropReason.REWARD_FAILED
    assert "one number for each of 1 tokens" in scored.detail


def test_declared_columns_travel_in_their_type_and_others_are_passed_over() -> None:
    reward = Reward(2.0, {"hints": [3], "gains": [1], "more": object()})
    (scored,) = call(lambda request: reward, "a", columns=(HINTS, GAINS))
    found = {name: (values.array.dtype.name, values.array.tolist()) for name, values in scored.columns.items()}
    assert (scored.value, found) == (2.0, {"hints": ("int32", [3]), "gains": ("float32", [1.0])})


def test_process_rewards_and_columns_travel_together() -> None:
    (scored,) = call(lambda request: Reward([0.5], {"hints": np.array([3])}), "a", columns=(HINTS,))
    assert (scored.value, sorted(scored.columns)) == (0.5, ["hints", TOKEN_REWARDS])


@pytest.mark.parametrize(
    ("column", "given", "words"),
    [
        (HINTS, [1, 2], r"column 'hints' has shape \(2,\); return one number for each of 1 tokens"),
        (HINTS, 1, r"column 'hints' has shape \(\)"),
        (HINTS, [0.5], "column 'hints' holds values of type float64; return int32"),
        (HINTS, [2**40], "column 'hints' holds a number outside the range of int32"),
        (GAINS, ["1"], "column 'gains' holds values of type <U1; return float32"),
        (GAINS, [float("nan")], "column 'gains' holds a number that is not finite"),
        (GAINS, [1e300], "column 'gains' holds a number outside the range of float32"),
        (GAINS, [[1.0]], r"column 'gains' has shape \(1, 1\)"),
    ],
)
def test_a_column_that_is_not_as_declared_is_a_failed_reward_that_names_it(column, given, words) -> None:
    (scored,) = call(lambda request: Reward(1.0, {column.name: given}), "a", columns=(column,))
    assert (scored.value, scored.failure) == (None, DropReason.REWARD_FAILED)
    assert re.search(words, scored.detail)


def test_an_error_in_reading_a_users_object_is_the_users() -> None:
    class Broken:
        def __array__(self, dtype=None, copy=None) -> None:
            raise ZeroDivisionError("mine")

    (scored,) = call(lambda request: Reward(1.0, {"hints": Broken()}), "a", columns=(HINTS,))
    assert (scored.failure, scored.detail[:17]) == (DropReason.REWARD_FAILED, "ZeroDivisionError")


def test_an_error_of_our_own_is_no_failed_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ValueError("ours")

    monkeypatch.setattr(outcome, "_check_array", broken)
    with pytest.raises(ValueError, match="ours"):
        call(lambda request: [1.0], "a")


def test_named_numbers_add_up_and_are_kept_by_name() -> None:
    (outcome,) = call(lambda request: {"right": 1, "short": 0.5}, "a")
    assert (outcome.value, outcome.named) == (1.5, {"right": 1.0, "short": 0.5})


def test_a_text_is_kept_in_one_line() -> None:
    (outcome,) = call(lambda request: Reward(1.0, text="test 4:\n got 3"), "a")
    assert outcome.text == "test 4: got 3"


async def wait_or_fail(request: ScoringRequest) -> float:
    if request.response == "wait":
        await asyncio.Event().wait()
    if request.response == "busy":
        raise TryAgainError("503")
    return float(request.response)


async def test_an_async_function_is_called_for_many_at_once_and_each_has_its_own_limit() -> None:
    outcomes = await call_async(wait_or_fail, "1", "wait", "2", "wait", timeout_s=0.1)
    assert [o.value for o in outcomes] == [1.0, None, 2.0, None]
    line = wait_or_fail.__code__.co_firstlineno + 2
    assert (
        outcomes[1].detail
        == f"no value within 0.1 s (reward.timeout_s, or timeout_s of the term) (at {__file__}:{line})"
    )
    assert LimitedFunction(wait_or_fail, timeout_s=1.0).concurrency == CALLS_AT_ONCE


async def test_a_busy_server_is_no_last_word_and_a_wrong_value_is() -> None:
    busy, wrong = await call_async(wait_or_fail, "busy", "x")
    assert (busy.transient, busy.failure) == (True, DropReason.REWARD_FAILED)
    assert (wrong.transient, wrong.detail[:10]) == (False, "ValueError")


async def test_a_time_out_of_the_functions_own_is_a_failure_and_not_the_limit() -> None:
    async def impatient(request: ScoringRequest) -> float:
        raise TimeoutError("mine")

    (outcome,) = await call_async(impatient, "1")
    assert (outcome.failure, outcome.detail[:18]) == (DropReason.REWARD_FAILED, "TimeoutError: mine")
