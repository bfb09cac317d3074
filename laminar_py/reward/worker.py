"""Runs a reward function inside a scoring process, with a limit on its wall time for each trajectory.

`workers.processes.scorer` calls it, from the main thread, where alone Python delivers signals. Invariant (law 6):
one score per request, in order, whatever the function does short of taking the process down; a function that
never returns to the interpreter is the business of the guard in `stage`.
"""

import numbers
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import numpy as np

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
from laminar_py.records.scoring import Reward, Score, ScoringRequest
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.registry import RewardFunction

DETAIL_CHARS = 300
PROCESS_REWARDS = Column(name=TOKEN_REWARDS)


class _OutOfTimeError(BaseException):
    """Raised in the middle of the reward function; no `except Exception` in there holds it up."""


class ScoringWorker:
    """Scores trajectories one after another, each for at most `timeout_s` seconds of wall time.

    `columns` are what the algorithm needs of the reward function besides a value.
    """

    def __init__(self, function: RewardFunction, *, timeout_s: float, columns: Sequence[Column] = ()) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._columns = columns

    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """Score requests in order: a value each, or REWARD_TIMEOUT or REWARD_FAILED with a line of detail."""
        with _alarms():
            return [self._score(request) for request in requests]

    def _score(self, request: ScoringRequest) -> Score:
        start = time.perf_counter()
        value: float | None = None
        columns: dict[str, TokenValues] = {}
        failure, detail = None, ""
        try:
            given = _plain(self._run(request))
        except _OutOfTimeError:
            failure = DropReason.REWARD_TIMEOUT
            detail = f"no value within reward.timeout_s={self._timeout_s:g}"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
            failure, detail = DropReason.REWARD_FAILED, _describe(error)
        else:
            try:
                value, columns = self._checked(given, length=len(request.response_ids))
            except ColumnError as error:
                failure, detail = DropReason.REWARD_FAILED, _one_line(str(error))
        return Score(
            trajectory_id=request.trajectory_id,
            value=value,
            columns=columns,
            elapsed_s=time.perf_counter() - start,
            failure=failure,
            detail=detail,
        )

    def _checked(self, given: "_Given", *, length: int) -> tuple[float, dict[str, TokenValues]]:
        """The value of a response, and its columns. Raises `ColumnError` if they are not as declared."""
        if not given.value.ndim:
            columns = check_columns(self._columns, given.columns, length=length)
            if given.value.dtype.kind in "biuf" and np.isfinite(given.value):
                return float(given.value), columns
            raise ColumnError(
                f"the reward function returned {given.text}; return a finite number, or one for each of {length}"
                " tokens"
            )
        rewards = check_array(PROCESS_REWARDS, given.value, length=length)
        columns = check_columns(self._columns, given.columns | {TOKEN_REWARDS: rewards}, length=length)
        return float(rewards.sum()), columns | {TOKEN_REWARDS: token_values(rewards)}

    def _run(self, request: ScoringRequest) -> object:
        # An alarm that fires while the timer is being stopped is raised inside `finally`, so the caller sees it.
        try:
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s)
            return self._function(request)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextmanager
def _alarms() -> Iterator[None]:
    """SIGALRM raises `_OutOfTimeError` meanwhile."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise _OutOfTimeError

    previous = signal.signal(signal.SIGALRM, ring)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, previous)


@dataclass(frozen=True, slots=True)
class _Given:
    """Return value of a reward function as arrays: from here on an error is ours."""

    value: Array
    columns: dict[str, Array]
    text: str  # of a value that is no array


def _plain(returned: object) -> _Given:
    """Arrays of what a user's function returned. May raise anything: reading a user's object runs their code."""
    reward = returned if isinstance(returned, Reward) else Reward(returned)  # type: ignore[arg-type]
    value = np.asarray(float(reward.value) if isinstance(reward.value, numbers.Real) else reward.value)
    columns = {str(name): np.asarray(given) for name, given in reward.columns.items()}
    return _Given(value, columns, "" if value.ndim else repr(reward.value))


def _describe(error: BaseException) -> str:
    """Type, message and place, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return _one_line(f"{type(error).__name__}: {error} (at {last.filename}:{last.lineno})")


def _one_line(text: str) -> str:
    return " ".join(text.split())[:DETAIL_CHARS]
