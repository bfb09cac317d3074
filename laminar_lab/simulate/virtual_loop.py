"""An event loop whose time passes at once: with nothing to do it skips to its next timer.

Work for threads is done on the spot, since no time passes while it lasts. Invariant: timers fire in the order of
their times, those of one moment in the order in which they were set, whatever other timers there are.
"""

import asyncio
import math
import selectors
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
DAY_S = 86_400.0
TICK_S = 2.0**-28  # times are whole ticks, whose sums and differences are exact; asyncio looks 1 ns ahead
LOOK_EVERY = 256  # rounds between looks at sockets, of which a simulation has none
MOST_CANCELLED = 100  # timers, besides half of all, that stay after they were cancelled


class LoopClock:
    """Time of the event loop that runs where it is made, see `records.host.Clock`."""

    now: Callable[[], float]
    """Seconds of the loop's own clock; only differences mean anything."""

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time


class _Call(asyncio.Handle):
    """asyncio's own handle, made in one go: it asks for no debug mode, of which a simulation has none."""

    __slots__ = ()
    _context: Context | None  # asyncio's own, as the next four
    _loop: "VirtualLoop"
    _callback: Callable[..., object]
    _repr: str | None
    _source_traceback: None

    def __init__(
        self,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: "VirtualLoop",
        context: Context | None,
    ) -> None:
        self._callback, self._args, self._loop, self._context = callback, args, loop, context
        self._cancelled, self._repr, self._source_traceback = False, None, None


class _Timer(asyncio.TimerHandle):
    """asyncio's own timer, made in one go too; the loop hears of its cancellation before it has fired alone."""

    __slots__ = ()
    _context: Context | None  # asyncio's own, as the next six
    _loop: "VirtualLoop"
    _callback: Callable[..., object]
    _repr: str | None
    _source_traceback: None
    _when: float
    _scheduled: bool  # it has not fired

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: "VirtualLoop",
        context: Context | None,
    ) -> None:
        self._when, self._callback, self._args, self._loop, self._context = when, callback, args, loop, context
        self._cancelled, self._repr, self._source_traceback, self._scheduled = False, None, None, True

    def cancel(self) -> None:
        """Have it not fire, if it has not."""
        if not self._cancelled:
            self._cancelled, self._callback, self._args = True, _nothing, ()
            if self._scheduled:
                self._loop.forget_one()


def _nothing() -> None:
    """In the place of what was cancelled, of which nothing is to live on."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop on virtual time, which `skip` and idling move on.

    All of a simulation runs in one context, for nothing there has variables of its own.
    """

    _ready: deque["_Call | _Timer"]  # asyncio's own, as the next two: what the next round runs
    _stopping: bool
    _selector: selectors.BaseSelector

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timers: list[tuple[float, int, _Timer]] = []  # heap: time, place among all
        self._num_timers = self._num_cancelled = 0
        super().__init__()

    def time(self) -> float:
        """Virtual seconds since it was made."""
        return self._now_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Have that run in the next round."""
        handle = _Call(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer, at the next tick."""
        at_s = _next_tick(when)
        timer = _Timer(at_s, callback, args, self, context)
        self._num_timers += 1
        heappush(self._timers, (at_s, self._num_timers, timer))
        return timer

    def skip(self, seconds: float) -> None:
        """Let so much time pass in which nothing runs."""
        self._now_s += _next_tick(seconds)

    def run_in_executor(  # type: ignore[override]  # the answer is there already
        self, executor: Executor | None, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """A future that has the answer, or the error."""
        done = self.create_future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - whatever it raises is the future's
            done.set_exception(error)
        return done

    def _run_once(self) -> None:
        """In the place of asyncio's: rounds of what is ready, to which time passes where nothing is."""
        ready, timers = self._ready, self._timers
        for _ in range(LOOK_EVERY):
            if not ready and not self._stopping:
                self._idle()
            while timers and timers[0][0] <= self._now_s:
                timer = heappop(timers)[2]
                timer._scheduled = False
                ready.append(timer)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    try:
                        handle._callback(*handle._args)
                    except (SystemExit, KeyboardInterrupt):
                        raise
                    except BaseException as error:  # noqa: BLE001 - as asyncio's handles do
                        self.call_exception_handler({"message": f"{handle} failed", "exception": error})
            if self._stopping:
                return
        self._look(0)

    def _idle(self) -> None:
        """Have it be the time of the next timer; with none to come, wait for a socket."""
        while self._timers and self._timers[0][2].cancelled():
            heappop(self._timers)
        if self._timers:
            self._now_s = max(self._now_s, self._timers[0][0])
        else:
            self._look(None)

    def _look(self, timeout_s: float | None) -> None:
        """Have what came on sockets be ready."""
        self._process_events(self._selector.select(timeout_s))  # type: ignore[attr-defined]  # asyncio's own

    def forget_one(self) -> None:
        """Count a timer that was cancelled; once these may be more than others, let go of them."""
        self._num_cancelled += 1
        if self._num_cancelled > MOST_CANCELLED + len(self._timers) // 2:
            self._timers[:] = [timer for timer in self._timers if not timer[2].cancelled()]
            heapify(self._timers)
            self._num_cancelled = 0


def _next_tick(seconds: float) -> float:
    return math.ceil(seconds / TICK_S) * TICK_S if math.isfinite(seconds) else seconds


def virtually(coroutine: Coroutine[Any, Any, T], *, limit_s: float | None = DAY_S) -> T:
    """The result of a coroutine, led to its end in virtual time, of which it has so much. Raises TimeoutError."""

    found: list[T] = []  # not the task's result, of which the runner makes a string as it ends

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            found.append(await coroutine)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(limited())
    return found[0]
