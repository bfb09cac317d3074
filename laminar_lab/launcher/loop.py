"""The loop of `laminar launch`: each slot runs one `laminar train` process at a time until no run is left.

Run folders keep the state of every run, so a later launcher continues where this launcher ended. The lock of a run
folder allows one process per run. A run's process stops when its launcher is killed (`guard`).
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from laminar_lab.doctor.memory import COMMAND_TIMEOUT_S
from laminar_lab.launcher.experiment import Experiment, PlannedRun
from laminar_lab.launcher.progress import (
    PREFIX,
    RunState,
    describe_progress,
    last_error,
    read_progress,
    unfinished_runs,
)
from laminar_py.config import ConfigError
from laminar_py.records.host import counted
from laminar_py.runtime.preflight import check_inputs, check_shared_memory

VISIBLE = "CUDA_VISIBLE_DEVICES"
LOOK_S = 1.0  # between two looks at a lock
STOPPING_S = 300.0  # that a run of a killed launcher may take for its last checkpoint
LINE_EVERY_S = 60.0  # between two progress lines for a running run
MOST_CRASHES = 4  # in a row without a new step, after which a run has failed
BACK_OFF_S, GROWTH = 2.0, 8  # pause after the first crash, and its growth: a node may be away for minutes
STARTED = b"--- started by laminar launch\n"  # separates the logs of a run's processes
FINISHED, REFUSED, STOPPED = 0, 2, 130  # exit codes of `laminar train`


Slot = tuple[str, ...]
"""GPUs for one run at a time, as in CUDA_VISIBLE_DEVICES; none if runs need no GPU or join a cluster."""


def make_slots(experiment: Experiment) -> list[Slot]:
    """Make a slot for each run that can run at the same time. Raises `ConfigError` if GPUs are missing."""
    configs = [run.config for run in experiment.runs]
    shared = any(config.cluster.address or config.rollout.engine.hosts for config in configs)
    local = [config for config in configs if config.cluster.address is None]
    each = max((config.gpus for config in local), default=0)
    gpus = visible_gpus() if each else []
    if each > len(gpus):
        raise ConfigError(
            f"{VISIBLE}={','.join(gpus)}: a run needs {counted(each, 'GPU')}, and this host shows {len(gpus)};"
            " show more, or lower learner.world_size or rollout.replicas"
        )
    room = 1 if shared else len(gpus) // each if each else len(configs)
    wanted = experiment.settings.parallel
    if wanted is not None and wanted > room and (shared or each):
        limit = "runs would share one Ray cluster or server (cluster.address, rollout.engine.urls)"
        limit = limit if shared else f"there is room for {room} at a time, each with {counted(each, 'GPU')}"
        raise ConfigError(f"parallel={wanted}: {limit}; lower it to {room}, or leave it out")
    count = min(wanted or (room if each else 1), len(configs))
    return [tuple(gpus[index * each : (index + 1) * each]) for index in range(count)]


def visible_gpus() -> list[str]:
    """Return the GPUs that processes of this host see, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get(VISIBLE)
    if chosen is not None:
        return [name for name in chosen.split(",") if name and name != "-1"]
    command = ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=True
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []


def check_variants(experiment: Experiment, *, slots: int) -> list[str]:
    """Check the model, data, reward and engine of each variant with unfinished runs, and make missing data.

    Seeds share all of these. Returns the scripts of `data.prepare`. Raises `ConfigError`.
    """
    ahead = unfinished_runs(experiment)
    first = {run.variant: run for run in reversed(ahead)}
    for variant, run in first.items():
        try:
            check_inputs(run.config)
            if run.config.cluster.address is None:
                check_shared_memory(run.config, runs=min(slots, len(ahead)))
        except ConfigError as error:
            raise ConfigError(f"variant {variant}: {error}") from None
    scripts = (run.config.data.prepare for run in first.values())
    return list(dict.fromkeys(str(script) for script in scripts if script is not None))


def wait_for_earlier_runs(experiment: Experiment, log: Callable[[str], None]) -> None:
    """Wait until no other process has a run of the experiment, at most `STOPPING_S`.

    Runs of a killed launcher need time for their last checkpoint, and hold their GPUs and ports until then.
    """
    latest = time.monotonic() + STOPPING_S
    for run in experiment.runs:
        if (holder := describe_holder(run)) and time.monotonic() < latest:
            log(f"{run.name}: waiting; {holder}")
        while describe_holder(run) and time.monotonic() < latest:
            time.sleep(LOOK_S)


def describe_holder(run: PlannedRun) -> str:
    """Describe the process that has a run, e.g. "process 12 on node-a has it"; "" if no process has the run."""
    folder = run.folder
    if folder is None or not folder.is_locked:
        return ""
    host, pid = folder.holder or ("this host", "unknown")
    return f"process {pid} on {host} has it"


def module_command(module: str) -> list[str]:
    """Return the command that runs a module; modules in the working directory do not hide it."""
    return [sys.executable, "-P", "-m", module]


class Launcher:
    """The unfinished runs of an experiment and the slots that run them."""

    def __init__(
        self, experiment: Experiment, slots: Sequence[Slot], *, train: Sequence[str], log: Callable[[str], None]
    ) -> None:
        self._experiment = experiment
        self._slots = slots
        self._train = tuple(train)  # command before the arguments of a run
        self._log = log
        self._waiting = unfinished_runs(experiment)
        self._processes: dict[str, asyncio.subprocess.Process] = {}  # by run
        self._stop = asyncio.Event()  # a signal came

    async def run_all(self) -> bool:
        """Run all unfinished runs; return False if a signal stopped them earlier."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        async with asyncio.TaskGroup() as group:
            lines = group.create_task(self._log_progress(), name="progress")
            await asyncio.wait([group.create_task(self._work_off(slot)) for slot in self._slots])
            lines.cancel()
        return not self._stop.is_set()

    def _interrupt(self) -> None:
        """Pass a signal on: runs stop with a checkpoint at the first signal, and at once at the second."""
        self._stop.set()
        for process in self._processes.values():
            _stop_process(process)

    async def _work_off(self, slot: Slot) -> None:
        """Run waiting runs one after another, until none is left or a signal comes."""
        while self._waiting and not self._stop.is_set():
            run = self._waiting.pop(0)
            try:
                await self._run_to_end(run, slot)
                line = describe_progress(read_progress(run), self._experiment.compared)
            except (OSError, ConfigError) as error:  # files of this run cannot be read or written
                line = f"{RunState.FAILED}; {error}"
            self._log(f"{run.name}: {line}")

    async def _run_to_end(self, run: PlannedRun, slot: Slot) -> None:
        """Start a run again after each crash, until it finishes, fails, or a signal comes."""
        if holder := describe_holder(run):
            raise ConfigError(f"{holder}; end that process, and launch again")
        crashes, step = 0, -1
        while crashes < MOST_CRASHES and not self._stop.is_set():
            if read_progress(run).state is RunState.FINISHED:
                return
            code = await self._run_once(run, slot)
            on_cluster = run.config.cluster.address is not None  # a refusal may mean that others use its GPUs
            if code == FINISHED or self._stop.is_set() or (code == REFUSED and not on_cluster):
                return
            done = read_progress(run).step
            crashes, step = (1, done) if done > step else (crashes + 1, step)
            if crashes < MOST_CRASHES:
                pause_s = BACK_OFF_S * GROWTH ** (crashes - 1)
                self._log(f"{run.name}: crashed; next try in {pause_s:g} s: {last_error(run.log)}")
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._stop.wait()

    async def _run_once(self, run: PlannedRun, slot: Slot) -> int:
        """Run one process of a run to its end and return its exit code, negative for a signal."""
        run.write_config()
        resume = [] if run.folder is None or run.folder.is_unbegun else ["--resume"]
        guard = [*module_command("laminar_lab.launcher.guard"), str(os.getpid())]
        environment = os.environ | ({VISIBLE: ",".join(slot)} if slot else {})
        with run.log.open("ab") as log:
            log.write(STARTED)
            log.flush()
            process = await asyncio.create_subprocess_exec(
                *(*guard, *self._train, *run.arguments, *resume),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # `_interrupt` passes Ctrl-C of the terminal on, once
            )
        self._processes[run.name] = process
        if self._stop.is_set():  # the signal came during the start
            _stop_process(process)
        where = f" (GPU {','.join(slot)})" if slot else ""
        self._log(f"{run.name}: {RunState.RUNNING}{where}")
        code = await process.wait()
        del self._processes[run.name]
        if code != FINISHED and not last_error(run.log) and not self._stop.is_set():
            ending = f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
            with run.log.open("a") as log:
                log.write(f"{PREFIX}its process ended {ending}\n")
        return code

    async def _log_progress(self) -> None:
        """Log a line for each running run every `LINE_EVERY_S`, until cancelled."""
        while True:
            await asyncio.sleep(LINE_EVERY_S)
            for run in [run for run in self._experiment.runs if run.name in self._processes]:
                progress = replace(read_progress(run), state=RunState.RUNNING)
                self._log(f"{run.name}: {describe_progress(progress, self._experiment.compared)}")


def _stop_process(process: asyncio.subprocess.Process) -> None:
    """Send SIGINT to a process, unless it has just ended."""
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
