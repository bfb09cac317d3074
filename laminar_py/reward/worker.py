"""Runs a reward function inside a scoring process, with a limit on its wall time for each trajectory.

`workers.processes.scorer` calls it, from the main thread, where alone Python delivers signals. Invariant (law 6):
one score per request, in order, whatever the function does short of taking the process down, up to the first that
took too long; a function that nothing interrupts is the business of the guard in `stage`, which reads in `begun`
which response it has.
"""

import numbers
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import CodeType, FrameType

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

DETAIL_CHARS = 400
KEPT_CHARS = 200  # of the end of a longer text, where the place is
LARGEST = 1e30  # reward: advantages, which are differences of rewards, are finite in float32
SLICE_S = 1.0  # of a call, after which no response is begun: slow rewards are told one by one
PROCESS_REWARDS = Column(name=TOKEN_REWARDS)


class _OutOfTimeError(BaseException):
    """Raised in the middle of the reward function; no `except Exception` in there holds it up."""


class ScoringWorker:
    """Scores trajectories one after another, each for at most `timeout_s` seconds of wall time.

    `columns` are what the algorithm needs of the reward function besides a value; `begin` is entered with the id
    of each trajectory while it is scored.
    """

    def __init__(
        self,
        function: RewardFunction,
        *,
        timeout_s: float,
        columns: Sequence[Column] = (),
        begin: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._function = function
        self._timeout_s = timeout_s
        self._columns = columns
        self._begin = begin

    def score(self, requests: Iterable[ScoringRequest]) -> list[Score]:
        """Score requests in order: a value each, or REWARD_TIMEOUT or REWARD_FAILED with a line of detail.

        Ends with the first that took too long, so that it is known at once, and after `SLICE_S`; the others are
        asked for again.
        """
        scores: list[Score] = []
        end = time.perf_counter() + SLICE_S
        with _alarms():
            for request in requests:
                with self._begin(request.trajectory_id):
                    scores.append(self._score(request))
                if scores[-1].failure is DropReason.REWARD_TIMEOUT or time.perf_counter() >= end:
                    break
        return scores

    def _score(self, request: ScoringRequest) -> Score:
        start = time.perf_counter()
        value: float | None = None
        columns: dict[str, TokenValues] = {}
        failure, detail = None, ""
        try:
            given = self._run(request)
        except _OutOfTimeError as error:
            failure = DropReason.REWARD_TIMEOUT
            detail = _one_line(f"no value within reward.timeout_s={self._timeout_s:g}{self._place(error)}")
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, a KeyboardInterrupt too
            failure, detail = DropReason.REWARD_FAILED, _one_line(f"{_words(error)}{self._place(error)}")
        else:
            try:
                value, columns = self._checked(given, length=len(request.response_ids))
            except ColumnError as error:
                failure, detail = DropReason.REWARD_FAILED, _one_line(f"{error}{self._place(None)}")
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
            if given.value.dtype.kind in "biuf" and abs(given.value) <= LARGEST:
                return float(given.value), columns
            raise ColumnError(
                f"the reward function returned {given.text}; return a finite number up to {LARGEST:g}, or one for"
                f" each of {length} tokens"
            )
        rewards = check_array(PROCESS_REWARDS, given.value, length=length)
        columns = check_columns(self._columns, given.columns | {TOKEN_REWARDS: rewards}, length=length)
        with np.errstate(over="ignore"):
            total = float(rewards.sum())
        if not max(np.abs(rewards).max(initial=0.0), abs(total)) <= LARGEST:
            raise ColumnError(
                f"{length} per-token rewards add up to {total:g}; keep each and the sum below {LARGEST:g}"
            )
        return total, columns | {TOKEN_REWARDS: token_values(rewards)}

    def _run(self, request: ScoringRequest) -> "_Given":
        # An alarm that fires while the timer is being stopped is raised inside `finally`, so the caller sees it.
        try:
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s)
            return _plain(self._function(request))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _place(self, error: BaseException | None) -> str:
        """The line of the user's own code that an error came through last, e.g. " (at rewards.py:7)".

        Of a wrong return value, or where no line of the file of the reward had a part, that of the function.
        """
        code = _code(self._function)
        frames = traceback.extract_tb(error.__traceback__) if error is not None else []
        theirs = [frame for frame in frames if frame.filename != __file__]
        own = [frame for frame in theirs if code is not None and frame.filename == code.co_filename]
        if own or theirs:
            last = (own or theirs)[-1]
            return f" (at {last.filename}:{last.lineno})"
        return "" if code is None else f" (at {code.co_filename}:{code.co_firstlineno})"


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


def _code(function: object) -> CodeType | None:
    """Code of a function, or of the call of an object; None of what is not written in Python."""
    for called in (function, vars(type(function)).get("__call__")):
        code = getattr(called, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


def _words(error: BaseException) -> str:
    """Type and message of a user's exception, whose text may fail as well."""
    try:
        text = str(error)
    except BaseException as fault:  # noqa: BLE001 - a user's code, like the reward
        text = f"its text cannot be had, {type(fault).__name__}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _one_line(text: str) -> str:
    """Text in one line of at most `DETAIL_CHARS`, the end kept, and of characters that can be stored."""
    line = " ".join(text.split()).encode("utf-8", "backslashreplace").decode()
    if len(line) <= DETAIL_CHARS:
        return line
    return f"{line[: DETAIL_CHARS - KEPT_CHARS]} ... {line[-KEPT_CHARS:]}"
