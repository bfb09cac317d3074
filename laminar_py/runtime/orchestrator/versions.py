"""Weight versions of a run: gives their numbers and records them, also after a crash of the learner.

Owned by the controller, which runs it beside the trainer, so that the learner does not wait (law 8). No number is
given twice in a run. The ledger gets versions in the order of their numbers, each once it is
complete (`tests/orchestrator/test_versions.py`).
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from laminar_py.records.events import VersionPublished
from laminar_py.records.weights import Published
from laminar_py.relay.messages import Manifest
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.workers.incarnation import Incarnation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Copied:
    """A version that the learner has copied out of its memory and that is not complete yet."""

    version: int
    step: int
    parent: int | None


class Versions:
    """Numbers and records versions."""

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        completed: Callable[[int], Awaitable[Published]],
        stored: Callable[[], Awaitable[list[Manifest]]],
    ) -> None:
        self.newest = -1  # newest version that the learner has copied
        self.lost: PartCrashedError | None = None  # crash of the learner; None again after `start_over`
        self._ledger = incarnation.ledger
        self._completed = completed
        self._stored = stored
        self.check: Callable[[int], Awaitable[None]] | None = None  # for alarms
        self._incarnation = incarnation
        self._last_number = -1
        self._copied: deque[_Copied] = deque()  # at most one: the learner completes a version before the next
        self._changed = asyncio.Event()  # set, and replaced by a new event, at each change

    def next_number(self) -> int:
        """Return the number of the next version; it is never given again, even after a crash of the learner."""
        self._last_number = max(self._last_number, self._ledger.newest_version) + 1
        return self._last_number

    def copied(self, version: int, *, step: int, parent: int | None) -> None:
        """Note that the learner has copied a version; `run` records the version once it is complete."""
        self.newest = version
        self._copied.append(_Copied(version, step, parent))
        self._notify()

    async def run(self) -> None:
        """Record copied versions once they are complete, until cancelled."""
        while True:
            await self._until(lambda: bool(self._copied))
            first = self._copied[0]
            try:
                published = await self._completed(first.version)
                if self.check is not None:
                    await self.check(first.version)
                record_version(self._incarnation, published, step=first.step, parent=first.parent)
                self._copied.popleft()
            except PartCrashedError as error:
                log.warning(
                    "version %d is lost, since the learner crashed before it was complete: %s",
                    first.version,
                    error,
                )
                self.lost = error
                self._copied.clear()
            self._notify()

    async def recorded(self) -> None:
        """Wait until `run` has recorded all copied versions, or has dropped them after a crash."""
        await self._until(lambda: not self._copied)

    async def on_record(self, version: int) -> None:
        """Wait until `version` is on record. Raises PartCrashedError if the learner crashes before that."""
        await self._until(lambda: self._ledger.newest_published >= version or self.lost is not None)
        if self.lost is not None and self._ledger.newest_published < version:
            raise self.lost

    async def recorded_after(self, version: int) -> int:
        """Wait until a version above `version` is on record, and return the newest one on record."""
        await self._until(lambda: self._ledger.newest_published > version)
        return self._ledger.newest_published

    async def wait_until_lost(self) -> None:
        """Wait until the learner crashes with an incomplete version, so that `lost` is set."""
        await self._until(lambda: self.lost is not None)

    def start_over(self) -> None:
        """Clear `lost`, since a new learner starts."""
        self.lost = None

    async def adopt(self, *, step: int) -> list[int]:
        """Record complete versions above the newest on record, as versions of `step`; return their numbers."""
        orphans = {orphan.version: orphan for orphan in self._ledger.unpublished()}
        for manifest in await self._stored():
            orphans[manifest.version] = Published(manifest.version, manifest.digest, manifest.num_bytes, 0.0)
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
    """Record a complete version."""
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
