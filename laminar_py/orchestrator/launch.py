"""From a config to a finished run: preflight, run folder, cluster, controller, signals. Called by the CLI."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType

import psutil
from rich.console import Console

from laminar_py.cluster.errors import (
    RunFailedError,
    UnwritableError,
    bug_in,
    errors_in,
    tell_unexpected,
    unwritable,
)
from laminar_py.cluster.placement import Placement
from laminar_py.cluster.ray_cluster import open_cluster
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import RunFolder, new_run
from laminar_py.orchestrator.checkpoints import find_checkpoint, on_record
from laminar_py.orchestrator.controller import Controller
from laminar_py.preflight.inputs import Inputs, check
from laminar_py.preflight.survey import clear, place
from laminar_py.telemetry.memory import folder_bytes
from laminar_py.telemetry.summary import Summary
from laminar_py.telemetry.view import make_view

log = logging.getLogger(__name__)

CONTROLLER_LOG = "controller.log"
ENDED_AT_ONCE = b"laminar: ended at once, as asked three times; go on with --resume\n"
SHOW_CURSOR = b"\x1b[?25h"  # the view had hidden it
UNBOUNDED = (
    "staleness.max_staleness=null: nothing bounds staleness; set it to 4 to 8, or see in `laminar report` how much"
    " of the weight of old data is gone"
)


class RunInterruptedError(Exception):
    """The run was stopped by a signal, with a checkpoint to go on from."""

    def __init__(self, summary: Summary) -> None:
        super().__init__(f"{summary.run} stopped at step {summary.steps}")
        self.summary = summary


def launch(config: RunConfig, *, resume: RunFolder | None, console: Console) -> Summary:
    """Start a run, or go on with one. Raises ConfigError, RunFailedError or RunInterruptedError."""
    inputs = check(config)
    if resume:
        resume.lock()
        reaped = resume.reap()
        if resume.ledger.is_file():
            tell_fallback(resume, console)  # better refused now than when all parts are up
        if reaped:
            console.print(f"ended {reaped} processes that a killed run had left")
    with open_cluster(config.cluster.address):
        # what cannot be placed leaves no run behind
        placement = asyncio.run(place(config, resume=resume is not None))
        run = resume or new_run(config)
        if not resume:
            run.lock()
        summary = _run(config, run, placement=placement, inputs=inputs, resume=resume is not None, console=console)
        if summary.finished:
            asyncio.run(clear(placement, run.shm(config.relay.shm)))
    if not summary.finished:
        raise RunInterruptedError(summary)
    return summary


def tell_fallback(run: RunFolder, console: Console) -> None:
    """Say so if the newest checkpoint of a run to resume is gone, and which one is taken.

    Raises `ConfigError` if that one cannot be, or if there is none any more.
    """
    found = find_checkpoint(run)
    if found is not None and (newest := on_record(run)[0]) != found:
        console.print(
            f"{newest.path} is gone: the run goes back to step {found.step}, {found.path}",
            soft_wrap=True,
            highlight=False,
        )


def _run(
    config: RunConfig, run: RunFolder, *, placement: Placement, inputs: Inputs, resume: bool, console: Console
) -> Summary:
    logging.raiseExceptions = False  # a full disk is told in one line, and not for each line of a log
    logging.basicConfig(
        filename=run.logs / CONTROLLER_LOG,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    console.print(f"run {run.path}: {config.schedule}, {config.steps} steps, {config.rollout.replicas} replicas")
    if config.staleness.unbounded(config.schedule):
        console.print(UNBOUNDED, soft_wrap=True, highlight=False)
    view = make_view(console, steps=config.steps, max_rl_s=config.max_rl_seconds)
    try:
        controller = Controller(config, run, placement=placement, inputs=inputs, view=view, resume=resume)
        return asyncio.run(_lead(controller))
    except asyncio.CancelledError:
        raise RunFailedError(f"{run.path} was stopped at once; go on with --resume") from None
    except Exception as error:
        bug, errors = bug_in(error), list(errors_in(error))
        unwritten = next(filter(None, (_why_unwritten(one, run) for one in errors)), None)
        if unwritten is not None:
            log.critical("the run ends", exc_info=error)
            raise RunFailedError(_needs(run, unwritten)) from None
        told = next((one for one in errors if isinstance(one, (RunFailedError, ConfigError))), None)
        if bug is None and told is not None:
            raise told from None
        log.critical("the run ends", exc_info=error)
        raise RunFailedError(tell_unexpected(bug or errors[0], run.logs / CONTROLLER_LOG)) from None
    finally:
        view.close()


def _why_unwritten(error: BaseException, run: RunFolder) -> str | None:
    """Reason why the run folder could not be written; None for another error."""
    if isinstance(error, UnwritableError):
        return str(error)
    if isinstance(error, PermissionError) and error.filename and run.path in Path(error.filename).parents:
        return str(error)
    return unwritable(error)


def _needs(run: RunFolder, reason: str) -> str:
    """Line on a run folder that could not be written: why, and what it needs."""
    free = shutil.disk_usage(run.path).free / 2**20
    saved = [folder_bytes(folder) / 2**20 for folder in run.checkpoints.glob("*/")]
    checkpoint = f"{max(saved):,.0f} MiB for each checkpoint" if saved else "room for checkpoints"
    return (
        f"{run.path}: cannot be written ({reason}); {free:,.0f} MiB are free there, and it needs {checkpoint}"
        " beside a ledger that grows; make room or make it writable, and go on with --resume"
    )


async def _lead(controller: Controller) -> Summary:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked == 1:
            controller.interrupt()
        else:
            task.cancel()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
                signal.signal(number, _end_at_once)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    return await controller.lead()


def _end_at_once(number: int, frame: FrameType | None) -> None:
    """Leave as a kill would, with all processes below this one; the record stands."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    os.write(sys.stderr.fileno(), (SHOW_CURSOR if sys.stderr.isatty() else b"") + ENDED_AT_ONCE)
    os._exit(128 + number)
