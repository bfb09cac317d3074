"""Answers of reward functions, checked: a number or numbers with columns, or why there are none.

Used in the processes that call them. Invariant (law 6): every call has one outcome, whatever the function did.
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
    TokenValues,
    check_array,
    check_columns,
    token_values,
)
from laminar_py.records.scoring import Reward, ScoringRequest
from laminar_py.records.trajectory import DropReason

DETAIL_CHARS = 400
KEPT_CHARS = 200  # of the end of a longer text, where the place is
LARGEST = 1e30  # reward: advantages, which are differences of rewards, are finite in float32
PROCESS_REWARDS = Column(name=TOKEN_REWARDS)

Given: TypeAlias = float | Sequence[float] | FloatArray | Mapping[str, float] | Reward
RewardFunction: TypeAlias = Callable[[ScoringRequest], object]
"""Gives a `Given`: a number for the response, one for each of its tokens, named numbers whose sum counts, or any
of these in a `Reward` with columns. It may be `async`."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Answer of one term, e.g. `Outcome(value=1.0)`, or `Outcome(failure=DropReason.REWARD_TIMEOUT)`."""

    value: float | None = None
    named: dict[str, float] = {}  # where it gave several, whose sum is the value
    columns: dict[str, TokenValues] = {}
    text: str = ""
    said: str = ""
    elapsed_s: float = 0.0
    failure: DropReason | None = None
    detail: str = ""
    transient: bool = False  # another call may succeed


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainReward:
    """Return value of a reward function as arrays: from here on an error is ours."""

    value: Array
    named: dict[str, float]  # where it gave several, whose sum is the value
    columns: dict[str, Array]
    text: str
    said: str
    shown: str  # of a value that is no array


def plain(returned: object) -> PlainReward:
    """Arrays of what a user's function returned. May raise anything: reading a user's object runs their code."""
    reward = returned if isinstance(returned, Reward) else Reward(returned)  # type: ignore[arg-type]
    value, named = reward.value, dict[str, float]()
    if isinstance(value, Mapping):
        named = {str(name): float(number) for name, number in value.items()}
        if not named:
            raise ColumnError("the reward function returned no named number; return at least one, or a number")
        value = sum(named.values())
    array = np.asarray(float(value) if isinstance(value, numbers.Real) else value)
    columns = {str(name): np.asarray(given) for name, given in reward.columns.items()}
    return PlainReward(
        value=array,
        named=named,
        columns=columns,
        text=one_line(str(reward.text)),
        said=one_line(str(reward.said)),
        shown="" if array.ndim else repr(reward.value),
    )


def checked(given: PlainReward, columns: Sequence[Column], *, length: int) -> Outcome:
    """Outcome for a response of `length` tokens, with those of `columns` that are given.

    Raises `ColumnError` where a value or a column is not as declared.
    """
    wanted = [column for column in columns if column.name in given.columns]
    found = check_columns(wanted, given.columns, length=length)
    if not given.value.ndim:
        if given.value.dtype.kind in "biuf" and abs(given.value) <= LARGEST:
            return Outcome(
                value=float(given.value), named=given.named, columns=found, text=given.text, said=given.said
            )
        raise ColumnError(
            f"the reward function returned {given.shown}; return a finite number up to {LARGEST:g}, or one for"
            f" each of {length} tokens"
        )
    rewards = check_array(PROCESS_REWARDS, given.value, length=length)
    with np.errstate(over="ignore"):
        total = float(rewards.sum())
    if not max(np.abs(rewards).max(initial=0.0), abs(total)) <= LARGEST:
        raise ColumnError(
            f"{length} per-token rewards add up to {total:g}; keep each and the sum below {LARGEST:g}"
        )
    columns_found = found | {TOKEN_REWARDS: token_values(rewards)}
    return Outcome(value=total, columns=columns_found, text=given.text, said=given.said)


def describe(error: BaseException) -> str:
    """Type and message of a user's exception, whose text may fail as well."""
    try:
        text = str(error)
    except BaseException as fault:  # noqa: BLE001 - a user's code, like the reward
        text = f"its text cannot be had, {type(fault).__name__}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def place(function: object, error: BaseException | None, *, beyond: str) -> str:
    """The line of the user's own code that an error came through last, e.g. " (at rewards.py:7)".

    Of a wrong return value, or where no line of the function's file had a part, that of the function. Frames of
    the file `beyond`, which calls it, are none of theirs.
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
    """Code of a function, or of the call of an object; None of what is not written in Python."""
    for called in (function, vars(type(function)).get("__call__")):
        code = getattr(called, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def one_line(text: str) -> str:
    """Text in one line of at most `DETAIL_CHARS`, the end kept, and of characters that can be stored."""
    line = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    if len(line) <= DETAIL_CHARS:
        return line
    return f"{line[: DETAIL_CHARS - KEPT_CHARS]} ... {line[-KEPT_CHARS:]}"
