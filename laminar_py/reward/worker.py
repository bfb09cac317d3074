"""Runs a reward function inside a scoring process, with a limit on its wall time for each trajectory.

The process shell in `runtime` calls it, from the main thread, where alone Python delivers signals. Invariant:
one score per request, in order, whatever the function does short of taking the process down; a function that
never returns to the interpreter is the business of the guard in `stage`.
"""

import math
import numbers
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

import numpy as np

from laminar_py.records.codec import FloatArray
from laminar_py.records.scoring import Score, ScoringRequest
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.registry import RewardFunction

DETAIL_CHARS = 300


class _OutOfTimeError(BaseException):
    """Raised in the middle of the reward function; no `except Exception` in there holds it up."""


class ScoringWorker:
    """Scores trajectories one after another, each for at most `timeout_s` seconds of wall time."""

    def __init__(self, function: RewardFunction, *, timeout_s: float) -> None:
        self._function = function
        self._timeout_s = timeout_s

    def score(self, requests: Sequence[ScoringRequest]) -> list[Score]:
        """One score per request: a value, or REWARD_TIMEOUT or REWARD_FAILED with a line of detail."""
        with _alarms():
            return [self._score(request) for request in requests]

    def _score(self, request: ScoringRequest) -> Score:
        start = time.perf_counter()
        value: float | None = None
        token_values: FloatArray | None = None
        failure, detail = None, ""
        try:
            value, token_values = _verdict(self._run(request), length=len(request.response_ids))
        except _OutOfTimeError:
            failure = DropReason.REWARD_TIMEOUT
            detail = f"no verdict within reward.timeout_s={self._timeout_s:g}"
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything
            failure, detail = DropReason.REWARD_FAILED, _describe(error)
        elapsed_s = time.perf_counter() - start
        return Score(
            trajectory_id=request.trajectory_id,
            value=value,
            token_values=token_values,
            elapsed_s=elapsed_s,
            failure=failure,
            detail=detail,
        )

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


def _verdict(value: object, *, length: int) -> tuple[float, FloatArray | None]:
    """A scalar; or, of per-token scores (process rewards, teacher log-probabilities), their sum and themselves."""
    if isinstance(value, numbers.Real) and math.isfinite(value):
        return float(value), None
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, str):
        scores = np.asarray(value, np.float32)
        if scores.shape == (length,) and np.isfinite(scores).all():
            return float(scores.sum()), scores
    raise ValueError(
        f"the reward function returned {value!r}; return a finite number, or one for each of {length} tokens"
    )


def _describe(error: BaseException) -> str:
    """Type, message and place, in one line."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = " ".join(f"{type(error).__name__}: {error} (at {last.filename}:{last.lineno})".split())
    return line[:DETAIL_CHARS]
