"""Weight versions on their way onto the record: their numbers, their order, and those of a learner that died.

Owned by the controller, which runs it beside the trainer, so that the learner goes on (law 8). Invariants: no
number is given twice, nor one that any part has spoken of; versions go on record in the order of their numbers,
each once it is complete.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from laminar_py.records.events import VersionPublished
from laminar_py.records.weights import Published
from laminar_py.relay.messages import Manifest
from laminar_py.runtime.cluster.errors import PartDiedError
from laminar_py.runtime.workers.incarnation import Incarnation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Copied:
    """A version that the learner has copied out of its memory and that is being completed."""

    version: int
    step: int
    parent: int | None


class Versions:
    """Versions of a run. `completed` waits for one of the learner's, `stored` looks into the relays' stores."""

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        completed: Callable[[int], Awaitable[Published]],
        stored: Callable[[], Awaitable[list[Manifest]]],
    ) -> None:
        self.newest = -1  # that the learner has copied
        self.lost: PartDiedError | None = None  # how the learner died over the newest, until `start_over`
        self._ledger = incarnation.ledger
        self._completed = completed
        self._stored = stored
        self._incarnation = incarnation
        self._given = -1
        self._copied: deque[_Copied] = deque()  # few: the learner completes one before it copies the next
        self._changed = asyncio.Event()  # set, and replaced, when one of these changes

    def number(self) -> int:
        """Number of the next version, never given again, even if the learner dies before it has used it."""
        self._given = max(self._given, self._ledger.newest_version) + 1
        return self._given

    def copied(self, version: int, *, step: int, parent: int | None) -> None:
        """The learner goes on; the version goes on record as soon as it is complete."""
        self.newest = version
        self._copied.append(_Copied(version, step, parent))
        self._notify()

    async def run(self) -> None:
        """Record versions until cancelled. Raises whatever fails but the death of the learner, which is `lost`."""
        while True:
            await self._until(lambda: bool(self._copied))
            first = self._copied[0]
            try:
                record_version(
                    self._incarnation, await self._completed(first.version), step=first.step, parent=first.parent
                )
                self._copied.popleft()
            except PartDiedError as error:
                log.warning("version %d was left unfinished: %s", first.version, error)
                self.lost = error
                self._copied.clear()
            self._notify()

    async def recorded(self) -> None:
        """Until all are complete and on record, but for those that are `lost`."""
        await self._until(lambda: not self._copied)

    async def on_record(self, version: int) -> None:
        """Until that one is on record. Raises PartDiedError if the learner died over it."""
        await self._until(lambda: self._ledger.newest_published >= version or self.lost is not None)
        if self.lost is not None and self._ledger.newest_published < version:
            raise self.lost

    async def recorded_after(self, version: int) -> int:
        """The newest on record, once that is above `version`."""
        await self._until(lambda: self._ledger.newest_published > version)
        return self._ledger.newest_published

    async def any_lost(self) -> None:
        """Until the learner has died over a version."""
        await self._until(lambda: self.lost is not None)

    def start_over(self) -> None:
        """Forget the loss: there is a new learner."""
        self.lost = None

    async def adopt(self, *, step: int) -> list[int]:
        """Record versions of a learner that died before it could say so, which replicas may serve; which ones."""
        orphans = {orphan.version: orphan for orphan in self._ledger.unpublished()}
        for found in await self._stored():
            orphans[found.version] = Published(found.version, found.digest, found.num_bytes, 0.0)
        adopted = []
        for version in sorted(orphans):
            parent = self._ledger.newest_published
            if version > parent:
                record_version(
                    self._incarnation, orphans[version], step=step, parent=parent if parent >= 0 else None
                )
                adopted.append(version)
        return adopted

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()


def record_version(incarnation: Incarnation, published: Published, *, step: int, parent: int | None) -> None:
    """Put a complete version on record."""
    incarnation.ledger.append(
        VersionPublished(
            version=published.version,
            step=step,
            incarnation=incarnation.number,
            parent=parent,
            digest=published.digest,
            num_bytes=published.num_bytes,
            stall_s=published.stall_s,
        )
    )
