"""How far each run is, read from its folder and its log; nothing else stores the state of a run.

The loop reads progress before and after each process of a run; `--dry-run` and `--report` read it too.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import isnan
from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text

from laminar_lab.curves import Point, read_curves
from laminar_lab.launcher.experiment import Experiment, PlannedRun
from laminar_py.config import ConfigError
from laminar_py.ledger import read_last, read_tail
from laminar_py.records import StepRow
from laminar_py.records.host import visible

PREFIX = "laminar: "  # starts the last line of a command that failed
STOPPED_LINE = re.compile(r"stopped\b|ended at once\b|.* was stopped at once\b")  # such a line is no failure
QUIET_S = 300.0  # without a step, after which a line of progress mentions it


class RunState(StrEnum):
    """State of a run: WAITING -> RUNNING -> FINISHED, FAILED or UNFINISHED; a launch runs the last two again."""

    WAITING = "waiting"  # no folder yet
    RUNNING = "running"  # the launcher's own lines alone have this state; on disk the run is unfinished
    UNFINISHED = "unfinished"  # stopped or killed, or its launcher still runs it
    FAILED = "failed"  # its last process ended with an error
    FINISHED = "finished"  # it has done all of its steps


STYLES = {RunState.FINISHED: "green", RunState.FAILED: "red"}


class RunSummary(msgspec.Struct, frozen=True):
    """The part of a run's `summary.json` that the launcher reads; summaries of every release have it."""

    finished: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """State of a run at one moment, e.g. `RunProgress(run=run, state=RunState.WAITING)`."""

    run: PlannedRun
    state: RunState
    reason: str = ""  # of the failure
    row: StepRow | None = None  # the newest step
    stepped_s: float | None = None  # when the row was written, in seconds since the epoch

    @property
    def step(self) -> int:
        """Number of steps so far."""
        return 0 if self.row is None else self.row.step


def read_progress(run: PlannedRun) -> RunProgress:
    """Read the progress of a run from its files; a run with unreadable files has failed."""
    try:
        reason, folder = last_error(run.log), run.folder
        if folder is None:
            return RunProgress(run=run, state=RunState.FAILED if reason else RunState.WAITING, reason=reason)
        summary = _read_summary(folder.summary)
        if summary.finished:
            state, reason = RunState.FINISHED, ""
        else:
            state = RunState.FAILED if reason else RunState.UNFINISHED
        row = read_last(folder.metrics, StepRow)
        return RunProgress(
            run=run,
            state=state,
            reason=reason,
            row=row,
            stepped_s=None if row is None else folder.metrics.stat().st_mtime,
        )
    except OSError as error:
        return RunProgress(run=run, state=RunState.FAILED, reason=str(error))


def read_all_progress(experiment: Experiment) -> list[RunProgress]:
    """Read the progress of every run, in the order of the experiment."""
    return [read_progress(run) for run in experiment.runs]


def unfinished_runs(experiment: Experiment) -> list[PlannedRun]:
    """Return the runs that a launch has to run, begun runs first."""
    ahead = [entry.run for entry in read_all_progress(experiment) if entry.state is not RunState.FINISHED]
    return sorted(ahead, key=lambda run: run.folder is None)


def _read_summary(path: Path) -> RunSummary:
    """Read the summary of a run; a missing or unreadable summary means that the run has not finished."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunSummary)
    except (FileNotFoundError, msgspec.MsgspecError):
        return RunSummary(finished=False)


def last_error(log: Path) -> str:
    """Return the error with which the newest process of a run ended; "" without an error."""
    lines = [line.strip() for line in read_tail(log) if line.strip()]
    last = lines[-1].decode(errors="replace") if lines else ""
    error = last.removeprefix(PREFIX)
    return "" if error == last or STOPPED_LINE.match(error) else error


def progress_table(experiment: Experiment, progress: Sequence[RunProgress]) -> Table:
    """Make a table with the state and the newest figures of each run. Text of runs is no markup."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("run", overflow="fold")
    table.add_column("state", no_wrap=True)
    for name in ("step", "reward", experiment.compared, "tokens/s", "staleness"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for entry in progress:
        name = entry.run.name.removeprefix(f"{experiment.settings.name}-")
        figures = _figures(entry, experiment.compared).values()
        cells = (Text(name), Text(entry.state), *map(Text, figures), Text(visible(entry.reason)))
        table.add_row(*cells, style=STYLES.get(entry.state))
    return table


def describe_progress(progress: RunProgress, compared: str) -> str:
    """Describe a run in one line, e.g. "running; step 5/10; reward 0.500; no step for 12 min"."""
    figures = [f"{name} {text}" for name, text in _figures(progress, compared).items() if text]
    quiet_s = time.time() - (progress.stepped_s or time.time())
    if progress.state is RunState.RUNNING and quiet_s > QUIET_S:
        figures.append(f"no step for {quiet_s / 60:.0f} min")
    return "; ".join(filter(None, (progress.state, *figures, progress.reason)))


def _figures(progress: RunProgress, compared: str) -> dict[str, str]:
    """Return the newest figures of a run by name; "" for a figure that the run does not have yet."""
    row, steps = progress.row, f"{progress.step}/{progress.run.config.steps}"
    points = [] if row is None else read_evaluations_of(progress.run).get(compared, [])
    return {
        "step": steps,
        "reward": "" if row is None or isnan(row.reward) else f"{row.reward:.3f}",
        compared: figures.mean.describe() if points and (figures := points[-1].figures) else "",
        "tokens/s": f"{row.trained_tokens / row.rl_s:,.0f}" if row is not None and row.rl_s else "",
        "staleness": f"{row.staleness_mean:.1f}" if row is not None and row.trajectories else "",
    }


def read_evaluations_of(run: PlannedRun) -> dict[str, list[Point]]:
    """Read the evaluations of a run by set; none before the first, or if the ledger cannot be read."""
    folder = run.folder
    try:
        return {} if folder is None or not folder.has_ledger else read_curves(folder.path)
    except (ConfigError, OSError):
        return {}
