"""The deltas of one request between an emulated engine and whoever hears of them. Owned by `engine`.

Invariant: each is told or read once, in order. There is one reader, and a stream is as short as a response, so it
needs neither a lock nor a bound.
"""

import asyncio
from collections.abc import Callable

from laminar_py.records.engine import Delta, EngineLostError


class ToldStream:
    """Deltas that `hear` is told in the next turn of the event loop; a stream holds little more than these."""

    __slots__ = ("_arrived", "_hear", "_is_due", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop, hear: Callable[[Delta | EngineLostError], None]) -> None:
        self._loop = loop
        self._hear = hear
        self._arrived: list[Delta | EngineLostError] = []
        self._is_due = False

    def put(self, news: Delta | EngineLostError) -> None:
        """Have a delta, or the loss of the engine, be told."""
        self._arrived.append(news)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._tell)

    def _tell(self) -> None:
        self._is_due = False
        arrived, self._arrived = self._arrived, []
        for news in arrived:
            self._hear(news)


class DeltaStream:
    """Deltas that wait to be read, by one reader."""

    __slots__ = ("_arrived", "_filled", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: list[Delta | EngineLostError] = []
        self._filled: asyncio.Future[None] | None = None  # while the reader waits

    def put(self, news: Delta | EngineLostError) -> None:
        """Have a delta be read, or the loss of the engine be raised."""
        self._arrived.append(news)
        if self._filled is not None and not self._filled.done():
            self._filled.set_result(None)

    async def take(self) -> list[Delta | EngineLostError]:
        """News that nobody has read, one at least."""
        if not self._arrived:
            self._filled = self._loop.create_future()
            await self._filled
        arrived, self._arrived = self._arrived, []
        return arrived
