"""Runs side by side: how soon each reaches what all reach, and what each has learned at equal device-hours. Pure.

Evaluations of the first set are compared where every run has two or more, else the reward in training. A level
counts as reached at the first point at or above it; nothing is guessed between two evaluations. Runs of one config
that differ in their seeds stand together, set by set.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from laminar_py.config.run import RunConfig
from laminar_py.observe.analytics.measure.quality import Point
from laminar_py.observe.analytics.triage.report import RunReport

_STAGES = (0.25, 0.5, 0.75, 1.0)  # of the way from the best start to the worst end


@dataclass(frozen=True, slots=True)
class Reached:
    """A level of quality, and for each run the first point at which it was there; None: never."""

    level: float
    points: tuple[Point | None, ...]


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Runs of one config and their results at equal device-hours, e.g. of the first two runs:

    `SeedGroup((0, 1), {"aime": (0.31, 0.35)})`.
    """

    runs: tuple[int, ...]  # places in the order of the reports
    at_equal: dict[str, tuple[float, ...]]  # by set, of each run that had a result by then


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Figures that the reports alone do not have; tuples have one entry for each run, in their order."""

    measure: str  # "accuracy", "mean reward" of an evaluation, or "reward" in training
    reached: tuple[Reached, ...]
    device_hours: float  # that all have taken at least
    at_equal: tuple[Point | None, ...]  # the last point within them, which may lie well before their end
    reward_at_equal: tuple[Point | None, ...]  # in training
    groups: tuple[SeedGroup, ...]  # in the order of their first runs


def compare(reports: Sequence[RunReport]) -> Comparison:
    """Comparison of two runs or more."""
    evaluated = all(len(report.quality.evaluated) >= 2 for report in reports)
    curves = [report.quality.evaluated if evaluated else report.quality.reward for report in reports]
    measures = {report.quality.measure for report in reports}
    measure = measures.pop() if len(measures) == 1 else "mean reward"
    budget = min(report.rl_s * report.quality.devices / 3600 for report in reports)
    return Comparison(
        measure=measure if evaluated else "reward",
        reached=tuple(
            Reached(level, tuple(_first(curve, level) for curve in curves)) for level in _levels(curves)
        ),
        device_hours=budget,
        at_equal=tuple(_within(curve, budget) for curve in curves),
        reward_at_equal=tuple(_within(report.quality.reward, budget) for report in reports),
        groups=_groups(reports, budget),
    )


def _groups(reports: Sequence[RunReport], budget: float) -> tuple[SeedGroup, ...]:
    places: dict[str, list[int]] = defaultdict(list)
    for place, report in enumerate(reports):
        places[_but_for_seed(report.snapshot.config)].append(place)
    sets = list(dict.fromkeys(name for report in reports for name in report.quality.by_set))

    def results(group: Sequence[int], name: str) -> tuple[float, ...]:
        found = (_within(reports[place].quality.by_set.get(name, ()), budget) for place in group)
        return tuple(point.value for point in found if point is not None)

    return tuple(
        SeedGroup(tuple(group), {name: results(group, name) for name in sets}) for group in places.values()
    )


def _but_for_seed(config: RunConfig | None) -> str:
    """The config of a run without its name, its seed, where it lies and who is told of it."""
    assert config is not None, "runs are compared by figures, which need the config"
    tree = config.model_dump(mode="json", exclude={"name", "seed", "runs", "tracking"})
    (tree["warm_start"] or {}).pop("cache", None)
    return json.dumps(tree, sort_keys=True)


def _levels(curves: Sequence[Sequence[Point]]) -> list[float]:
    if not all(curves):
        return []
    start = max(curve[0].value for curve in curves)
    end = min(max(point.value for point in curve) for curve in curves)
    return [start + (end - start) * stage for stage in _STAGES] if end > start else []


def _first(curve: Sequence[Point], level: float) -> Point | None:
    return next((point for point in curve if point.value >= level - 1e-9), None)


def _within(curve: Sequence[Point], device_hours: float) -> Point | None:
    inside = [point for point in curve if point.device_hours <= device_hours * (1 + 1e-9)]
    return inside[-1] if inside else None
