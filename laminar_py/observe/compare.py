"""Runs side by side: how soon each reaches what all reach, and what each has learned at equal device-hours. Pure.

Evaluations of the first set are compared where every run has two or more, else the reward in training. A level
counts as reached at the first point at or above it; nothing is guessed between two evaluations. Runs of one config
that differ in their seeds stand together, set by set.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from rich.console import Group

from laminar_py.config.run import RunConfig
from laminar_py.observe.figures import FIGURES
from laminar_py.observe.quality import Point, tell_mean
from laminar_py.observe.report import RunReport
from laminar_py.observe.tails import NAMES, Measure, tell_seconds
from laminar_py.observe.terminal import make_table

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


@dataclass(frozen=True, slots=True)
class CompareRow:
    """A figure that every run has, or None, and how it is told."""

    name: str
    values: list[float | None]
    tell: Callable[[float], str]


def comparison_tables(reports: Sequence[RunReport], comparison: Comparison) -> Iterator[Group]:
    """Speed and tails, staleness, then quality against time, tokens and device-hours, and all sets by seeds."""
    heads = short_names(reports)
    speed = [
        CompareRow(one.compared, [cast(float | None, one.value(report)) for report in reports], one.tell)
        for one in FIGURES
        if one.compared
    ]
    yield _table("Speed and tails", heads, [*speed, *_tails(reports)])
    yield make_table("\nStaleness of consumed trajectories", "versions", heads, _staleness(reports))
    measure = comparison.measure
    if comparison.reached:
        yield _table(f"\nUntil {measure} is", heads, list(_reached(comparison)))
    title = f"\nAt equal device-hours: {comparison.device_hours:.3g} ({_devices(reports)})"
    yield _table(title, heads, list(_at_equal(comparison)))
    sets = list(comparison.groups[0].at_equal)
    if len(sets) > 1 or (sets and len(comparison.groups) < len(reports)):
        title = "\nSets at these device-hours: mean ± half of the 95 % t-interval over the runs of one config"
        rows = ([name, *(tell_mean(group.at_equal[name]) for group in comparison.groups)] for name in sets)
        yield make_table(title, "set", [_group_name(heads, group) for group in comparison.groups], rows)


def _group_name(heads: Sequence[str], group: SeedGroup) -> str:
    first, *others = group.runs
    return heads[first] + (f" and {len(others)} more" if others else "")


def short_names(reports: Sequence[RunReport]) -> list[str]:
    """Names of the folders; whole paths where two are alike."""
    names = [Path(report.run).name for report in reports]
    told = names if len(set(names)) == len(names) else [report.run for report in reports]
    return [f"{name} (simulated)" if one.simulation else name for name, one in zip(told, reports, strict=True)]


def _table(title: str, heads: list[str], rows: Sequence[CompareRow]) -> Group:
    return make_table(title, "", heads, ((row.name, *_cells(row)) for row in rows))


def _cells(row: CompareRow) -> Iterator[str]:
    first = row.values[0]
    for place, value in enumerate(row.values):
        if value is None:
            yield "-"
        else:
            ratio = f" ({value / first:.2f}x)" if place and first else ""
            yield f"{row.tell(value)}{ratio}"


def _tails(reports: Sequence[RunReport]) -> Iterator[CompareRow]:
    for measure in (Measure.GENERATION, Measure.ENVIRONMENT, Measure.END_TO_END):
        name, found = NAMES[measure], [report.tails.overall.get(measure) for report in reports]
        if measure is Measure.ENVIRONMENT and not any(found):
            continue
        yield CompareRow(f"{name} p50", [None if one is None else one.p50 for one in found], tell_seconds)
        yield CompareRow(f"{name} p95", [None if one is None else one.p95 for one in found], tell_seconds)
        yield CompareRow(f"{name} p95/p50", [None if one is None else one.tail for one in found], "{:.2f}".format)


def _staleness(reports: Sequence[RunReport]) -> Iterator[list[str]]:
    found = [report.staleness for report in reports]
    yield ["mean", *("-" if one is None else f"{one.mean:.2f}" for one in found)]
    yield ["max", *("-" if one is None else str(one.max) for one in found)]
    for staleness in sorted({key for one in found if one is not None for key in one.counts}):
        shares = [0.0 if one is None else one.counts.get(staleness, 0) / sum(one.counts.values()) for one in found]
        yield [str(staleness), *(f"{share:.1%} {'#' * round(10 * share):<10}" for share in shares)]


def _reached(comparison: Comparison) -> Iterator[CompareRow]:
    for reached in comparison.reached:
        level, points = f"{reached.level:.3f}", reached.points
        yield CompareRow(f"{level}: time", _of(lambda point: point.rl_s, points), tell_seconds)
        yield CompareRow("  trained tokens", _of(lambda point: float(point.tokens), points), "{:,.0f}".format)
        yield CompareRow("  device-hours", _of(lambda point: point.device_hours, points), "{:.3g}".format)


def _at_equal(comparison: Comparison) -> Iterator[CompareRow]:
    yield CompareRow(comparison.measure, _of(lambda point: point.value, comparison.at_equal), "{:.3f}".format)
    yield CompareRow(
        "  last known at", _of(lambda point: point.device_hours, comparison.at_equal), "{:.3g}".format
    )
    if comparison.measure != "reward":
        rewards = comparison.reward_at_equal
        yield CompareRow("reward in training", _of(lambda point: point.value, rewards), "{:.3f}".format)


def _devices(reports: Sequence[RunReport]) -> str:
    counts = dict.fromkeys(f"{report.quality.devices} x {report.quality.device}" for report in reports)
    return ", ".join(counts)


def _of(value: Callable[[Point], float], points: Sequence[Point | None]) -> list[float | None]:
    return [None if point is None else value(point) for point in points]
