"""A direction of the link between the controller and all replicas, on a virtual clock. Owned by `simulate.fleet`.

Invariant: what is sent arrives in the order in which it was sent, also at one moment, of which the event loop's
timers keep no order.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable


class OneWay:
    """Deliveries that take so long; bounded by what replicas and scheduler have to say in that time."""

    def __init__(self, takes_s: float) -> None:
        self._takes_s = takes_s
        self._loop = asyncio.get_running_loop()
        self._sent: deque[tuple[float, Callable[[], Awaitable[None]]]] = deque()
        self._any = asyncio.Event()

    def send(self, arrive: Callable[[], Awaitable[None]]) -> None:
        """Have that done when it has come there."""
        self._sent.append((self._loop.time() + self._takes_s, arrive))
        self._any.set()

    async def run(self) -> None:
        """Carry all of it, until cancelled."""
        while True:
            await self._any.wait()
            self._any.clear()
            while self._sent:
                due_s, arrive = self._sent.popleft()
                if due_s > self._loop.time():
                    due = self._loop.create_future()
                    self._loop.call_at(due_s, _end, due)
                    await due
                await arrive()


def _end(wait: asyncio.Future[None]) -> None:
    """End a wait, unless who waits was cancelled."""
    if not wait.done():
        wait.set_result(None)
