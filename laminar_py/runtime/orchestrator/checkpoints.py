"""Checkpoints of a run: begun between two steps, completed beside the next ones, recorded, and deleted.

Owned by the trainer. States of a checkpoint: the learner copies its state (`begin`) -> its files are written ->
complete on disk -> on record -> older ones are deleted. At most one checkpoint is unfinished. The ledger
records a checkpoint when all its files are on disk, and older ones are deleted when that record is on disk too. So
a crash or a power cut at any moment leaves a usable checkpoint, and the steps since then can be undone (law 1).
A checkpoint whose files differ from the learner is no checkpoint: `on_fault` gets the fault, the one before stays
the last, and the files of the faulty one stay until the next sound one (law 13).
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
from laminar_py.ledger.recovery import checkpoints_on_record, learner_steps, newest_existing
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import Checkpointed
from laminar_py.records.metrics import LearnerStarted
from laminar_py.runtime.workers.incarnation import Incarnation

log = logging.getLogger(__name__)

_DELETED_SUFFIX = ".gone"
_CHECKPOINT_FOLDER = re.compile(r"step-\d+-\d+\.\d+(\.tmp)?(\.gone)?")


def checkpoint_name(step: int, *, incarnation: int, restarts: int) -> str:
    """Return a checkpoint's folder name, unique in the run: e.g. `step-40-1.0` in incarnation 1, no restarts."""
    return f"step-{step}-{incarnation}.{restarts}"


def on_record(run: RunFolder) -> list[Checkpointed]:
    """Return the checkpoints in the ledger, the newest first, also if their folders are deleted."""
    with reading(run.ledger) as connection:
        return checkpoints_on_record(connection)


def find_checkpoint(run: RunFolder) -> Checkpointed | None:
    """Return the newest checkpoint on record whose folder exists; None if none was made yet.

    Raises `ConfigError` if its files are incomplete, or if the folders of all recorded checkpoints are gone.
    """
    recorded = on_record(run)
    newest = newest_existing(recorded, run.has)
    if newest is None:
        return None
    try:
        read_marker(run.path / newest.path)
    except ConfigError as error:
        older = [other.path for other in recorded[recorded.index(newest) + 1 :] if run.has(other)]
        other = f"the run resumes from {older[0]}" if older else "the run has no checkpoint, so start a new run"
        raise ConfigError(f"{error}; without it {other}") from None
    return newest


def restored_fault(run: RunFolder, checkpoint: Checkpointed | None, started: LearnerStarted) -> str:
    """Return how a started learner differs from its checkpoint and from the record, "" if it does not (law 13)."""
    if started.fault:
        return f"{started.fault}; the learner does not continue from {checkpoint and checkpoint.path}"
    with reading(run.ledger) as connection:
        expected = learner_steps(connection, checkpoint.step) if checkpoint else 0
    if started.steps_taken == expected:
        return ""
    from_ = f"step {checkpoint.step}, {checkpoint.path}," if checkpoint else "its initial weights"
    return (
        f"the learner starts with {started.steps_taken} steps taken, and the record has {expected} for {from_};"
        " restore the folder of that checkpoint, or resume from an older one"
    )


def republished_fault(run: RunFolder, checkpoint: Checkpointed, version: int) -> str:
    """Return how `version`, which a started learner published, differs from the version that the checkpoint's step
    published before, "" if it does not or if that step published none (law 13)."""
    with reading(run.ledger) as connection:
        rows = connection.execute(
            "SELECT version, digest FROM version WHERE version = ? OR (version = ? AND step = ?)",
            (version, checkpoint.version, checkpoint.step),
        )
        digests = dict(rows.fetchall())
    if len(set(digests.values())) < 2:
        return ""
    return (
        f"version {version} has other bytes than version {checkpoint.version} of the same step {checkpoint.step}:"
        f" the learner did not take the weights of {checkpoint.path}; restore that folder, and --resume"
    )


class Checkpoints:
    """Makes checkpoints: the learner saves (`save`), completes the files (`saved`), the version is `recorded`.

    `saved` returns the fault of the files, "" for none; `on_fault` gets it. `checkpointed(step)` is called when
    steps up to `step` can no longer be undone.
    """

    def __init__(
        self,
        incarnation: Incarnation,
        *,
        save: Callable[[Path], Awaitable[None]],
        saved: Callable[[], Awaitable[str]],
        recorded: Callable[[int], Awaitable[None]],
        checkpointed: Callable[[int], None],
        on_fault: Callable[[str], None] = log.error,
    ) -> None:
        self.last = incarnation.checkpoint  # the newest on record
        self._run = incarnation.run
        self._ledger = incarnation.ledger
        self._clock = incarnation.clock
        self._keep = incarnation.config.learner.keep_checkpoints
        self._save = save
        self._saved = saved
        self._recorded = recorded
        self._checkpointed = checkpointed
        self._on_fault = on_fault
        known = on_record(self._run) if self.last else []
        self._kept = [one for one in reversed(known) if self._run.has(one)]  # the oldest first
        self._writing: asyncio.Task[None] | None = None

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the newest checkpoint, e.g. a PartCrashedError of the learner; None without one."""
        return self._writing.exception() if self._writing is not None and self._writing.done() else None

    async def begin(self, name: str, *, step: int, version: int) -> None:
        """Wait for the checkpoint before, then begin one; return when the learner has copied its state."""
        began = self._clock.now()
        await self.finish()
        folder = self._run.checkpoints / name
        await self._save(folder)
        stall_s = self._clock.now() - began
        work = self._complete(folder, step, version, began=began, stall_s=stall_s)
        self._writing = asyncio.create_task(work, name=f"checkpoint-{step}")

    async def finish(self) -> None:
        """Wait until the newest checkpoint is on record. Raises PartCrashedError if the learner crashed before."""
        if self._writing is not None:
            await self._writing

    async def any_failure(self) -> None:
        """Wait until there is a `failure`."""
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self.failure is None:
            await asyncio.Event().wait()

    def start_over(self) -> None:
        """Drop the failed checkpoint of a crashed learner, so that `failure` is None again."""
        self._writing = None

    async def close(self) -> None:
        """Cancel the unfinished checkpoint at the end of the run."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)

    async def _complete(self, folder: Path, step: int, version: int, *, began: float, stall_s: float) -> None:
        """Wait until the files and the version are complete, record the checkpoint, and delete old checkpoints.

        A faulty checkpoint is not recorded, unless it is the first of its run, to which a crash must go back.
        """
        fault = await self._saved()
        await self._recorded(version)
        if fault:
            kept = "it is the run's first" if self.last is None else f"{self.last.path} is kept in its place"
            self._on_fault(f"{fault}; {kept}; look at the disk of {folder.parent}")
            if self.last is not None:
                return
        path = str(folder.relative_to(self._run.path))
        elapsed_s = self._clock.now() - began
        done = Checkpointed(step=step, version=version, path=path, stall_s=stall_s, elapsed_s=elapsed_s)
        self._ledger.append(done)
        await self._ledger.commit()
        self.last = done
        self._checkpointed(step)
        self._kept = [*self._kept, self.last][-self._keep :]
        await asyncio.to_thread(self._delete_others)

    def _delete_others(self) -> None:
        """Delete all checkpoint folders but `_kept`, also folders that a crash left incomplete or half deleted.

        Each folder is renamed before its deletion, so that no reader sees a part of a checkpoint.
        """
        kept_folders = {self._run.path / checkpoint.path for checkpoint in self._kept}
        for folder in sorted(self._run.checkpoints.iterdir(), reverse=True):  # `x.gone` before an `x`
            if _CHECKPOINT_FOLDER.fullmatch(folder.name) and folder not in kept_folders:
                log.info("deleting %s", folder)
                gone = folder.with_name(folder.name.removesuffix(_DELETED_SUFFIX) + _DELETED_SUFFIX)
                folder.rename(gone)
                shutil.rmtree(gone, ignore_errors=True)
