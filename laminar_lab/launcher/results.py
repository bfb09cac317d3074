"""Figures of an experiment's runs for its page: curves by variant, and the costs of each run."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np

from laminar_lab.curves import Costs, Point, count_devices, device_seconds, read_costs, reward_curve
from laminar_lab.launcher.experiment import Experiment, find_difference
from laminar_lab.launcher.standing import RunState, Standing
from laminar_py.config import ConfigError
from laminar_py.observe import Measure, RunReport, read_snapshot, read_steps
from laminar_py.records import StepRow

MOST_POINTS = 400

Line = tuple[Sequence[float], Sequence[float]]
"""Places, ascending, and values of one seed."""


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """Curve of a variant: mean, lowest and highest seed at each place.

    E.g. `Band(name="lr-0.001", x=[0, 5], mean=[0.1, 0.4], low=[0.1, 0.3], high=[0.1, 0.5], seeds=3)`.
    """

    name: str
    x: list[float]  # [P]
    mean: list[float]  # [P]
    low: list[float]  # [P]
    high: list[float]  # [P]
    seeds: int  # each of which is in every point


def make_band(name: str, lines: Sequence[Line]) -> Band:
    """Curve over seeds, each taken linearly between its own points, at every place that some seed has a point.

    From where the last of them begins to where the first ends: a mean over fewer would jump.
    """
    known = [line for line in map(finite, lines) if line[0]]
    assert all(a <= b for x, _ in known for a, b in pairwise(x)), f"{name}: places in no order"
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
    """Points of a line whose values are numbers."""
    kept = [(x, y) for x, y in zip(*line, strict=True) if np.isfinite(x) and np.isfinite(y)]
    return [x for x, _ in kept], [y for _, y in kept]


def value_at(line: Line, place: float) -> float | None:
    """Value of a line at a place, between its points; None where it does not reach so far."""
    x, y = finite(line)
    return float(np.interp(place, x, y)) if x and x[0] <= place <= x[-1] else None


HOUR_S = 3600.0


def trained_per_s(row: StepRow) -> float:
    """Trained tokens over the seconds of the RL phase so far."""
    return row.trained_tokens / row.rl_s if row.rl_s else 0.0


@dataclass(frozen=True)
class RunResult:
    """Figures of a run that was begun."""

    standing: Standing
    compared: str  # evaluation set

    @cached_property
    def steps(self) -> tuple[StepRow, ...]:
        """Rows of its steps."""
        return read_steps(self._path)

    @cached_property
    def costs(self) -> Costs:
        """Seconds of its RL phase so far."""
        return read_costs(self._path)

    @property
    def _path(self) -> Path:
        folder = self.standing.run.folder
        assert folder is not None, f"{self.standing.run.name} was not begun"
        return folder.path

    @cached_property
    def evaluations(self) -> dict[str, list[Point]]:
        """Evaluations by set."""
        return self.standing.evaluations

    @property
    def points(self) -> list[Point]:
        """Evaluations of the set by which runs are compared."""
        return self.evaluations.get(self.compared, [])

    @property
    def last(self) -> StepRow | None:
        """Row of the last step."""
        return self.steps[-1] if self.steps else None

    @property
    def device_hours(self) -> float:
        """Devices of the run times the hours of its RL phase."""
        return device_seconds(self.standing.run.config, self.costs.sizes, self.costs.rl_s) / HOUR_S

    @property
    def is_finished(self) -> bool:
        """True once it has done all of its steps."""
        return self.standing.state is RunState.FINISHED

    @property
    def core_hours(self) -> float | None:
        """CPU time that its own processes took in the RL phase; None on a cluster, of which no row has all."""
        return None if self.standing.run.config.cluster.address else self.costs.core_s / HOUR_S

    @cached_property
    def tails(self) -> tuple[float, float, float] | None:
        """p50, p95 and p99 of its responses in tokens; None where none is on record."""
        summary = self.standing.summary
        if summary is not None and summary.finished:
            lengths = summary.response_length
            return (lengths.p50, lengths.p95, lengths.p99)
        folder = self.standing.run.folder
        if folder is None or not folder.has_ledger:
            return None
        found = RunReport(read_snapshot(folder.path)).tails.get(Measure.LENGTH)
        return None if found is None else (found.p50, found.p95, found.p99)

    @cached_property
    def left_out(self) -> str:
        """Why no figure counts it: other settings, or files that cannot be read; "" for one that counts."""
        run = self.standing.run
        if self.standing.unreadable:
            return self.standing.unreadable
        try:
            assert run.folder is not None, f"{run.name} was not begun"
            if why := find_difference(run, run.folder):
                return why
            assert self.steps is not None, (self.costs, self.tails)  # which reads them
        except (ConfigError, OSError) as error:
            return str(error)
        return ""

    @property
    def reward(self) -> Line:
        """Reward over steps, each the mean of the last `REWARD_STEPS`."""
        found = reward_curve(self.standing.run.config, self.steps)
        return [float(point.step) for point in found], [point.value for point in found]

    def over_steps(self, value: Callable[[StepRow], float]) -> Line:
        """A figure of each step's row."""
        return [float(row.step) for row in self.steps], [value(row) for row in self.steps]

    def evaluated(self, *, name: str, place: Callable[[Point], float]) -> Line:
        """Results on a set, over steps or costs."""
        points = self.evaluations.get(name, [])
        return [place(point) for point in points], [point.value for point in points]


@dataclass(frozen=True)
class Results:
    """Figures of all runs that were begun, by variant, e.g. `Results(experiment, standings)`."""

    experiment: Experiment
    standings: Sequence[Standing]

    @cached_property
    def by_variant(self) -> dict[str, list[RunResult]]:
        """Begun runs of each variant that count, in the order of the file."""
        found: dict[str, list[RunResult]] = defaultdict(list, {name: [] for name in self.experiment.variants})
        for one in self._begun:
            if not one.left_out:
                found[one.standing.run.variant].append(one)
        return dict(found)

    @property
    def left_out(self) -> list[RunResult]:
        """Begun runs that no figure counts."""
        return [one for one in self._begun if one.left_out]

    @cached_property
    def _begun(self) -> list[RunResult]:
        begun = (one for one in self.standings if one.run.folder is not None)
        return [RunResult(one, self.experiment.compared) for one in begun]

    @property
    def all(self) -> list[RunResult]:
        """Begun runs that count."""
        return [one for runs in self.by_variant.values() for one in runs]

    @cached_property
    def sets(self) -> list[str]:
        """Sets with results, that by which runs are compared first."""
        names = dict.fromkeys(name for one in self.all for name in one.evaluations)
        return sorted(names, key=lambda name: name != self.experiment.compared)

    @property
    def device(self) -> str:
        """Kind of device that a run takes: "GPU", "emulated GPU" or "process"."""
        return count_devices(self.experiment.runs[0].config)[1]

    @cached_property
    def equal_hours(self) -> float | None:
        """Device-hours that every finished run has taken; None before there is one."""
        ends = [one.points[-1].device_hours for one in self.all if one.points and one.is_finished]
        return min(ends) if ends and min(ends) > 0 else None

    def at_equal_hours(self, variant: str) -> list[float]:
        """Results of the finished runs of a variant when they had taken as many device-hours as all others."""
        place = self.equal_hours
        lines = [
            one.evaluated(name=one.compared, place=lambda point: point.device_hours)
            for one in self.by_variant[variant]
            if one.is_finished
        ]
        found = [value_at(line, place) for line in lines] if place is not None else []
        return [value for value in found if value is not None]

    def word(self, name: str) -> str:
        """Word for results on a set: "accuracy" where every reward was 0 or 1, else "mean reward"."""
        points = [point for one in self.all for point in one.evaluations.get(name, [])]
        return (
            "accuracy"
            if all(point.figures is not None and point.figures.is_accuracy for point in points)
            else "mean reward"
        )

    def counted(self, variant: str) -> list[RunResult]:
        """Runs of a variant that its figures are of: finished ones, or while there are none, those begun."""
        runs = self.by_variant[variant]
        return [one for one in runs if one.is_finished] or runs

    def bands(self, line: Callable[[RunResult], Line]) -> list[Band]:
        """Curve of each variant that has points, over the runs that count."""
        made = [make_band(name, [line(one) for one in self.counted(name)]) for name in self.by_variant]
        return [band for band in made if band.x]
