"""How far each run of an experiment is, read from its folder and its log, and the time that runs still need.

The launcher, its table and the page call it. Nothing else stores the state of a run. Some values of `RunState` are
known to the launcher alone, e.g. that a run waits before a retry.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from pathlib import Path
from statistics import fmean

import msgspec

from laminar_lab.curves import Point, read_curves
from laminar_lab.launcher.experiment import Experiment, PlannedRun
from laminar_py.config import ConfigError, RunConfig, load_config
from laminar_py.ledger import RunFolder, read_last, read_tail
from laminar_py.observe import Summary
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


def seconds_left(standing: Standing, *, step_s: float | None) -> float | None:
    """Seconds of RL that a run has ahead, at `step_s` where it has no pace of its own; None where none is known.

    One that failed is tried again. Starts, warm starts and evaluations that stop the clock come on top.
    """
    if standing.state is RunState.FINISHED:
        return 0.0
    config, done_s = standing.run.config, 0.0 if standing.row is None else standing.row.rl_s
    pace = standing.step_s or step_s
    left = [] if pace is None else [pace * (config.steps - standing.step)]
    if config.max_rl_seconds is not None:
        left.append(config.max_rl_seconds - done_s)
    return max(0.0, min(left)) if left else None


def experiment_left(standings: Sequence[Standing], paces: dict[str, float], *, slots: int) -> float | None:
    """Seconds until all are done, side by side on so many slots; None where a pace is unknown."""
    free_s = [0.0] * max(1, slots)
    for one, slot in zip(in_turn(standings), assign_slots(standings, paces, slots=slots), strict=True):
        left = seconds_left(one, step_s=paces.get(one.run.variant))
        if left is None or slot is None:
            return None
        free_s[slot] += left
    return max(free_s)


def assign_slots(standings: Sequence[Standing], paces: dict[str, float], *, slots: int) -> list[int | None]:
    """Slot of each run of `in_turn`: the first that is free; None where times that are unknown decide that."""
    free_s, dealt = [0.0] * max(1, slots), list[int | None]()
    for one in in_turn(standings):
        left = seconds_left(one, step_s=paces.get(one.run.variant))
        soonest = min(free_s)
        dealt.append(free_s.index(soonest) if soonest < math.inf else None)
        if soonest < math.inf:
            free_s[free_s.index(soonest)] += math.inf if left is None else left
    return dealt


def known_paces(experiment: Experiment, standings: Sequence[Standing]) -> dict[str, float]:
    """Seconds of a step by variant: of its own runs, else of any of the experiment, else of others of the base."""
    own = {variant: list[float]() for variant in experiment.variants}
    for standing in standings:
        if standing.step_s is not None:
            own[standing.run.variant].append(standing.step_s)
    every = [step_s for paces in own.values() for step_s in paces] or base_paces(experiment.settings.base)
    found = {variant: paces or every for variant, paces in own.items()}
    return {variant: fmean(paces) for variant, paces in found.items() if paces}


def base_paces(base: Path) -> list[float]:
    """Seconds of a step of each run that was made of the base config alone and has finished."""
    try:
        config: RunConfig = load_config(base, [])
    except ConfigError:  # whole only with settings of the experiment
        return []
    summaries = (read_summary(RunFolder(path).summary) for path in config.runs.glob(f"{config.name}-[0-9]*"))
    return [one.rl_seconds / one.steps for one in summaries if one is not None and one.finished and one.steps]


def format_duration(seconds: float | None) -> str:
    """E.g. "3 h 20 min", "4 min", "50 s"; "unknown" for None."""
    if seconds is None:
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes >= 10 else f"{minutes} min {rest} s" if minutes else f"{rest} s"
