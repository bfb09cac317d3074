"""The queue of an experiment: slots take runs, start `laminar train`, and resume a run that crashed.

`laminar launch` calls it. A slot takes the next run that has not ended, starts it, waits for its end, and decides
about a retry. The states of runs are on `Board`; run folders keep everything that outlives this process.

A run has one process at a time (the lock of its folder), and a finished run never starts again. Processes end with
the launcher (`guard`), so the next launcher finds each run ended, about to stop, or ready to resume.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from laminar_lab.launcher.board import Board
from laminar_lab.launcher.experiment import Experiment, PlannedRun
from laminar_lab.launcher.plan import SEEN, Slot
from laminar_lab.launcher.room import has_room
from laminar_lab.launcher.standing import ENDED, RunState, Standing, in_turn, last_words, read_standing
from laminar_py.config import ConfigError
from laminar_py.ledger import HeldError, RunFolder

PLACES_TRIED = 2  # in which a run fails before that is its own fault


class Backlog:
    """Runs in their order; `places` are numbers of slots, `held` counts runs that other processes have now."""

    def __init__(self, runs: Iterable[PlannedRun], *, places: Collection[int], held: int = 0) -> None:
        self._waiting = list(runs)
        self._places = set(places)
        self._in_hand = held
        self._failed_in: defaultdict[str, set[int]] = defaultdict(set)  # places, by run

    @property
    def is_over(self) -> bool:
        """True once no run waits and no slot has a run."""
        return not self._in_hand and not self._waiting

    def release(self, run: PlannedRun) -> None:
        """Put a run that another process has left at the head of the queue."""
        self._in_hand -= 1
        self._waiting.insert(0, run)

    def take_run(self, place: int) -> PlannedRun | None:
        """Remove and return the next run for a place, or None. The caller then calls `ended` or `failed`."""
        run = next((run for run in self._waiting if place not in self._failed_in[run.name]), None)
        if run is not None:
            self._waiting.remove(run)
            self._in_hand += 1
        return run

    def ended(self) -> None:
        """Count a run out that has ended or was stopped."""
        self._in_hand -= 1

    def failed(self, run: PlannedRun, place: int) -> bool:
        """Count a run out that has used up its tries in a place. True if another place will try it."""
        self._in_hand -= 1
        tried = self._failed_in[run.name]
        tried.add(place)
        retry = len(tried) < min(PLACES_TRIED, len(self._places))
        if retry:
            self._waiting.insert(0, run)
        return retry


LOOK_S = 1.0  # between two looks at a lock that another process has
STOPPING_S = 300.0  # after which a run that a killed launcher left has stopped, or is one that somebody wants

Note = Callable[[PlannedRun, RunState, str], None]
"""Function that receives a run, its new state and the reason."""


async def wait_for_other_processes(experiment: Experiment, note: Note) -> None:
    """Wait until no process has any of the runs, at most `STOPPING_S`: runs of a killed launcher stop in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOPPING_S):
            for run in experiment.runs:
                await wait_until_free(run, note)


async def wait_until_free(run: PlannedRun, note: Note) -> None:
    """Wait until no other process has the run, and clear away what it never began.

    Raises `ConfigError` or `OSError` for a folder that cannot be written.
    """
    held = False
    while (folder := run.folder) is not None:
        try:
            folder.lock()
        except HeldError as error:
            held = True
            note(run, RunState.HELD, _describe_holder(folder, str(error)))
            await asyncio.sleep(LOOK_S)
            continue
        if folder.is_unbegun:  # perhaps without a whole config
            folder.reap()
            shutil.rmtree(folder.path)
        folder.unlock()
        break
    if held:
        note(run, RunState.WAITING, "")


def held_gpus(run: PlannedRun, gpus: Collection[str]) -> set[str]:
    """GPUs of these, named as in CUDA_VISIBLE_DEVICES, that a process which has the run may use.

    All where nothing says which; none where it runs on another host.
    """
    folder = run.folder
    if folder is None or not folder.is_led:
        return set()
    try:
        host, pid = folder.holder or (socket.gethostname(), 0)
        seen = psutil.Process(pid).environ().get(SEEN) if pid and host == socket.gethostname() else None
    except (OSError, psutil.Error):
        return set(gpus)
    if host != socket.gethostname():
        return set()
    names = None if seen is None else set(seen.split(","))
    comparable = names is not None and {name.isdigit() for name in names} == {name.isdigit() for name in gpus}
    return set(gpus) & names if names is not None and comparable else set(gpus)


def _describe_holder(folder: RunFolder, complaint: str) -> str:
    with contextlib.suppress(OSError):
        if (holder := folder.holder) is not None:
            return f"process {holder[1]} on {holder[0]} has it"
    return complaint


class RunProcess:
    """A running command, e.g. `RunProcess(["sleep", "1"], log=path, env={})`; `log` gets its output."""

    def __init__(self, command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> None:
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=env,
                start_new_session=True,  # Ctrl-C in the terminal is passed on by the queue, once
            )

    async def wait(self) -> int:
        """Exit code, negative for a signal, once it has ended."""
        if self._process.poll() is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            handle = os.pidfd_open(self._process.pid)
            loop.add_reader(handle, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(handle)
                os.close(handle)
        return self._process.wait()

    def interrupt(self) -> None:
        """Ask it to stop, unless it has just ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGINT)


PLACING_S = 300.0  # after which all processes of a run have their GPUs, or hang
MOST_DEATHS = 4  # in a row without a new step, after which a run has failed in its slot
BACK_OFF_S, GROWTH = 2.0, 8  # before the first retry, and from each to the next: a node may be away for minutes
STARTED = b"--- started by laminar launch\n"  # after which no earlier complaint counts
ROOM_LOOK_S = 30.0  # between two looks for room on a shared cluster
GOOD, REFUSED, STOPPED = 0, 2, 130  # exit codes of `laminar train`
UNWRITTEN = 1  # in place of one: it was not even started


class Queue:
    """Runs of an experiment that have not ended, and the slots that work them off."""

    def __init__(
        self, experiment: Experiment, slots: Sequence[Slot], *, train: Sequence[str], board: Board
    ) -> None:
        self._experiment = experiment
        self._slots = slots
        self._train = tuple(train)  # command before the arguments of a run
        self._board = board
        ahead = [one.run for one in in_turn(board.standings)]
        self._held = {run.name: run for run in ahead if run.folder is not None and run.folder.is_led}
        free = [run for run in ahead if run.name not in self._held]
        self._backlog = Backlog(free, places={slot.place for slot in slots}, held=len(self._held))
        self._changed = asyncio.Event()  # set, and replaced, when a slot has done with a run
        self._processes: dict[str, RunProcess] = {}
        self._stop = asyncio.Event()
        self._placing = asyncio.Lock()

    async def work(self) -> bool:
        """Run all runs until they have ended; False if a signal stopped them earlier."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupt)
        async with asyncio.TaskGroup() as group:
            view = group.create_task(self._board.watch(), name="board")
            for run in self._held.values():
                group.create_task(self._release(run), name=f"release {run.name}")
            slots = [group.create_task(self._fill(slot), name=f"slot {slot.index}") for slot in self._slots]
            await asyncio.wait(slots)
            view.cancel()
        return not self._stop.is_set()

    def _interrupt(self) -> None:
        """Pass a signal on: runs stop with a checkpoint at the first, and at once at a second."""
        self._stop.set()
        self._notify()
        for process in self._processes.values():
            process.interrupt()

    async def _release(self, run: PlannedRun) -> None:
        """Wait until another process leaves a run, then queue the run."""
        with contextlib.suppress(OSError, ConfigError):  # which its slot finds again, and tells as its failure
            await self._until_stopped(wait_until_free(run, self._board.note))
        del self._held[run.name]
        self._backlog.release(run)
        self._notify()

    async def _fill(self, slot: Slot) -> None:
        await self._wait_for_gpus(slot)
        while (run := await self._next(slot)) is not None:
            try:
                failed = not await self._bring_to_end(run, slot)
                standing = read_standing(run)
            except (OSError, ConfigError) as error:  # its files cannot be read or written; other runs go on
                failed, standing = True, Standing(run=run, state=RunState.FAILED, why=str(error))
            if not failed:
                self._backlog.ended()
            elif self._backlog.failed(run, slot.place):
                standing = replace(standing, state=RunState.WAITING, why=f"for another slot: {standing.why}")
            self._board.settle(standing)
            self._notify()

    async def _wait_for_gpus(self, slot: Slot) -> None:
        """Wait until no run that another process has holds GPUs of the slot."""
        gpus = slot.gpus or ()
        while not self._stop.is_set() and any(held_gpus(run, gpus) for run in self._held.values()):
            await self._changed.wait()

    async def _next(self, slot: Slot) -> PlannedRun | None:
        """Wait for the next run of a slot, e.g. one that fails in another slot; None once no run is left."""
        while not self._stop.is_set() and not self._backlog.is_over:
            run = self._backlog.take_run(slot.place)
            if run is not None:
                return run
            await self._changed.wait()
        return None

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _bring_to_end(self, run: PlannedRun, slot: Slot) -> bool:
        """Start a run again after each crash until it ends or a signal comes; False once its tries are used up."""
        deaths, step = 0, -1
        while (
            await self._until_stopped(wait_until_free(run, self._board.note))
            and (before := read_standing(run)).state is not RunState.FINISHED
        ):
            deaths, step = (deaths, step) if before.step <= step else (0, before.step)
            placed_ns = _placed_ns(run.folder)
            code = await self._run_once(run, slot)
            if code == GOOD or self._stop.is_set():
                return True
            if await self._wait_for_disk(run):
                continue
            if code == REFUSED and slot.gpus is not None:  # by its config, or by this place
                return False
            if slot.gpus is None and _placed_ns(run.folder) <= placed_ns and await self._wait_for_room(run):
                continue
            deaths += 1
            if deaths == MOST_DEATHS:
                return False
            pause_s = BACK_OFF_S * GROWTH ** (deaths - 1)
            self._board.note(run, RunState.RETRYING, f"in {pause_s:g} s: {last_words(run.log)}")
            await self._until_stopped(asyncio.sleep(pause_s))
        return True

    async def _wait_for_disk(self, run: PlannedRun) -> bool:
        """True where the folder of all runs could not be written, e.g. for want of room, and can be again."""
        waited = False
        while not self._stop.is_set() and (why := unwritable(run.config.runs)):
            waited = True
            self._board.note(run, RunState.RETRYING, f"when {run.config.runs} can be written: {why}")
            await self._until_stopped(asyncio.sleep(ROOM_LOOK_S))
        return waited

    async def _wait_for_room(self, run: PlannedRun) -> bool:
        """True where the shared cluster was away, or full, which is no fault of the run, and is so no more."""
        waited = False
        while not self._stop.is_set() and not await has_room(run.arguments):
            waited = True
            self._board.note(run, RunState.RETRYING, f"when the cluster has room: {last_words(run.log)}")
            await self._until_stopped(asyncio.sleep(ROOM_LOOK_S))
        return waited

    async def _until_stopped(self, work: Coroutine[object, object, None]) -> bool:
        """Do some work until it is done or a signal comes; False after a signal."""
        doing, stop = asyncio.create_task(work, name="work"), asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait([doing, stop], return_when=asyncio.FIRST_COMPLETED)
            if doing.done():
                doing.result()
        finally:
            doing.cancel()
            stop.cancel()
        return not self._stop.is_set()

    async def _run_once(self, run: PlannedRun, slot: Slot) -> int:
        """Exit code of one process of the run; on a shared cluster one start at a time, until its parts are up."""
        async with self._placing:
            if self._stop.is_set():
                return STOPPED
            try:
                process = self._processes[run.name] = self._start(run, slot)
            except OSError as error:
                if not unwritable(run.config.runs):
                    raise
                self._board.note(run, RunState.RETRYING, str(error))
                return UNWRITTEN
            self._board.note(run, RunState.RUNNING, slot.told)
            if slot.gpus is None:
                await self._wait_until_placed(run, process)
        code = await process.wait()
        del self._processes[run.name]
        if code != GOOD and not last_words(run.log) and not self._stop.is_set():
            with contextlib.suppress(OSError), run.log.open("a") as log:  # a full disk, which is waited for
                log.write(f"{ENDED}its process ended {describe_exit(code)}\n")
        return code

    def _start(self, run: PlannedRun, slot: Slot) -> RunProcess:
        resume = [] if run.folder is None else ["--resume"]
        guard = [*python("laminar_lab.launcher.guard"), str(os.getpid())]
        run.write()
        command = [*guard, *self._train, *run.arguments, *resume]
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(slot.gpus)} if slot.gpus else {}
        with run.log.open("ab") as log:
            log.write(STARTED)
        return RunProcess(command, log=run.log, env={**os.environ, **gpus})

    async def _wait_until_placed(self, run: PlannedRun, process: RunProcess) -> None:
        """Wait until all processes of a run have their GPUs, but no longer than that can take."""
        before, clock = _placed_ns(run.folder), asyncio.get_running_loop()
        latest = clock.time() + PLACING_S
        while _placed_ns(run.folder) <= before and clock.time() < latest:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await process.wait()
                    return


def unwritable(folder: Path) -> str:
    """Why a file of a page cannot be written in a folder, e.g. "No space left on device"; "" where it can."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            file.write(bytes(4096))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _placed_ns(folder: RunFolder | None) -> int:
    """Time at which all processes of a run had their GPUs, in ns; 0 before."""
    return folder.placed.stat().st_mtime_ns if folder is not None and folder.placed.is_file() else 0


def describe_exit(code: int) -> str:
    """Words on an exit code, e.g. "with exit code 1" or "by SIGKILL"."""
    return f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"


def python(module: str) -> list[str]:
    """Command that runs a module of this very package; what lies in the working directory hides no other."""
    return [sys.executable, "-P", "-m", module]
