"""A reward function with a limit on the wall time of each call. Runs in a process of its own, see `child`.

One that is not `async` is called in the main thread, where alone Python delivers signals, and one response at a
time; `async` ones, and those that are called in several threads, are called for many at once.
"""

import asyncio
import inspect
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType

import msgspec

from laminar_py.records.columns import Column, ColumnError
from laminar_py.records.scoring import ScoringRequest, TryAgainError
from laminar_py.records.trajectory import DropReason
from laminar_py.reward.outcome import (
    Outcome,
    PlainReward,
    RewardFunction,
    checked,
    describe,
    one_line,
    place,
    plain,
)

CALLS_AT_ONCE = 256  # of an `async` function in one process


class _OutOfTimeError(BaseException):
    """Raised in the middle of the reward function; no `except Exception` in there holds it up."""


class LimitedFunction:
    """Calls `function` for at most `timeout_s` seconds each; `columns` are wanted of it besides a value."""

    def __init__(
        self, function: RewardFunction, *, timeout_s: float, columns: Sequence[Column] = (), threads: int = 1
    ) -> None:
        called = (function, vars(type(function)).get("__call__"))
        self._function = function
        self._is_async = any(map(inspect.iscoroutinefunction, called))
        self._timeout_s = timeout_s
        self._columns = columns
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="reward") if threads > 1 else None
        self.at_once = CALLS_AT_ONCE if self._is_async else threads

    def call(self, request: ScoringRequest) -> Outcome:
        """Outcome of a function that is called for one response at a time, from the main thread."""
        start = time.perf_counter()
        try:
            with _alarm(self._timeout_s):
                given = plain(self._function(request))
        except _OutOfTimeError as error:
            return self._late(place(self._function, error, beyond=__file__), start)
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, a KeyboardInterrupt too
            return self._failed(error, start)
        return self._checked(given, request, start)

    async def call_beside(self, request: ScoringRequest) -> Outcome:
        """Outcome of a function that is called for several at once."""
        start = time.perf_counter()
        threads = dict[str, int]()
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                given = plain(await self._returned(request, threads))
        except BaseException as error:  # noqa: BLE001 - a user's function may raise anything, a CancelledError too
            if not limit.expired():
                return self._failed(error, start)
            where = _place_of_thread(threads) or place(self._function, error.__cause__, beyond=__file__)
            return self._late(where, start)
        return self._checked(given, request, start)

    async def _returned(self, request: ScoringRequest, threads: dict[str, int]) -> object:
        if self._is_async:
            return await self._function(request)  # type: ignore[misc]

        def run() -> object:
            threads["of call"] = threading.get_ident()
            return self._function(request)

        return await asyncio.get_running_loop().run_in_executor(self._threads, run)

    def _checked(self, given: PlainReward, request: ScoringRequest, start: float) -> Outcome:
        elapsed_s = time.perf_counter() - start
        try:
            outcome = checked(given, self._columns, length=len(request.response_ids))
        except ColumnError as error:
            detail = one_line(f"{error}{place(self._function, None, beyond=__file__)}")
            return Outcome(failure=DropReason.REWARD_FAILED, detail=detail, elapsed_s=elapsed_s)
        return msgspec.structs.replace(outcome, elapsed_s=elapsed_s)

    def _late(self, where: str, start: float) -> Outcome:
        detail = one_line(f"no value within {self._timeout_s:g} s, by reward.timeout_s or its own limit{where}")
        return Outcome(failure=DropReason.REWARD_TIMEOUT, detail=detail, elapsed_s=time.perf_counter() - start)

    def _failed(self, error: BaseException, start: float) -> Outcome:
        return Outcome(
            failure=DropReason.REWARD_FAILED,
            detail=one_line(f"{describe(error)}{place(self._function, error, beyond=__file__)}"),
            elapsed_s=time.perf_counter() - start,
            transient=isinstance(error, TryAgainError),
        )


@contextmanager
def _alarm(timeout_s: float) -> Iterator[None]:
    """Raise `_OutOfTimeError` after so many seconds."""

    def ring(signum: int, frame: FrameType | None) -> None:
        raise _OutOfTimeError

    previous = signal.signal(signal.SIGALRM, ring)
    # An alarm that fires while the timer is being stopped is raised inside `finally`, so the caller sees it.
    try:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _place_of_thread(threads: dict[str, int]) -> str:
    """The line in which the thread of a call is; "" where the call has none, or had ended."""
    frame = sys._current_frames().get(threads.get("of call", 0))
    return "" if frame is None else f" (at {frame.f_code.co_filename}:{frame.f_lineno})"
