"""Checkpoints of a run: begun between two steps, completed beside the next ones, put on record, and deleted.

Owned by the trainer. States of one: the learner copies (`begin`) -> its files are written -> complete on disk ->
on record -> older ones deleted. There is one at a time. Invariant: the ledger speaks of a checkpoint only when all
of it is on disk; so a death at any moment leaves the one before it, and what was consumed since can be undone.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from laminar_py.events import Checkpointed
from laminar_py.interfaces import Clock
from laminar_py.learner.marker import read_marker
from laminar_py.runtime.errors import PartDiedError
from laminar_py.runtime.run_folder import RunFolder
from laminar_py.store.database import reading
from laminar_py.store.ledger import Ledger
from laminar_py.store.recovery import last_checkpoint

ARCHIVE_EVERY = 10  # checkpoints; each archive is a Parquet file of its own


def find_checkpoint(run: RunFolder) -> Checkpointed | None:
    """The newest on record whose folder is there; None if none was made yet.

    Raises `ValueError` if that one is half written or damaged, or if all are gone.
    """
    with reading(run.path) as connection:
        found = last_checkpoint(connection, there=run.has)
    if found is not None:
        read_marker(run.path / found.path)
    return found


class Checkpoints:
    """Has the learner `save` into a folder, waits until that is `saved` and its version is `recorded`.

    `settled(step)` is called when steps up to `step` can no longer be undone.
    """

    def __init__(
        self,
        run: RunFolder,
        *,
        ledger: Ledger,
        save: Callable[[Path], Awaitable[None]],
        saved: Callable[[], Awaitable[None]],
        recorded: Callable[[int], Awaitable[None]],
        settled: Callable[[int], None],
        clock: Clock,
        keep: int,
        last: Checkpointed | None,
    ) -> None:
        self.last = last  # on record
        self.lost: PartDiedError | None = None  # how the learner died over the one being written
        self._run = run
        self._ledger = ledger
        self._save = save
        self._saved = saved
        self._recorded = recorded
        self._settled = settled
        self._clock = clock
        self._keep = keep
        self._kept = [run.path / last.path] if last else []  # the oldest first
        self._count = 0
        self._failed = asyncio.Event()  # `lost` is set
        self._writing: asyncio.Task[None] | None = None

    async def begin(self, name: str, *, step: int, version: int) -> None:
        """Have the learner's state copied; returns when the learner may go on. Raises PartDiedError."""
        began = self._clock.now()
        await self.finish()
        folder = self._run.checkpoints / name
        await self._save(folder)
        stall_s = self._clock.now() - began
        work = self._complete(folder, step, version, began=began, stall_s=stall_s)
        self._writing = asyncio.create_task(work, name=f"checkpoint-{step}")

    async def finish(self) -> None:
        """Until the one that was begun last is on record. Raises PartDiedError if the learner died over it."""
        if self._writing is not None:
            await self._writing

    async def any_lost(self) -> None:
        """Until the learner has died over one."""
        await self._failed.wait()

    async def settle(self) -> None:
        """The learner is dead: return when what was being written is on record, or lost."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
            if self._writing.exception() is not self.lost:
                self._writing.result()

    def start_over(self) -> None:
        """There is a new learner."""
        self.lost, self._writing = None, None
        self._failed.clear()

    async def _complete(self, folder: Path, step: int, version: int, *, began: float, stall_s: float) -> None:
        try:
            await self._saved()
            await self._recorded(version)
        except PartDiedError as error:
            self.lost = error
            self._failed.set()
            raise
        path = str(folder.relative_to(self._run.path))
        self.last = Checkpointed(step, version, path, stall_s, self._clock.now() - began)
        self._ledger.append(self.last)
        await self._ledger.commit()
        self._settled(step)
        self._kept = [*self._kept, folder][-self._keep :]
        await asyncio.to_thread(self._delete_others)
        self._count += 1
        if self._count % ARCHIVE_EVERY == 0:
            await self._ledger.archive()

    def _delete_others(self) -> None:
        """What is older, and what a death left half written or unrecorded."""
        for folder in self._run.checkpoints.iterdir():
            if folder not in self._kept:
                shutil.rmtree(folder, ignore_errors=True)
