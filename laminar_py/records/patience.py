"""The time limit of calls to a server that compiles kernels in its first requests.

Engines and terms of the reward use it. A request in advance would not do: each kind of request compiles kernels of
its own.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Patience:
    """Limit of a call: `first_s` until the server's first answer, then `limit_s`, also for calls in flight.

    E.g. `Patience(60.0, first_s=900.0)`. Belongs to one event loop.
    """

    def __init__(self, limit_s: float, *, first_s: float = 0.0) -> None:
        self.limit_s, self.first_s = limit_s, first_s
        self.has_answer = False
        self._early: set[asyncio.Timeout] = set()  # of calls that began before the first answer

    @property
    def present_s(self) -> float:
        """Longest wait for an answer at present, seconds."""
        return self.limit_s if self.has_answer else max(self.limit_s, self.first_s)

    def note_answer(self) -> None:
        """Note that the server answers."""
        if self.has_answer:
            return
        self.has_answer = True
        for timer in self._early:
            if not timer.expired():  # its call may not have seen that yet
                timer.reschedule(asyncio.get_running_loop().time() + self.limit_s)

    @asynccontextmanager
    async def timer(self) -> AsyncIterator[None]:
        """Raise `TimeoutError` where the block takes longer than the limit."""
        async with asyncio.timeout(self.present_s) as timer:
            if not self.has_answer:
                self._early.add(timer)
            try:
                yield
            finally:
                self._early.discard(timer)
