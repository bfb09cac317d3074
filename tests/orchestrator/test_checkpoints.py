"""Checkpoints beside the steps, with a real ledger and real folders: when one counts, and what a death leaves."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from laminar_lab.audit.verify import verify
from laminar_py.config.loading import load_config
from laminar_py.learner.marker import MARKER, Architecture, complete_checkpoint
from laminar_py.ledger.recovery import recover
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.records.events import RolledBack, Undone
from laminar_py.records.metrics import LearnerStarted
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.orchestrator.checkpoints import (
    Checkpoints,
    checkpoint_name,
    find_checkpoint,
    restored_fault,
)
from laminar_py.runtime.orchestrator.resume import print_fallback
from tests.control.fleet import settle
from tests.ledger.runs import Ticks, begin, checkpoint, consume, make_ready, open_ledger
from tests.ledger.syncs import CALLS, without_sync
from tests.runs.runs import REPO
from tests.workers.fakes import make_incarnation

PATIENCE_S = 120


class Disk:
    """A learner's end: `complete` writes the folder of the checkpoint that was begun."""

    def __init__(self):
        self.begun = None
        self.answer = asyncio.get_running_loop().create_future()

    async def save(self, folder):
        self.begun, self.answer = folder, asyncio.get_running_loop().create_future()

    async def saved(self):
        return await self.answer

    def complete(self, fault=""):
        write_checkpoint(self.begun)
        self.answer.set_result(fault)


async def on_record(version):
    pass


def write_checkpoint(folder, step=1):
    partial = folder.with_name(f"{folder.name}.tmp")
    partial.mkdir(parents=True)
    (partial / "weights").write_bytes(b"x" * 100)
    complete_checkpoint(
        partial,
        folder,
        step=step,
        world_size=1,
        model=Architecture(model_type="qwen3", num_parameters=7, fingerprint="f"),
    )


STEPS = 4


@asynccontextmanager
async def running(path, disk, *, keep=2, recorded=on_record):
    """Checkpoints of a run, its ledger, and the steps that were checkpointed."""
    (path / "checkpoints").mkdir(exist_ok=True)
    checkpointed = []
    async with open_ledger(path) as ledger:
        begin(ledger, versions=range(STEPS + 1))
        made = make_checkpoints(path, disk, ledger, keep=keep, recorded=recorded, checkpointed=checkpointed.append)
        yield made, ledger, checkpointed


def make_checkpoints(path, disk, ledger, *, keep, recorded=on_record, checkpointed=lambda step: None, **kwargs):
    config = load_config(REPO / "configs/quickstart.yaml", [f"learner.keep_checkpoints={keep}"])
    return Checkpoints(
        make_incarnation(
            config=config, run=RunFolder(path), ledger=ledger, clock=Ticks(), checkpoint=kwargs.pop("last", None)
        ),
        save=disk.save,
        saved=disk.saved,
        recorded=recorded,
        checkpointed=checkpointed,
        **kwargs,
    )


def step_once(ledger, step, **kwargs):
    make_ready(ledger, f"g{step}.0", index=step, **kwargs)
    ledger.append_all(consume(step, step - 1, f"g{step}.0"))


def name(step):
    return checkpoint_name(step, incarnation=1, restarts=0)


async def save(checkpoints, disk, step):
    """From the copy to the record."""
    await checkpoints.begin(name(step), step=step, version=step)
    disk.complete()
    await checkpoints.finish()


async def test_a_faulty_one_is_named_and_the_one_before_stays_the_last(tmp_path):
    disk, faults, checkpointed = Disk(), [], []
    (tmp_path / "checkpoints").mkdir()
    async with open_ledger(tmp_path) as ledger:
        begin(ledger, versions=range(STEPS + 1))
        checkpoints = make_checkpoints(
            tmp_path, disk, ledger, keep=1, checkpointed=checkpointed.append, on_fault=faults.append
        )
        for step, fault in enumerate(["", "checkpoint step-2: differs", ""], 1):
            step_once(ledger, step)
            await checkpoints.begin(name(step), step=step, version=step)
            disk.complete(fault)
            await checkpoints.finish()
            expected = 1 if fault else step
            assert (checkpoints.last.step, find_checkpoint(RunFolder(tmp_path)).step) == (expected, expected)
        assert checkpointed == [1, 3]
        (text,) = faults
        assert text.startswith(f"checkpoint step-2: differs; checkpoints/{name(1)} is kept in its place; look at")
        assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == [name(3)]


async def test_a_learner_that_starts_with_other_steps_than_the_record_is_named(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk) as (checkpoints, ledger, _):
        for step in (1, 2):
            step_once(ledger, step)
        await save(checkpoints, disk, 2)
        await ledger.commit()
        run, last = RunFolder(tmp_path), checkpoints.last
        started = LearnerStarted(num_parameters=7, attention="sdpa", attention_share=0.0, steps_taken=2)
        assert restored_fault(run, last, started) == ""
        assert restored_fault(run, None, replace(started, steps_taken=0)) == ""
        fault = restored_fault(run, last, replace(started, steps_taken=0))
        assert fault.startswith(
            "the learner starts with 0 steps taken, and the record has 2 for step 2, checkpoints/"
        )
        assert restored_fault(run, last, replace(started, fault="x differs")).startswith("x differs; the learner")


async def test_it_counts_once_it_is_on_disk_whatever_steps_went_on_meanwhile(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk) as (checkpoints, ledger, checkpointed):
        step_once(ledger, 1)
        await checkpoints.begin(name(1), step=1, version=1)
        step_once(ledger, 2)
        await ledger.commit()
        assert (checkpoints.last, checkpointed, find_checkpoint(RunFolder(tmp_path))) == (None, [], None)
        disk.complete()
        await checkpoints.finish()
        assert (checkpoints.last.step, checkpointed) == (1, [1])
    recovered = recover(tmp_path)
    assert recovered.checkpoint == checkpoints.last
    assert recovered.events == (RolledBack(1, "controller_crashed"), Undone("g2.0", 2))
    assert verify(tmp_path) == []


async def test_the_next_one_waits_for_the_one_before_it(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk) as (checkpoints, ledger, checkpointed):
        for step in (1, 2):
            step_once(ledger, step)
        await checkpoints.begin(name(1), step=1, version=1)
        second = asyncio.create_task(checkpoints.begin(name(2), step=2, version=2))
        await settle()  # nothing is left to run before the first is done
        assert disk.begun.name == name(1)
        disk.complete()
        await second
        assert disk.begun.name == name(2)
        disk.complete()
        await checkpoints.finish()
        assert checkpointed == [1, 2]


async def test_a_learner_that_dies_over_one_leaves_the_one_before_it(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk) as (checkpoints, ledger, checkpointed):
        for step in (1, 2):
            step_once(ledger, step)
            await checkpoints.begin(name(step), step=step, version=step)
            if step == 1:
                disk.complete()
                await checkpoints.finish()
        death = PartCrashedError("learner-0", "no space left")
        disk.answer.set_exception(death)
        await checkpoints.any_failure()
        assert (checkpoints.failure, checkpoints.last.step, checkpointed) == (death, 1, [1])
        with pytest.raises(PartCrashedError):
            await checkpoints.finish()
        checkpoints.start_over()
        await checkpoints.begin("step-2-1.1", step=2, version=2)
        disk.complete()
        await checkpoints.finish()
        assert checkpointed == [1, 2]


async def test_it_does_not_count_before_its_version_is_on_record(tmp_path):
    disk, asked, recorded = Disk(), asyncio.Event(), asyncio.Event()

    async def gated(version):
        asked.set()
        await recorded.wait()

    async with running(tmp_path, disk, recorded=gated) as (checkpoints, ledger, checkpointed):
        step_once(ledger, 1)
        await checkpoints.begin(name(1), step=1, version=1)
        disk.complete()
        await asked.wait()
        assert (checkpoints.last, checkpointed) == (None, [])
        recorded.set()
        await checkpoints.finish()
        assert checkpointed == [1]


async def test_whatever_it_fails_with_is_told_at_once(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk) as (checkpoints, ledger, _):
        step_once(ledger, 1)
        await checkpoints.begin(name(1), step=1, version=1)
        told = asyncio.create_task(checkpoints.any_failure())
        await asyncio.sleep(0)
        full = OSError(28, "No space left on device")
        disk.answer.set_exception(full)
        await asyncio.wait_for(told, PATIENCE_S)
        assert checkpoints.failure is full
        with pytest.raises(OSError, match="No space left"):
            await checkpoints.finish()


async def test_what_is_being_written_when_the_run_ends_is_given_up(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk) as (checkpoints, ledger, _):
        step_once(ledger, 1)
        await checkpoints.begin(name(1), step=1, version=1)
        await checkpoints.close()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "checkpoint-1"]
    assert find_checkpoint(RunFolder(tmp_path)) is None


async def test_only_the_last_ones_on_record_are_kept_and_what_is_a_users(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk) as (checkpoints, ledger, _):
        for ours in ("step-0-1.0.tmp", "step-1-1.1", "step-0-1.0.gone", "step-1-1.0.gone"):
            (tmp_path / "checkpoints" / ours).mkdir()
            (tmp_path / "checkpoints" / ours / "weights").touch()
        for users in ("best", "step-1-1.0-copy", "step-1"):
            (tmp_path / "checkpoints" / users).mkdir()
        for step in (1, 2, 3):
            step_once(ledger, step)
            await save(checkpoints, disk, step)
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["best", "step-1", "step-1-1.0-copy", name(2), name(3)]


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
    torn = r"step-2: half written or damaged \(has no complete.json\); restore or delete it; without it"
    with pytest.raises(ValueError, match=torn + " the run resumes from checkpoints/step-1"):
        find_checkpoint(run)
    (tmp_path / "checkpoints/step-1").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=torn + " the run has no checkpoint, so start a new run"):
        find_checkpoint(run)
    (tmp_path / "elsewhere").rename(tmp_path / "checkpoints/step-1")
    (tmp_path / "checkpoints/step-2/weights").unlink()
    (tmp_path / "checkpoints/step-2").rmdir()
    assert find_checkpoint(run) == checkpoint(1, 1)
    console = Console(record=True, width=40)
    print_fallback(run, console)
    told = "checkpoints/step-2 is gone: the run goes back to step 1, checkpoints/step-1\n"
    assert console.export_text() == told
    recovered = recover(tmp_path, exists=run.has)
    assert recovered.checkpoint == checkpoint(1, 1)
    assert recovered.events == (RolledBack(1, "controller_crashed"), Undone("g2.0", 2))
    (tmp_path / "checkpoints/step-1").rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="checkpoints/step-2: this folder and all older checkpoints are gone"):
        find_checkpoint(run)


def folders(path):
    return sorted(folder.name for folder in (path / "checkpoints").iterdir())


async def test_the_only_one_kept_goes_when_the_record_of_the_next_is_written_and_not_before(tmp_path):
    disk, asked, go_on = Disk(), threading.Event(), threading.Event()
    async with running(tmp_path, disk, keep=1) as (checkpoints, ledger, checkpointed):
        for step in (1, 2):
            step_once(ledger, step)
        await save(checkpoints, disk, 1)
        write = ledger._writer.write

        def slowly(batch):
            asked.set()
            go_on.wait(PATIENCE_S)
            write(batch)

        ledger._writer.write = slowly
        second = asyncio.create_task(save(checkpoints, disk, 2))
        await asyncio.to_thread(asked.wait, PATIENCE_S)
        assert (folders(tmp_path), checkpointed, checkpoints.last.step) == ([name(1), name(2)], [1], 1)
        go_on.set()
        await second
        assert (folders(tmp_path), checkpointed, checkpoints.last.step) == ([name(2)], [1, 2], 2)


@pytest.mark.skipif(not CALLS, reason="the kernel's numbers are not known")
async def test_the_only_one_kept_stays_where_the_record_of_the_next_cannot_be_synced(tmp_path):
    disk = Disk()
    with suppress(sqlite3.OperationalError):  # the ledger's own end
        async with running(tmp_path, disk, keep=1) as (checkpoints, ledger, checkpointed):
            for step in (1, 2):
                step_once(ledger, step)
            await save(checkpoints, disk, 1)
            write = ledger._writer.write
            ledger._writer.write = lambda batch: without_sync(write, batch)
            make_ready(ledger, "g9.0", index=9)
            await ledger.commit()  # no power cut need spare this
            with pytest.raises(sqlite3.OperationalError, match="disk I/O error"):
                await save(checkpoints, disk, 2)
            assert (folders(tmp_path), checkpointed, checkpoints.last.step) == ([name(1), name(2)], [1], 1)


async def test_a_resumed_run_keeps_the_checkpoints_of_the_incarnations_before_it(tmp_path):
    disk = Disk()
    async with running(tmp_path, disk, keep=3) as (checkpoints, ledger, _):
        for step in (1, 2, 3):
            step_once(ledger, step)
            await save(checkpoints, disk, step)
        step_once(ledger, 4)
        last = find_checkpoint(RunFolder(tmp_path))
        await save(make_checkpoints(tmp_path, disk, ledger, keep=3, last=last), disk, 4)
        assert folders(tmp_path) == [name(2), name(3), name(4)]


async def die_between(path: Path, moment: str) -> None:
    """In a process of its own: step 2's checkpoint is complete, or on record too, and that is its last moment."""
    disk = Disk()
    async with running(path, disk, keep=1) as (checkpoints, ledger, _):
        for step in (1, 2):
            step_once(ledger, step)
            await checkpoints.begin(name(step), step=step, version=step)
            if step == 2 and moment == "complete":
                write_checkpoint(disk.begun, step=2)
                await ledger.commit()
                die()
            if step == 2 and moment == "recorded":
                checkpoints._delete_others = die
            disk.complete()
            await checkpoints.finish()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("moment", "step", "undone"), [("complete", 1, ["g2.0"]), ("recorded", 2, [])])
def test_kill_9_goes_back_to_the_newest_on_record_and_that_is_there(tmp_path, moment, step, undone):
    script = f"import asyncio, pathlib; from {__name__} import die_between; "
    script += f"asyncio.run(die_between(pathlib.Path({str(tmp_path)!r}), {moment!r}))"
    died = subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S, check=False)
    assert died.returncode == -signal.SIGKILL
    assert folders(tmp_path) == [name(1), name(2)]
    recovered = recover(tmp_path, exists=RunFolder(tmp_path).has)
    assert recovered.checkpoint.path == f"checkpoints/{name(step)}"
    assert [event for event in recovered.events if isinstance(event, Undone)] == [Undone(id, 2) for id in undone]
    assert [live.id for live in recovered.live] == undone
    assert verify(tmp_path) == []
