"""How far each run of an experiment is, as its folder and its log tell: nothing else keeps a state.

Read by the launcher, while runs go on, by its table and by the page. What only the launcher knows, e.g. that it
waits before a retry, lies in `RunState` values that no folder tells.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

import msgspec

from laminar_lab.launcher.experiment import Experiment, PlannedRun
from laminar_py.config import ConfigError
from laminar_py.ledger import read_last, read_tail
from laminar_py.observe import Point, Summary, read_curves
from laminar_py.records import StepRow

ENDED = "laminar: "  # begins the line with which a command that failed ends
ASKED = re.compile(r"stopped\b|ended at once\b|.* was stopped at once\b")  # such a line tells of Ctrl-C


class RunState(StrEnum):
    """State of a run: WAITING -> RUNNING -> FINISHED, or FAILED, or UNFINISHED; RETRYING -> RUNNING after a death.

    From folders follow WAITING, UNFINISHED (begun, not ended), FAILED and FINISHED; others are the launcher's.
    """

    WAITING = "waiting"
    HELD = "held"  # another process still has it, e.g. one that a killed launcher left to stop
    RUNNING = "running"
    RETRYING = "retrying"
    UNFINISHED = "unfinished"
    FAILED = "failed"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A run at some moment, e.g. `Standing(run=run, state=RunState.WAITING)`."""

    run: PlannedRun
    state: RunState
    why: str = ""  # it failed, or is tried again
    row: StepRow | None = None  # the newest step
    stepped_s: float | None = None  # when that was written, in seconds since the epoch
    summary: Summary | None = None  # once it has ended or stopped

    @property
    def step(self) -> int:
        """Steps done."""
        return 0 if self.row is None else self.row.step

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step; None before the first."""
        return None if self.row is None else self.row.rl_s / self.row.step

    @property
    def evaluations(self) -> dict[str, list[Point]]:
        """Evaluations by set; none before the first, or where its record cannot be read."""
        return self._read[0]

    @property
    def unreadable(self) -> str:
        """Complaint about its record; "" where it can be read."""
        return self._read[1]

    @property
    def _read(self) -> tuple[dict[str, list[Point]], str]:
        folder = self.run.folder
        if folder is None or not folder.has_ledger:
            return {}, ""
        return _evaluations(folder.path, self.step, self.state is RunState.FINISHED)


@lru_cache(maxsize=4096)
def _evaluations(run: Path, step: int, finished: bool) -> tuple[dict[str, list[Point]], str]:
    """Evaluations, or why there are none; read again when the run has moved on, not for each look at a table."""
    try:
        return read_curves(run), ""
    except (ConfigError, OSError) as error:
        return {}, str(error)


def read_standing(run: PlannedRun) -> Standing:
    """Standing of a run by what is on disk; one whose files cannot be read has failed."""
    try:
        return _read_standing(run)
    except OSError as error:
        return Standing(run=run, state=RunState.FAILED, why=str(error))


def _read_standing(run: PlannedRun) -> Standing:
    folder = run.folder
    if folder is None:
        why = last_words(run.log)
        return Standing(run=run, state=RunState.FAILED if why else RunState.WAITING, why=why)
    summary, row = read_summary(folder.summary), read_last(folder.metrics, StepRow)
    why = "" if (finished := has_finished(folder.summary)) else last_words(run.log)
    state = RunState.FINISHED if finished else RunState.FAILED if why else RunState.UNFINISHED
    stepped_s = folder.metrics.stat().st_mtime if row is not None else None
    return Standing(run=run, state=state, why=why, row=row, stepped_s=stepped_s, summary=summary)


def read_standings(experiment: Experiment) -> list[Standing]:
    """Standings of all runs, in the order of the experiment."""
    return [read_standing(run) for run in experiment.runs]


def in_turn(standings: Sequence[Standing]) -> list[Standing]:
    """Runs that have not finished, in the order in which they get slots: begun ones go first."""
    ahead = [one for one in standings if one.state is not RunState.FINISHED]
    return sorted(ahead, key=lambda one: one.run.folder is None)


class FinishedFlag(msgspec.Struct, frozen=True):
    """Field of a summary that every release writes, whatever else it says."""

    finished: bool


def has_finished(summary: Path) -> bool:
    """True for a run that has done all of its steps."""
    try:
        return msgspec.json.decode(summary.read_bytes(), type=FinishedFlag).finished
    except (FileNotFoundError, msgspec.MsgspecError):
        return False


def read_summary(path: Path) -> Summary | None:
    """Summary of a run that has ended or was stopped; None without one, or with one of another release."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None


def last_words(log: Path) -> str:
    """Complaint with which the newest process of a run ended; "" where it had none."""
    lines = [line.strip() for line in read_tail(log) if line.strip()]
    last = lines[-1].decode(errors="replace") if lines else ""
    words = last.removeprefix(ENDED)
    return "" if words == last or ASKED.match(words) else words
