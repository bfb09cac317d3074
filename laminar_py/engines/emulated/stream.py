"""The deltas of one request between an emulated engine and whoever reads them. Owned by `engine`.

Invariant: each is read once, in order. There is one reader, and a stream is as short as a response, so it needs
neither a lock nor a bound.
"""

import asyncio

from laminar_py.records.engine import Delta
from laminar_py.records.protocols import EngineLostError


class DeltaStream:
    """Deltas that wait to be read; a thousand streams of a replica hold little more than these."""

    __slots__ = ("_arrived", "_filled", "_loop", "_loss")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: list[Delta] = []
        self._loss: EngineLostError | None = None
        self._filled: asyncio.Future[None] | None = None  # while the reader waits

    def put(self, delta: Delta) -> None:
        """Have one be read."""
        self._arrived.append(delta)
        self._wake()

    def lose(self, loss: EngineLostError) -> None:
        """Raise that, once all that is here has been read."""
        self._loss = loss
        self._wake()

    async def take(self) -> list[Delta]:
        """Deltas that nobody has read, one at least. Raises `EngineLostError`."""
        if not self._arrived and self._loss is None:
            self._filled = self._loop.create_future()
            await self._filled
        arrived, self._arrived = self._arrived, []
        if not arrived:
            assert self._loss is not None, "woken for nothing"
            raise self._loss
        return arrived

    def _wake(self) -> None:
        if self._filled is not None and not self._filled.done():
            self._filled.set_result(None)
