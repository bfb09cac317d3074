"""Outcomes of reward functions: a checked number or numbers with columns, or a failure.

The processes that call the functions use it. Every call has one outcome, whatever the function does (law 6).
"""

import numbers
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TypeAlias

import msgspec
import numpy as np

from laminar_py.records.codec import FloatArray
from laminar_py.records.columns import (
    TOKEN_REWARDS,
    Array,
    Column,
    ColumnError,
    Dtype,
    Source,
    TokenValues,
    token_values,
)
from laminar_py.records.scoring import Reward, ScoringRequest
from laminar_py.records.trajectory import DropReason

DETAIL_CHARS = 400
KEPT_CHARS = 200  # of a longer text's end, where the place is
LARGEST = 1e30  # reward: advantages, which are differences of rewards, are finite in float32
PROCESS_REWARDS = Column(name=TOKEN_REWARDS)

Given: TypeAlias = float | Sequence[float] | FloatArray | Mapping[str, float] | Reward
RewardFunction: TypeAlias = Callable[[ScoringRequest], object]
"""Returns a `Given`: a number for the response, one for each of its tokens, named numbers that add up, or any
of these in a `Reward` with columns. The function may be `async`."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of one term, e.g. `Outcome(value=1.0)`, or `Outcome(failure=DropReason.REWARD_TIMEOUT)`."""

    value: float | None = None
    named: dict[str, float] = {}  # numbers by name, if the function gave several; `value` is their sum
    columns: dict[str, TokenValues] = {}
    text: str = ""
    answer: str = ""
    elapsed_s: float = 0.0
    failure: DropReason | None = None
    detail: str = ""
    transient: bool = False  # another call may succeed
    raised: bool = False  # the function raised or was late, whatever else the outcome says


def failed(detail: str, reason: DropReason = DropReason.REWARD_FAILED, *, transient: bool = False) -> Outcome:
    """Return the outcome of a call without a value; `detail` becomes one line."""
    return Outcome(failure=reason, detail=one_line(detail), transient=transient)


def late(limit_s: float, more: str = "") -> Outcome:
    """Return the outcome of a call without a value after `limit_s` seconds; `more` is added to its detail."""
    detail = f"no value within {limit_s:g} s (reward.timeout_s, or timeout_s of the term){more}"
    return failed(detail, DropReason.REWARD_TIMEOUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenReward:
    """Return value of a reward function, converted to arrays, so that reading it runs no user code."""

    value: Array
    named: dict[str, float]  # numbers by name, if the function gave several; `value` is their sum
    columns: dict[str, Array]
    text: str
    answer: str
    shown: str  # the value as messages show it; "" for an array


def read_reward(returned: object) -> GivenReward:
    """Convert the return value of a user's function. This may run user code, which may raise anything."""
    reward = returned if isinstance(returned, Reward) else Reward(returned)  # type: ignore[arg-type]
    value, named = reward.value, dict[str, float]()
    if isinstance(value, Mapping):
        named = {str(name): float(number) for name, number in value.items()}
        if not named:
            raise ColumnError("the reward function returned no named number; return at least one, or a number")
        value = sum(named.values())
    array = np.asarray(float(value) if isinstance(value, numbers.Real) else value)
    columns = {str(name): np.asarray(given) for name, given in reward.columns.items()}
    return GivenReward(
        value=array,
        named=named,
        columns=columns,
        text=one_line(str(reward.text)),
        answer=one_line(str(reward.answer)),
        shown="" if array.ndim else repr(reward.value),
    )


def check_reward(given: GivenReward, columns: Sequence[Column], *, length: int) -> Outcome:
    """Check a reward for a response of `length` tokens, and return its outcome.

    The outcome keeps the reward's columns that `columns` declare as given by scorers, and ignores others. Raises
    `ColumnError` if the value or a column has a wrong type, shape or size.
    """
    found = {
        column.name: token_values(_check_array(column, given.columns[column.name], length=length))
        for column in columns
        if column.source is Source.SCORER and column.name in given.columns
    }
    if given.value.ndim:
        rewards = _check_array(PROCESS_REWARDS, given.value, length=length)
        with np.errstate(over="ignore"):
            total = float(rewards.sum())
        if not max(np.abs(rewards).max(initial=0.0), abs(total)) <= LARGEST:
            raise ColumnError(
                f"{length} per-token rewards add up to {total:g}; keep each and the sum below {LARGEST:g}"
            )
        found[TOKEN_REWARDS] = token_values(rewards)
    elif given.value.dtype.kind in "biuf" and abs(given.value) <= LARGEST:
        total = float(given.value)
    else:
        raise ColumnError(
            f"the reward function returned {given.shown}; return a finite number up to {LARGEST:g}, or one for"
            f" each of {length} tokens"
        )
    return Outcome(value=total, named=given.named, columns=found, text=given.text, answer=given.answer)


def _check_array(column: Column, array: Array, *, length: int) -> Array:
    """Cast an array [length] to a column's type. Raises `ColumnError` if its numbers do not fit."""
    if array.shape != (length,):
        raise ColumnError(
            f"column {column.name!r} has shape {array.shape}; return one number for each of {length} tokens"
        )
    integral = array.dtype.kind in "bui"
    if not integral and (array.dtype.kind != "f" or column.dtype is Dtype.INT32):
        raise ColumnError(f"column {column.name!r} holds values of type {array.dtype}; return {column.dtype}")
    if not np.isfinite(array).all():
        raise ColumnError(f"column {column.name!r} holds a number that is not finite; return finite numbers")
    with np.errstate(over="ignore"):
        cast = array.astype(column.dtype.value)
    if not np.isfinite(cast).all() or (integral and column.dtype is Dtype.INT32 and (cast != array).any()):
        raise ColumnError(
            f"column {column.name!r} holds a number outside the range of {column.dtype}; return smaller ones"
        )
    return cast


def describe(error: BaseException) -> str:
    """Return type and message of a user's exception, whose `__str__` is user code and may raise, too."""
    try:
        text = str(error)
    except BaseException as fault:  # noqa: BLE001 - a user's code, like the reward
        text = f"its text cannot be had, {type(fault).__name__}"
    if isinstance(error, PermissionError):
        text += "; functions write neither into runs nor to relay.shm, see `shared_memory` in docs/rewards.md"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def error_place(function: object, error: BaseException | None, *, beyond: str) -> str:
    """Return the last line of user code in the traceback of an error, e.g. " (at rewards.py:7)".

    Without an error, or without such a line, return the first line of the function. Frames of the file `beyond`,
    which calls the function, do not count.
    """
    code = _code(function)
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    theirs = [frame for frame in frames if frame.filename not in (beyond, __file__)]
    own = [frame for frame in theirs if code is not None and frame.filename == code.co_filename]
    if own or theirs:
        last = (own or theirs)[-1]
        return f" (at {last.filename}:{last.lineno})"
    return "" if code is None else f" (at {code.co_filename}:{code.co_firstlineno})"


def _code(function: object) -> CodeType | None:
    """Return the code of a function, or of an object's `__call__`; None if it is not written in Python."""
    for called in (function, vars(type(function)).get("__call__")):
        code = getattr(called, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def one_line(text: str) -> str:
    """Shorten a text to one line of at most `DETAIL_CHARS` characters, with its end; escape surrogates."""
    line = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    if len(line) <= DETAIL_CHARS:
        return line
    return f"{line[: DETAIL_CHARS - KEPT_CHARS]} ... {line[-KEPT_CHARS:]}"
