"""Checkpoints beside the steps, with a real ledger and real folders: when one counts, and what a death leaves."""

import asyncio
import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from laminar_py.audit.verify import verify
from laminar_py.events import RolledBack, Undone
from laminar_py.learner.marker import MARKER, Architecture, seal
from laminar_py.runtime.checkpoints import Checkpoints, find_checkpoint
from laminar_py.runtime.errors import PartDiedError
from laminar_py.runtime.run_folder import RunFolder
from laminar_py.store.recovery import recover
from tests.store.runs import Ticks, begin, checkpoint, consume, make_ready, open_ledger

PATIENCE_S = 120


class Disk:
    """A learner's end: `complete` writes the folder of the checkpoint that was begun."""

    def __init__(self):
        self.begun = None
        self.answer = asyncio.get_running_loop().create_future()

    async def save(self, folder):
        self.begun, self.answer = folder, asyncio.get_running_loop().create_future()

    async def saved(self):
        await self.answer

    def complete(self):
        write_checkpoint(self.begun)
        self.answer.set_result(None)


async def on_record(version):
    pass


def write_checkpoint(folder, step=1):
    partial = folder.with_name(f"{folder.name}.tmp")
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(b"x" * 100)
    seal(partial, folder, step=step, world_size=1, model=Architecture("qwen3", 7, "f"))


@asynccontextmanager
async def running(path, disk, *, keep=2):
    """Checkpoints of a run, its ledger, and the steps that were settled."""
    (path / "checkpoints").mkdir(exist_ok=True)
    settled = []
    async with open_ledger(path) as ledger:
        begin(ledger, versions=(0, 1, 2, 3))
        yield (
            Checkpoints(
                RunFolder(path),
                ledger=ledger,
                save=disk.save,
                saved=disk.saved,
                recorded=on_record,
                settled=settled.append,
                clock=Ticks(),
                keep=keep,
                last=None,
            ),
            ledger,
            settled,
        )


def step_once(ledger, step):
    make_ready(ledger, f"g{step}.0", index=step)
    ledger.append_all(consume(step, step - 1, f"g{step}.0"))


async def test_it_counts_once_it_is_on_disk_whatever_steps_went_on_meanwhile(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk) as (checkpoints, ledger, settled):
        step_once(ledger, 1)
        await checkpoints.begin("step-1", step=1, version=1)
        step_once(ledger, 2)
        await ledger.commit()
        assert (checkpoints.last, settled, find_checkpoint(RunFolder(tmp_path))) == (None, [], None)
        disk.complete()
        await checkpoints.finish()
        assert (checkpoints.last.step, settled) == (1, [1])
    recovered = recover(tmp_path)
    assert recovered.checkpoint == checkpoints.last
    assert recovered.events == (RolledBack(1, "controller_died"), Undone("g2.0", 2))
    assert verify(tmp_path) == []


async def test_the_next_one_waits_for_the_one_before_it(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk) as (checkpoints, ledger, settled):
        for step in (1, 2):
            step_once(ledger, step)
        await checkpoints.begin("step-1", step=1, version=1)
        second = asyncio.create_task(checkpoints.begin("step-2", step=2, version=2))
        await asyncio.sleep(0.05)
        assert disk.begun.name == "step-1"
        disk.complete()
        await second
        assert disk.begun.name == "step-2"
        disk.complete()
        await checkpoints.finish()
        assert settled == [1, 2]


async def test_a_learner_that_dies_over_one_leaves_the_one_before_it(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk) as (checkpoints, ledger, settled):
        for step in (1, 2):
            step_once(ledger, step)
            await checkpoints.begin(f"step-{step}", step=step, version=step)
            if step == 1:
                disk.complete()
                await checkpoints.finish()
        death = PartDiedError("learner-0", "no space left")
        disk.answer.set_exception(death)
        await checkpoints.any_lost()
        await checkpoints.settle()
        assert (checkpoints.lost, checkpoints.last.step, settled) == (death, 1, [1])
        with pytest.raises(PartDiedError):
            await checkpoints.finish()
        checkpoints.start_over()
        await checkpoints.begin("step-2-again", step=2, version=2)
        disk.complete()
        await checkpoints.finish()
        assert settled == [1, 2]


async def test_only_the_last_ones_on_record_are_kept(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk) as (checkpoints, ledger, _):
        for torn in ("step-0.tmp", "unrecorded"):
            (tmp_path / "checkpoints" / torn).mkdir()
        for step in (1, 2, 3):
            step_once(ledger, step)
            await checkpoints.begin(f"step-{step}", step=step, version=step)
            disk.complete()
            await checkpoints.finish()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-2", "step-3"]


async def test_a_torn_one_is_refused_and_without_it_the_one_before_is_taken(tmp_path):
    run = RunFolder(tmp_path)
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=(0, 1, 2))
        for step in (1, 2):
            step_once(ledger, step)
            ledger.append(checkpoint(step, step))
    for step in (1, 2):
        write_checkpoint(tmp_path / f"checkpoints/step-{step}")
    (tmp_path / "checkpoints/step-2" / MARKER).unlink()
    with pytest.raises(ValueError, match=r"step-2: half written or damaged \(has no complete.json\); delete it"):
        find_checkpoint(run)
    (tmp_path / "checkpoints/step-2/weights").unlink()
    (tmp_path / "checkpoints/step-2").rmdir()
    assert find_checkpoint(run) == checkpoint(1, 1)
    recovered = recover(tmp_path, there=run.has)
    assert recovered.checkpoint == checkpoint(1, 1)
    assert recovered.events == (RolledBack(1, "controller_died"), Undone("g2.0", 2))
    (tmp_path / "checkpoints/step-1").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="checkpoints/step-2: no such folder, nor is any older one there"):
        find_checkpoint(run)


async def die_between(path: Path) -> None:
    """In a process of its own: step 2's checkpoint is complete on disk, and that is its last moment."""
    disk = Disk()
    async with running(path, disk) as (checkpoints, ledger, _):
        for step in (1, 2):
            step_once(ledger, step)
            await checkpoints.begin(f"step-{step}", step=step, version=step)
            if step == 2:
                write_checkpoint(disk.begun, step=2)
                await ledger.commit()
                os.kill(os.getpid(), signal.SIGKILL)
            disk.complete()
            await checkpoints.finish()


def test_kill_9_between_the_files_and_the_record_goes_back_to_the_one_before(tmp_path):
    script = f"import asyncio, pathlib; from {__name__} import die_between; "
    script += f"asyncio.run(die_between(pathlib.Path({str(tmp_path)!r})))"
    died = subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S, check=False)
    assert died.returncode == -signal.SIGKILL
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-1", "step-2"]
    recovered = recover(tmp_path, there=RunFolder(tmp_path).has)
    assert recovered.checkpoint.path == "checkpoints/step-1"
    assert recovered.events == (RolledBack(1, "controller_died"), Undone("g2.0", 2))
    assert [live.id for live in recovered.live] == ["g2.0"]
    assert verify(tmp_path) == []
