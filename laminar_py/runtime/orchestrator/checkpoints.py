"""Checkpoints of a run: begun between two steps, completed beside the next ones, put on record, and deleted.

Owned by the trainer. States of one: the learner copies (`begin`) -> its files are written -> complete on disk ->
on record -> older ones deleted. There is one at a time. Invariant: the ledger speaks of a checkpoint only when all
of it is on disk, and an older one is deleted only when that word is on disk too, also in the run's folder. So a
death or a power cut at any moment leaves the one before it, and what was consumed since can be undone (law 1).
Each that is kept can be gone back to: what one of them may need is not archived.
"""

import asyncio
import logging
import re
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

from laminar_py.config.section import ConfigError
from laminar_py.learner.marker import read_marker
from laminar_py.ledger.database import reading
from laminar_py.ledger.recovery import checkpoints_on_record, newest_there
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import Checkpointed
from laminar_py.runtime.cluster.errors import PartDiedError
from laminar_py.runtime.workers.incarnation import Incarnation

log = logging.getLogger(__name__)

_GONE = ".gone"
_OURS = re.compile(r"step-\d+-\d+\.\d+(\.tmp)?(\.gone)?")


def checkpoint_name(step: int, *, incarnation: int, restarts: int) -> str:
    """Name of a checkpoint's folder, e.g. `step-40-1.0`; no other of the run has it."""
    return f"step-{step}-{incarnation}.{restarts}"


def on_record(run: RunFolder) -> list[Checkpointed]:
    """Checkpoints that the ledger knows, the newest first, whether or not their folders are there."""
    with reading(run.live_ledger) as connection:
        return checkpoints_on_record(connection)


def find_checkpoint(run: RunFolder) -> Checkpointed | None:
    """The newest on record whose folder is there; None if none was made yet.

    Raises `ConfigError` if that one is half written or damaged, or if all are gone.
    """
    recorded = on_record(run)
    found = newest_there(recorded, run.has)
    if found is None:
        return None
    try:
        read_marker(run.path / found.path)
    except ConfigError as error:
        older = next((one.path for one in recorded[recorded.index(found) + 1 :] if run.has(one)), None)
        without = f"{older} is taken" if older else "there is none, start a new run"
        raise ConfigError(f"{error}; without it {without}") from None
    return found


class Checkpoints:
    """Has the learner `save` into a folder, waits until that is `saved` and its version is `recorded`.

    `settled(step)` is called when steps up to `step` can no longer be undone, `archive(step)` for what nobody
    needs who goes back to `step` or a later one.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        save: Callable[[Path], Awaitable[None]],
        saved: Callable[[], Awaitable[None]],
        recorded: Callable[[int], Awaitable[None]],
        settled: Callable[[int], None],
        archive: Callable[[int], Awaitable[object]],
    ) -> None:
        self.last = incarnation.checkpoint  # on record
        self._run = incarnation.run
        self._ledger = incarnation.ledger
        self._clock = incarnation.clock
        self._keep = incarnation.config.learner.keep_checkpoints
        self._save = save
        self._saved = saved
        self._recorded = recorded
        self._settled = settled
        self._archive = archive
        self._kept = [self.last] if self.last else []  # the oldest first
        self._writing: asyncio.Task[None] | None = None

    @property
    def failure(self) -> BaseException | None:
        """Error that the checkpoint begun last failed with: PartDiedError if the learner died over it."""
        return self._writing.exception() if self._writing is not None and self._writing.done() else None

    async def begin(self, name: str, *, step: int, version: int) -> None:
        """Have the learner's state copied; returns when the learner may go on. Raises what `finish` raises."""
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

    async def any_failure(self) -> None:
        """Until there is a `failure`."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self.failure is None:
            await asyncio.Event().wait()  # nothing is written, so nothing can fail

    async def settle(self) -> PartDiedError | None:
        """The learner is dead: when what was being written is on record, or how the learner died over it."""
        try:
            await self.finish()
        except PartDiedError as error:
            return error
        return None

    def start_over(self) -> None:
        """Forget what was begun: there is a new learner."""
        self._writing = None

    async def close(self) -> None:
        """The run ends: give up what is still being written. Whoever ends it knows of a `failure`."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _complete(self, folder: Path, step: int, version: int, *, began: float, stall_s: float) -> None:
        await self._saved()
        await self._recorded(version)
        path = str(folder.relative_to(self._run.path))
        elapsed_s = self._clock.now() - began
        done = Checkpointed(step=step, version=version, path=path, stall_s=stall_s, elapsed_s=elapsed_s)
        self._ledger.append(done)
        await self._ledger.commit()
        await self._ledger.copy()
        self.last = done
        self._settled(step)
        self._kept = [*self._kept, self.last][-self._keep :]
        await asyncio.to_thread(self._delete_others)
        await self._archive(self._kept[0].step)

    def _delete_others(self) -> None:
        """Delete older checkpoints, and what a death left half written, unrecorded or half deleted.

        It is renamed first: what reads it finds all of it or nothing.
        """
        kept = {self._run.path / one.path for one in self._kept}
        for folder in sorted(self._run.checkpoints.iterdir(), reverse=True):  # `x.gone` before an `x`
            if _OURS.fullmatch(folder.name) and folder not in kept:
                log.info("deleting %s", folder)
                gone = folder.with_name(folder.name.removesuffix(_GONE) + _GONE)
                folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
