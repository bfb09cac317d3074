"""Runs side by side as the terminal shows them: one column for each, with the ratio to the first. Layout alone."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group

from laminar_py.observe.analytics.measure.quality import Point
from laminar_py.observe.analytics.measure.seeds import tell_mean
from laminar_py.observe.analytics.measure.tails import NAMES, Measure
from laminar_py.observe.analytics.show.run_tables import make_table, tell_seconds
from laminar_py.observe.analytics.triage.compare import Comparison, SeedGroup
from laminar_py.observe.analytics.triage.report import RunReport


@dataclass(frozen=True, slots=True)
class CompareRow:
    """A figure that every run has, or None, and how it is told."""

    name: str
    values: list[float | None]
    tell: Callable[[float], str]


def comparison_tables(reports: Sequence[RunReport], comparison: Comparison) -> Iterator[Group]:
    """Speed and tails, staleness, then quality against time, tokens and device-hours, and all sets by seeds."""
    heads = short_names(reports)
    yield _table("Speed and tails", heads, [*_speed(reports), *_tails(reports)])
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


def _speed(reports: Sequence[RunReport]) -> Iterator[CompareRow]:
    yield CompareRow("goodput, useful tokens/s", [r.tokens.goodput for r in reports], "{:,.0f}".format)
    yield CompareRow("trained tokens/s", [r.trained_tokens_per_s for r in reports], "{:,.0f}".format)
    yield CompareRow("useful of the issued", [r.tokens.useful_share for r in reports], "{:.1%}".format)
    yield CompareRow("steps", [float(r.steps) for r in reports], "{:,.0f}".format)
    yield CompareRow("RL", [r.rl_s for r in reports], tell_seconds)
    yield CompareRow("slots lost to stragglers", [r.stragglers.slots for r in reports], "{:.1%}".format)


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
