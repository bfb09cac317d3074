"""From a config to a finished run or evaluation: preflight, run folder, cluster, controller.

Called by the command line.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from rich.console import Console

from laminar_py.children.hosted import log_to
from laminar_py.config.loading import load_config
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import RunFolder, new_run
from laminar_py.observe.fleet import folder_bytes
from laminar_py.observe.live import View
from laminar_py.observe.summary import Summary
from laminar_py.records.host import SystemClock, counted
from laminar_py.runtime.cluster.backend import open_cluster
from laminar_py.runtime.cluster.errors import (
    RunFailedError,
    UnwritableError,
    bug_in,
    errors_in,
    unexpected_message,
    why_unwritable,
)
from laminar_py.runtime.orchestrator.controller import Controller, Result
from laminar_py.runtime.orchestrator.progress import named_if_slow
from laminar_py.runtime.orchestrator.resume import (
    describe_resume,
    print_fallback,
    refuse_other_draws,
    refuse_other_prompts,
    refuse_other_rows,
    refuse_simulated,
)
from laminar_py.runtime.orchestrator.signals import SIGNALS
from laminar_py.runtime.orchestrator.sources import (
    MODEL,
    EvalRequest,
    EvalSummary,
    begin_evaluation,
    clear_unbegun,
    find_open,
    read_source,
    settings_of,
)
from laminar_py.runtime.preflight.inputs import Inputs, check_inputs
from laminar_py.runtime.preflight.node_checks import delete_everywhere, place_parts
from laminar_py.runtime.workers.incarnation import RunStart

log = logging.getLogger(__name__)

CONTROLLER_LOG = "controller.log"
UNBOUNDED = (
    "staleness.max_staleness=null: nothing bounds staleness; set it to 4 to 8, or see in `laminar report` how much"
    " weight old data lose"
)
WHOLE_WARM_START = (
    "the warm start trains all weights; RL then trains adapters (learner.lora) on its result, and `laminar export`"
    " writes both as one model"
)


def launch(
    config: RunConfig, *, resume: RunFolder | None, overrides: Sequence[str] = (), console: Console
) -> Summary:
    """Start or resume a run; return its summary, unfinished after a signal. Raises ConfigError, RunFailedError.

    A resumed run records the `overrides` of its settings, which `config` has already.
    """
    if config.staleness.unbounded(config.schedule):
        console.print(UNBOUNDED, soft_wrap=True, highlight=False)
    if config.warm_start is not None and config.learner.lora is not None and resume is None:
        console.print(WHOLE_WARM_START, soft_wrap=True, highlight=False)
    what = f"{config.schedule}, {counted(config.steps, 'step')}, {counted(config.rollout.replicas, 'replica')}"
    view = View(console, clock=SystemClock(), steps=config.steps, max_rl_s=config.max_rl_seconds)
    make = partial(Controller, view=view)
    summary = lead(config, make, what=what, resume=resume, overrides=overrides, console=console)
    assert isinstance(summary, Summary), f"{summary} belongs to an evaluation"
    return summary


def evaluate(request: EvalRequest, *, console: Console) -> EvalSummary:
    """Start or resume an evaluation; return its summary, unfinished after a signal. Raises as `launch`."""
    settings = settings_of(request)
    if request.resume:
        return _evaluate(find_open(settings, request.source), resumed=True, console=console)
    clear_unbegun(settings)
    run = new_run(settings)
    run.lock()
    try:
        begin_evaluation(run, settings, request.source)
        return _evaluate(run, resumed=False, console=console)
    except (ConfigError, KeyboardInterrupt):
        if not run.has_ledger:  # delete the folder of an evaluation that could not begin
            shutil.rmtree(run.path)
        raise


def _evaluate(run: RunFolder, *, resumed: bool, console: Console) -> EvalSummary:
    """Run the evaluation whose config and source are in the folder `run`; return its summary."""
    source, config = read_source(run), load_config(run.config, [])
    assert source is not None, f"{run.path} has no source on disk"
    summary = lead(
        config,
        partial(Controller, view=View(console, clock=SystemClock(), steps=0), source=source),
        what=f"{', '.join(config.eval.sets)} of {source.path}, {counted(config.rollout.replicas, 'replica')}",
        resume=run if resumed else None,
        begun=None if resumed else run,
        console=console,
        trains=False,
    )
    assert isinstance(summary, EvalSummary), f"{summary} belongs to a training run"
    if summary.finished:
        shutil.rmtree(run.path / MODEL, ignore_errors=True)  # missing if a model folder was evaluated
    return summary


def lead(
    config: RunConfig,
    make: Callable[[RunStart], Controller],
    *,
    what: str,
    resume: RunFolder | None,
    overrides: Sequence[str] = (),
    console: Console,
    begun: RunFolder | None = None,
    trains: bool = True,
) -> Result:
    """Check the inputs, open the cluster, place the parts, and run the controller that `make` makes; its result.

    The console shows `what` runs. `begun` is a locked folder of a new run; without it, one is made after all parts
    have a place. A run that does not train (`trains`) reads no training data. Raises ConfigError, RunFailedError.
    """
    SIGNALS.enter("the checks of the config and its data")
    if resume and resume.has_ledger:
        refuse_other_draws(resume, config)
    with named_if_slow("checking the model, the data and the reward", console.print):
        inputs = check_inputs(config, trains=trains)
        if resume:
            _prepare_resume(resume, inputs, console)
    with open_cluster(config.cluster.address):
        SIGNALS.enter("the checks of the nodes")
        # a run that cannot be placed leaves no folder
        placement = asyncio.run(place_parts(config, resume=resume is not None))
        run = resume or begun or new_run(config)
        if run not in (resume, begun):
            run.lock()
        goes_on = f" {describe_resume(resume, config)}" if resume and trains else ""
        console.print(f"run {run.path}{goes_on}: {what}", soft_wrap=True)
        console.print(inputs.example, markup=False, soft_wrap=True, highlight=False)
        start = RunStart(
            config=config,
            run=run,
            placement=placement,
            inputs=inputs,
            resumed=resume is not None,
            overrides=tuple(overrides) if resume else (),  # a new run has them in its config already
        )
        ending = _lead_logged(start, make)
        SIGNALS.enter("its processes to end")
        if ending.finished:
            asyncio.run(delete_everywhere(placement, run.shm(config.relay.shm)))
    return ending


def _prepare_resume(run: RunFolder, inputs: Inputs, console: Console) -> None:
    """Lock the folder of a run to resume; compare its record with the inputs and its checkpoints."""
    run.lock()
    if run.has_ledger:
        refuse_simulated(run)
        refuse_other_rows(run, inputs.digests)
        refuse_other_prompts(run, inputs)
        print_fallback(run, console)  # also refuses a run without a usable checkpoint, before any part starts


def _lead_logged(start: RunStart, make: Callable[[RunStart], Controller]) -> Result:
    """Run the controller that `make` returns, with a log in the run's folder; return its result."""
    run = start.run
    logging.raiseExceptions = False  # else a full disk prints an error for each line of the log
    log_to(run.logs / CONTROLLER_LOG)
    try:
        return asyncio.run(_lead(make(start), run))
    except Exception as error:
        bug, errors = bug_in(error), list(errors_in(error))
        unwritten = next(filter(None, (_why_unwritten(error, run) for error in errors)), None)
        if unwritten is not None:
            log.critical("the run ends", exc_info=error)
            raise RunFailedError(_unwritable_message(run, unwritten)) from None
        known = next((error for error in errors if isinstance(error, (RunFailedError, ConfigError))), None)
        if bug is None and known is not None:
            raise known from None
        log.critical("the run ends", exc_info=error)
        raise RunFailedError(unexpected_message(bug or errors[0], run.logs / CONTROLLER_LOG)) from None


def _why_unwritten(error: BaseException, run: RunFolder) -> str | None:
    """Return the reason if `error` means that the run folder cannot be written; None for other errors."""
    if isinstance(error, UnwritableError):
        return str(error)
    if isinstance(error, PermissionError) and error.filename and run.path in Path(error.filename).parents:
        return str(error)
    return why_unwritable(error)


def _unwritable_message(run: RunFolder, reason: str) -> str:
    """Return a message about a run folder that cannot be written: the reason, and the space it needs."""
    free = shutil.disk_usage(run.path).free / 2**20
    saved = [folder_bytes(folder) / 2**20 for folder in run.checkpoints.glob("*/")]
    checkpoint = f"{max(saved):,.0f} MiB for each checkpoint" if saved else "room for checkpoints"
    return (
        f"{run.path}: cannot be written ({reason}); {free:,.0f} MiB are free there, and it needs"
        f" {checkpoint} beside a ledger that grows; make room or make it writable, and continue with --resume"
    )


async def _lead(controller: Controller, run: RunFolder) -> Result:
    """Run the controller to its end, or to a stop after a signal; close its view and return its result."""
    at_once = f"{run.path} was stopped at once; continue with --resume"
    loop = asyncio.get_running_loop()
    interrupt = partial(loop.call_soon_threadsafe, controller.interrupt)
    with closing(controller.view) as view, SIGNALS.heeded(interrupt, view.notice, at_once):
        return await controller.lead()
