"""An event loop whose time passes at once: with nothing to do it skips to its next timer.

Work for threads is done on the spot, since no time passes while it lasts.
"""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

T = TypeVar("T")
DAY_S = 86_400.0
LOOK_EVERY = 256  # times that the loop asks, between looks at sockets, of which a simulation has none


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
        super().__init__(self._skipping)

    def time(self) -> float:
        """Virtual seconds since it was made."""
        return self._skipping.skipped_s

    def skip(self, seconds: float) -> None:
        """Let so much time pass in which nothing runs."""
        self._skipping.skipped_s += seconds

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


def virtually(coroutine: Coroutine[Any, Any, T], *, limit_s: float = DAY_S) -> T:
    """The result of a coroutine, led to its end in virtual time, of which it has so much. Raises TimeoutError."""

    async def limited() -> T:
        async with asyncio.timeout(limit_s):
            return await coroutine

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(limited())
