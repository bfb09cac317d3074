"""Segments of a run, as its controller sees them: labels of their writers, and rescue of tokens after crashes.

The controller works with references and reads no token. All hosts of a run see the folder of its segments. A part
writes under the label of its start, so the name of a segment names the writer.
"""

import asyncio
import logging
import os
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import count
from pathlib import Path

from laminar_py.control.scheduler import TrajectoryScheduler
from laminar_py.ledger.recovery import Recovered
from laminar_py.ledger.segments.salvage import RecordedProgress, Salvage, salvage
from laminar_py.ledger.segments.writer import JOURNAL, SEGMENT
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.trajectory import Status
from laminar_py.runtime.workers.incarnation import Incarnation

log = logging.getLogger(__name__)


class RunSegments:
    """Gives labels to parts that write segments, and rescues the tokens of crashed parts from their journals."""

    def __init__(self, incarnation: Incarnation) -> None:
        self._ledger = incarnation.ledger
        self.folder = incarnation.run.segments
        self._incarnation = incarnation.number
        self._starts = count()

    def new_label(self, part: str) -> str:
        """Return a label for a part that starts, e.g. `replica-3-2-17`: start number 17 of incarnation 2."""
        return f"{part}-{self._incarnation}-{next(self._starts)}"

    async def salvage(self, label: str, running: Mapping[str, RecordedProgress]) -> Salvage:
        """Rescue unreported tokens of `running` trajectories from a crashed part's journals, if readable."""
        if not running:
            return Salvage([], [])
        try:
            return await asyncio.to_thread(salvage, self.folder, label, running)
        except OSError as error:
            log.error("journals of %s are unreadable, so its unreported tokens are lost: %s", label, error)
            return Salvage([], [])

    async def discard(self, journals: Iterable[Path]) -> None:
        """Commit the ledger, then delete these journals."""
        await self._ledger.commit()
        for path in journals:
            await asyncio.to_thread(path.unlink, missing_ok=True)

    async def close(self) -> None:
        """Delete all journals; called when all trajectories have ended and are reported."""
        await self.discard(self.folder.glob(f"*{JOURNAL}"))

    def find_missing(self, live: Iterable[LiveTrajectory]) -> dict[str, str]:
        """Return the trajectories whose segments are gone or too short, each with a reason."""
        missing = {}
        size_of = cache(_size)
        for entry in live:
            refs = [tokens.at for tokens in entry.tokens] + [column.at for column in entry.columns.values()]
            for ref in refs:
                end = ref.offset + ref.num_bytes
                if size_of(self.folder / f"{ref.segment}{SEGMENT}") < end:
                    missing[entry.id] = f"segment {ref.segment} is gone, or ends before byte {end}"
        return missing


def _size(path: Path) -> int:
    """Return the size of a file, opened first since a network folder caches sizes; 0 if the file is gone."""
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except FileNotFoundError:
        return 0


async def restore_live(recovered: Recovered, segments: RunSegments, scheduler: TrajectoryScheduler) -> None:
    """Restore a crashed controller's trajectories, with tokens of journals; drop trajectories without segments."""
    consumed = (member for group in recovered.consumed for member in group.members)
    missing = await asyncio.to_thread(segments.find_missing, [*recovered.live, *consumed])
    running = {
        entry.id: RecordedProgress(entry.epoch, entry.tokens[-1].end if entry.tokens else 0)
        for entry in recovered.live
        if entry.status is Status.RUNNING
    }
    journals = list(segments.folder.glob(f"*{JOURNAL}"))
    labels = {path.name.partition(".")[0] for path in journals}
    found = [one for label in sorted(labels) for one in (await segments.salvage(label, running)).found]
    await scheduler.restore(recovered, salvaged=found)
    await scheduler.incoming.drop_lost(missing)
    await segments.discard(journals)
