"""Callbacks of the event loop that belong to a replica: an exception in one ends the replica's task group."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class Callbacks:
    """Guards callbacks of an engine or the event loop: a task of a task group raises their first exception."""

    def __init__(self) -> None:
        self._mistake: asyncio.Future[None] | None = None

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Start the task that raises the first exception."""
        self._mistake = asyncio.get_running_loop().create_future()
        tasks.create_task(_raise(self._mistake), name="callbacks")

    def close(self) -> None:
        """Cancel the task."""
        if self._mistake is not None:
            self._mistake.cancel()

    @property
    def ended(self) -> bool:
        """Whether the task group is ending, so that callbacks do nothing more."""
        return self._mistake is not None and self._mistake.done()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Run a callback's body; log its exception and pass it to the task."""
        try:
            yield
        except Exception as error:  # the task raises it
            log.exception("a callback failed")
            if self._mistake is not None and not self._mistake.done():
                self._mistake.set_exception(error)


async def _raise(mistake: asyncio.Future[None]) -> None:
    await mistake
