"""An event loop on virtual time: with no ready callback, the clock jumps to the next timer.

The simulator and many tests run the production code on this loop. Timers fire in the order of their times, and
timers of one moment in the order in which they were set (`tests/simulate/test_virtual_loop.py`). Work for threads
runs at once, and takes no time.
"""

import asyncio
import math
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from heapq import heapify, heappop, heappush
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
DAY_S = 86_400.0
TICK_S = 2.0**-28  # times are whole ticks, whose sums and differences are exact; asyncio looks 1 ns ahead
LOOK_EVERY = 256  # rounds between looks at sockets; a simulation has no sockets
MOST_CANCELLED = 100  # cancelled timers, besides half of all timers, that stay on the heap


class LoopClock:
    """The clock of the running event loop, see `records.host.Clock`."""

    now: Callable[[], float]
    """Seconds of the loop's clock; only differences mean anything."""

    def __init__(self) -> None:
        self.now = asyncio.get_running_loop().time


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop on virtual time; `skip` and idling advance the clock."""

    _ready: deque[asyncio.Handle]  # asyncio's own, as the next two: callbacks of the next round
    _stopping: bool
    _selector: selectors.BaseSelector

    def __init__(self) -> None:
        self._now_s = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []  # heap: time, serial number
        self._num_timers = self._num_cancelled = 0
        super().__init__()

    def time(self) -> float:
        """Return virtual seconds since the loop was made."""
        return self._now_s

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Run a callback in the next round."""
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer for the first tick at or after `when`."""
        at_s = _next_tick(when)
        timer = asyncio.TimerHandle(at_s, callback, args, self, context)
        timer._scheduled = True  # type: ignore[attr-defined]  # asyncio's own: it has not fired
        self._num_timers += 1
        heappush(self._timers, (at_s, self._num_timers, timer))
        return timer

    def skip(self, seconds: float) -> None:
        """Advance the clock by `seconds`, rounded up to a tick, without running any callback."""
        self._now_s += _next_tick(seconds)

    def run_in_executor(  # type: ignore[override]  # the result is there already
        self, executor: Executor | None, function: Callable[..., Any], *arguments: Any
    ) -> asyncio.Future[Any]:
        """Call a function at once; return a future with its result or its error."""
        done = self.create_future()
        try:
            done.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - the future raises it
            done.set_exception(error)
        return done

    def _run_once(self) -> None:
        """Run rounds of ready callbacks in place of asyncio's round; advance the clock when none is ready."""
        ready, timers = self._ready, self._timers
        for _ in range(LOOK_EVERY):
            if not ready and not self._stopping:
                self._idle()
            while timers and timers[0][0] <= self._now_s:
                timer = heappop(timers)[2]
                timer._scheduled = False  # type: ignore[attr-defined]
                ready.append(timer)
            for _ in range(len(ready)):
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if self._stopping:
                return
        self._look(0)

    def _idle(self) -> None:
        """Advance the clock to the next timer; without a timer, wait for a socket."""
        while self._timers and self._timers[0][2].cancelled():
            heappop(self._timers)
        if self._timers:
            self._now_s = max(self._now_s, self._timers[0][0])
        else:
            self._look(None)

    def _look(self, timeout_s: float | None) -> None:
        """Make callbacks of sockets ready."""
        self._process_events(self._selector.select(timeout_s))  # type: ignore[attr-defined]  # asyncio's own

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Count a cancelled timer, and drop cancelled timers when they may be the majority. asyncio calls it."""
        if handle._scheduled:  # type: ignore[attr-defined]
            self._num_cancelled += 1
            if self._num_cancelled > MOST_CANCELLED + len(self._timers) // 2:
                self._timers[:] = [timer for timer in self._timers if not timer[2].cancelled()]
                heapify(self._timers)
                self._num_cancelled = 0


def _next_tick(seconds: float) -> float:
    return math.ceil(seconds / TICK_S) * TICK_S if math.isfinite(seconds) else seconds


def virtually(coroutine: Coroutine[Any, Any, T], *, limit_s: float | None = DAY_S) -> T:
    """Run a coroutine to its end in virtual time and return its result. Raises `TimeoutError` after `limit_s`."""
    found: list[T] = []  # as the task's result, the runner would convert it to a string at the end

    async def limited() -> None:
        async with asyncio.timeout(limit_s):
            found.append(await coroutine)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(limited())
    return found[0]
