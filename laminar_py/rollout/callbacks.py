"""Callbacks of the event loop that belong to a replica: a mistake in one ends it, as in a task of it."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


class Callbacks:
    """Callbacks of an engine, or of the event loop, for a group of tasks, from `open` until that ends."""

    def __init__(self) -> None:
        self._mistake: asyncio.Future[None] | None = None

    def open(self, tasks: asyncio.TaskGroup) -> None:
        """Have a task of these raise the first mistake."""
        self._mistake = asyncio.get_running_loop().create_future()
        tasks.create_task(_raise(self._mistake), name="callbacks")

    def close(self) -> None:
        """Be of no use any more."""
        if self._mistake is not None:
            self._mistake.cancel()

    @property
    def ended(self) -> bool:
        """True once the tasks end, and take in no other."""
        return self._mistake is not None and self._mistake.done()

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Around a callback, which raises nothing then."""
        try:
            yield
        except Exception as error:  # whatever it is, the task raises it
            log.exception("a callback failed")
            if self._mistake is not None and not self._mistake.done():
                self._mistake.set_exception(error)


async def _raise(mistake: asyncio.Future[None]) -> None:
    await mistake
