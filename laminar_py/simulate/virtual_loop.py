"""An event loop whose time passes at once: with nothing to do it skips to its next timer.

Work for threads is done on the spot, since no time passes while it lasts. Invariant: timers fire in the order of
their times, those of one moment in the order in which they were set, whatever other timers there are.
"""

import asyncio
import math
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
DAY_S = 86_400.0
TICK_S = 2.0**-28  # times are whole ticks, whose sums and differences are exact; asyncio looks 1 ns ahead
LOOK_EVERY = 256  # times that the loop asks, between looks at sockets, of which a simulation has none


class TimerTime(float):
    """Time of a timer; of equal ones that with the lower `place` is the earlier."""

    __slots__ = ("place",)
    place: int

    def __lt__(self, other: float) -> bool:
        """Compare with another timer."""
        if float.__lt__(self, other):
            return True
        return float.__eq__(self, other) and isinstance(other, TimerTime) and self.place < other.place


class LoopClock:
    """Time of the event loop that runs where it is made, see `records.protocols.Clock`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        """Seconds of the loop's own clock; only differences mean anything."""
        return self._loop.time()


class _Skipping(selectors.DefaultSelector):
    """Waits for no time, and says how much of it would have passed."""

    skipped_s = 0.0
    asked = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready at once; with no timer to come, wait for a socket."""
        self.asked += 1
        if timeout is None:
            return super().select(None)
        self.skipped_s += max(0.0, timeout)
        return super().select(0) if self.asked % LOOK_EVERY == 0 else []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Event loop on virtual time, which `skip` and idling move on."""

    def __init__(self) -> None:
        self._skipping = _Skipping()
        self._num_timers = 0
        super().__init__(self._skipping)

    def time(self) -> float:
        """Virtual seconds since it was made."""
        return self._skipping.skipped_s

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Set a timer, at the next tick."""
        at_s = TimerTime(_next_tick(when))
        at_s.place = self._num_timers = self._num_timers + 1
        return super().call_at(at_s, callback, *args, context=context)

    def skip(self, seconds: float) -> None:
        """Let so much time pass in which nothing runs."""
        self._skipping.skipped_s += _next_tick(seconds)

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
