"""Figures of an experiment for its page: curves by variant, and the costs of each run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import msgspec
import numpy as np

from laminar_lab.curves import Costs, Point, count_devices, device_seconds, read_costs, read_curves, reward_curve
from laminar_lab.launcher.experiment import Experiment, PlannedRun, find_difference
from laminar_lab.launcher.progress import RunProgress, RunState
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import read_snapshot, read_steps
from laminar_lab.report.tails import Measure
from laminar_py.config import ConfigError
from laminar_py.observe import LengthFigures
from laminar_py.records import StepRow

MOST_POINTS = 400  # of a curve
HOUR_S = 3600.0

Line = tuple[Sequence[float], Sequence[float]]
"""Ascending places and the values of one seed there."""


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """Curve of a variant: mean, lowest and highest seed at each place.

    E.g. `Band(name="lr-0.001", x=[0, 5], mean=[0.1, 0.4], low=[0.1, 0.3], high=[0.1, 0.5], seeds=3)`.
    """

    name: str
    x: list[float]  # [P]
    mean: list[float]  # [P]
    low: list[float]  # [P]
    high: list[float]  # [P]
    seeds: int  # in every point


def make_band(name: str, lines: Sequence[Line]) -> Band:
    """Combine the lines of seeds at every place that some seed has, with linear interpolation.

    The band covers the places that all seeds reach, since a mean over fewer seeds would jump.
    """
    known = [line for line in map(finite, lines) if line[0]]
    assert all(a <= b for x, _ in known for a, b in pairwise(x)), f"{name}: places are not in order"
    if not known:
        return Band(name=name, x=[], mean=[], low=[], high=[], seeds=0)
    first, last = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    places = np.unique(np.concatenate([np.asarray(x, np.float64) for x, _ in known]))
    places = places[(places >= first) & (places <= last)]
    if len(places) > MOST_POINTS:
        places = places[np.linspace(0, len(places) - 1, MOST_POINTS).round().astype(int)]
    values = np.array([np.interp(places, x, y) for x, y in known])
    return Band(
        name=name,
        x=places.tolist(),
        mean=values.mean(axis=0).tolist(),
        low=values.min(axis=0).tolist(),
        high=values.max(axis=0).tolist(),
        seeds=len(known),
    )


def finite(line: Line) -> Line:
    """Return the points of a line that are finite numbers."""
    kept = [(x, y) for x, y in zip(*line, strict=True) if np.isfinite(x) and np.isfinite(y)]
    return [x for x, _ in kept], [y for _, y in kept]


def value_at(line: Line, place: float) -> float | None:
    """Interpolate a line at a place; None beyond the line's ends."""
    x, y = finite(line)
    return float(np.interp(place, x, y)) if x and x[0] <= place <= x[-1] else None


def trained_per_s(row: StepRow) -> float:
    """Return trained tokens per second of the RL phase so far."""
    return row.trained_tokens / row.rl_s if row.rl_s else 0.0


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Figures of a begun run, as `read_result` reads them."""

    run: PlannedRun
    state: RunState
    steps: tuple[StepRow, ...]
    evaluations: dict[str, list[Point]]  # by set
    costs: Costs  # of the RL phase so far
    lengths: LengthFigures | None  # of responses; None before the first

    @property
    def last(self) -> StepRow | None:
        """Row of the last step."""
        return self.steps[-1] if self.steps else None

    @property
    def is_finished(self) -> bool:
        """Whether the run has done all of its steps."""
        return self.state is RunState.FINISHED

    @property
    def device_hours(self) -> float:
        """Hours of the RL phase times the run's devices."""
        return device_seconds(self.run.config, self.costs.sizes, self.costs.rl_s) / HOUR_S

    @property
    def core_hours(self) -> float | None:
        """CPU hours of the run's processes in the RL phase; None on a cluster, where rows lack other nodes."""
        return None if self.run.config.cluster.address else self.costs.core_s / HOUR_S

    @property
    def reward(self) -> Line:
        """Reward by step; each value is a mean over the last `REWARD_STEPS` steps."""
        found = reward_curve(self.run.config, self.steps)
        return [float(point.step) for point in found], [point.value for point in found]

    def over_steps(self, value: Callable[[StepRow], float]) -> Line:
        """Return a figure of the step rows, by step."""
        return [float(row.step) for row in self.steps], [value(row) for row in self.steps]

    def evaluated(self, name: str, place: Callable[[Point], float]) -> Line:
        """Return the results on an evaluation set, by steps or by costs."""
        points = self.evaluations.get(name, [])
        return [place(point) for point in points], [point.value for point in points]


def read_result(progress: RunProgress) -> RunResult:
    """Read the figures of a begun run.

    Raises `ConfigError` or `OSError` for unreadable files, and for a run that was made with other settings.
    """
    run, folder = progress.run, progress.run.folder
    assert folder is not None, f"{run.name} was not begun"
    evaluations = read_curves(folder.path) if folder.has_ledger else {}
    if difference := find_difference(run, folder):
        raise ConfigError(difference)
    lengths = progress.lengths
    if lengths is None and folder.has_ledger:
        found = RunReport(read_snapshot(folder.path)).tails.get(Measure.LENGTH)
        lengths = None if found is None else LengthFigures(round(found.p50), round(found.p95), round(found.p99))
    return RunResult(
        run=run,
        state=progress.state,
        steps=read_steps(folder.path),
        evaluations=evaluations,
        costs=read_costs(folder.path),
        lengths=lengths,
    )


class Results:
    """Figures of all begun runs by variant; `left_out` has the other begun runs by name, with the reason."""

    def __init__(self, experiment: Experiment, progress: Sequence[RunProgress]) -> None:
        self.experiment = experiment
        self.by_variant: dict[str, list[RunResult]] = {name: [] for name in experiment.variants}
        self.left_out: dict[str, str] = {}
        for entry in progress:
            if entry.run.folder is not None:
                try:
                    self.by_variant[entry.run.variant].append(read_result(entry))
                except (ConfigError, OSError) as error:
                    self.left_out[entry.run.name] = str(error)
        self.all = [entry for runs in self.by_variant.values() for entry in runs]

    @cached_property
    def sets(self) -> list[str]:
        """Evaluation sets with results; the set that compares variants comes first."""
        names = dict.fromkeys(name for run in self.all for name in run.evaluations)
        return sorted(names, key=lambda name: name != self.experiment.compared)

    @property
    def device(self) -> str:
        """Kind of the runs' devices: "GPU", "emulated GPU" or "process"."""
        return count_devices(self.experiment.runs[0].config)[1]

    @cached_property
    def equal_hours(self) -> float | None:
        """Device-hours that every finished run has taken; None before a run has finished."""
        finished = [run.evaluations.get(self.experiment.compared, []) for run in self.all if run.is_finished]
        ends = [points[-1].device_hours for points in finished if points]
        return min(ends) if ends and min(ends) > 0 else None

    def at_equal_hours(self, variant: str) -> list[float]:
        """Return the results of a variant's finished runs at `equal_hours`."""
        if self.equal_hours is None:
            return []
        lines = [
            run.evaluated(self.experiment.compared, lambda point: point.device_hours)
            for run in self.by_variant[variant]
            if run.is_finished
        ]
        found = [value_at(line, self.equal_hours) for line in lines]
        return [value for value in found if value is not None]

    def ends(self, variant: str) -> list[float]:
        """Return the last results of a variant's finished runs on the compared set."""
        finished = [run for run in self.by_variant[variant] if run.is_finished]
        points = [run.evaluations.get(self.experiment.compared, []) for run in finished]
        return [found[-1].value for found in points if found]

    def name_of_results(self, name: str) -> str:
        """Name the results on a set: "accuracy" if every reward is 0 or 1, else "mean reward"."""
        points = [point for run in self.all for point in run.evaluations.get(name, [])]
        binary = all(point.figures is not None and point.figures.is_accuracy for point in points)
        return "accuracy" if binary else "mean reward"

    def counted(self, variant: str) -> list[RunResult]:
        """Return the runs that a variant's figures count: finished runs, or begun runs before one has finished."""
        runs = self.by_variant[variant]
        return [run for run in runs if run.is_finished] or runs

    def bands(self, line: Callable[[RunResult], Line]) -> list[Band]:
        """Make a curve for each variant that has points, over its counted runs."""
        made = [make_band(name, [line(run) for run in self.counted(name)]) for name in self.by_variant]
        return [band for band in made if band.x]
