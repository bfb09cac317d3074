"""Counts deaths, records them, and gives up on a part that keeps dying. Used by every keeper of a part."""

import logging
from collections import Counter
from collections.abc import Callable

from laminar_py.records.events import AnyEvent, PartDied, PartStarted
from laminar_py.runtime.cluster.errors import PartDiedError, RunFailedError

log = logging.getLogger(__name__)


class Supervisor:
    """Counter of a run's deaths; `record` takes the events."""

    def __init__(self, *, record: Callable[[AnyEvent], None], max_restarts: int) -> None:
        self.restarts: Counter[str] = Counter()
        self._record = record
        self._max_restarts = max_restarts

    @property
    def total_restarts(self) -> int:
        """Number of restarts, of any part."""
        return self.restarts.total()

    def started(self, part: str, pid: int) -> None:
        """A part runs."""
        self._record(PartStarted(part, pid))

    def died(self, error: PartDiedError) -> None:
        """A part died and is about to be started anew. Raises RunFailedError if it has died too often."""
        self._record(PartDied(error.part, error.reason))
        self.restarts[error.part] += 1
        log.warning("%s died (%s), restart %d", error.part, error.reason, self.restarts[error.part])
        if self.restarts[error.part] > self._max_restarts:
            raise RunFailedError(
                f"{error.part} died {self.restarts[error.part]} times, last: {error.reason}; see"
                f" logs/{error.part}.log, or raise supervisor.max_restarts={self._max_restarts}"
            )
