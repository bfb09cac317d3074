"""Runs side by side: which config is better at equal costs, and how soon each run reaches a common level.

`laminar compare` prints what differs in the configs, verdicts (`verdicts.py`), and tables of held-out sets, of
costs until a level, and of speed. They compare evaluations of the first set where every run has two or more, else
the reward in training. A run has reached a level at its first point at or above it. Runs whose configs differ only
in their seeds are one group, unless a user changed one of them while it was running. Configs have the values that
users gave: `staleness.control` moves a bound of its own accord.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rich.cells import cell_len
from rich.console import Group
from rich.text import Text

from laminar_lab.curves import (
    BAR,
    FleetSizes,
    Point,
    device_seconds,
    draw_mean,
    evaluation_curves,
    format_mean,
    read_fleet_sizes,
    read_problem_rewards,
    reward_curve,
)
from laminar_lab.report.figures import FIGURES
from laminar_lab.report.run_report import RunReport, read_report
from laminar_lab.report.snapshot import changes_by_user, with_last_settings
from laminar_lab.report.tails import NAMES, Measure, format_seconds
from laminar_lab.report.terminal import make_table
from laminar_lab.verdicts import CONFOUNDED, DEVICE_HOURS, OWN, Pair, SeedCurve, Seeds, judge, value_at
from laminar_py.config.loading import flatten
from laminar_py.config.run import RunConfig
from laminar_py.records.evaluations import SetFigures

MOST_DIFFERENCES = 24  # settings in the table of differences
MOST_SETTING = 30  # columns of a setting
PADDING = 2  # between columns of a table
_STAGES = (0.25, 0.5, 0.75, 1.0)  # of the way from the best start to the worst end


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run with its report and its curves."""

    report: RunReport
    config: RunConfig
    by_set: dict[str, list[Point]]  # evaluations, the first set first
    reward: list[Point]  # in training
    answers: Mapping[str, Mapping[int, float]] = field(default_factory=dict)  # mean rewards by pass and problem
    changes: tuple[str, ...] = ()  # by a user while it was running
    sizes: FleetSizes = field(default_factory=FleetSizes)

    @cached_property
    def evaluated(self) -> list[Point]:
        """Evaluations of the first set."""
        return next(iter(self.by_set.values()), [])

    @cached_property
    def device_hours(self) -> float:
        """Device-hours so far."""
        return device_seconds(self.config, self.sizes, self.report.rl_s) / 3600


def read_run(run: Path) -> ComparedRun:
    """Read a run. Raises `ConfigError` if `run` is not a run folder, or no trajectory has finished in it."""
    report = read_report(run)
    written, happened = report.snapshot.written, report.snapshot.history.happened
    assert written is not None, "a report has a config"
    config = with_last_settings(written, happened, by_control=False)
    steps, sizes = report.snapshot.samples.steps, read_fleet_sizes(run)
    return ComparedRun(
        report=report,
        config=config,
        by_set=evaluation_curves(config, report.snapshot.history.evaluations, steps, sizes),
        reward=reward_curve(config, steps, sizes),
        answers=read_problem_rewards(run),
        changes=changes_by_user(happened),
        sizes=sizes,
    )


@dataclass(frozen=True, slots=True)
class Reached:
    """A level of quality, and for each run the first point at or above it; None: the run never reached it."""

    level: float
    points: tuple[Point | None, ...]


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """Runs of one config and their results at the end, and at equal device-hours.

    E.g. `SeedGroup((0, 1), {"aime": (0.41, 0.45)}, {"aime": (0.31, 0.35)})` for the first two runs. Results are by
    set, or of the reward in training where no run has a set.
    """

    runs: tuple[int, ...]  # places among the compared runs
    at_end: dict[str, tuple[float, ...]]  # of each run with a result
    at_equal: dict[str, tuple[float, ...]]  # of each run with a result by then, as `value_at`


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Figures of several runs."""

    measure: str  # "accuracy", "mean reward" of an evaluation, or "reward" in training
    reached: tuple[Reached, ...]
    device_hours: float  # of the run with the fewest
    groups: tuple[SeedGroup, ...]  # in the order of their first runs
    pairs: tuple[Pair, ...]  # of groups


def compare(runs: Sequence[ComparedRun]) -> Comparison:
    """Compare two runs or more."""
    evaluated = all(len(run.evaluated) >= 2 for run in runs)
    curves = [run.evaluated if evaluated else run.reward for run in runs]
    points = [point for run in runs for point in run.evaluated]
    is_accuracy = all(point.figures is None or point.figures.is_accuracy for point in points)
    budget = min(run.device_hours for run in runs)
    groups = _group_by_seed(runs, budget)
    return Comparison(
        measure="reward" if not evaluated else "accuracy" if is_accuracy else "mean reward",
        reached=tuple(
            Reached(level, tuple(_first_at(curve, level) for curve in curves)) for level in _levels(curves)
        ),
        device_hours=budget,
        groups=groups,
        pairs=judge(
            [runs[group.runs[0]].config for group in groups],
            [seed_curves(runs, group, curves) for group in groups],
        ),
    )


def _group_by_seed(runs: Sequence[ComparedRun], budget: float) -> tuple[SeedGroup, ...]:
    """Group runs of one config and different seeds, and with the same changes by users.

    `budget` is the device-hours of their results.
    """
    places: dict[tuple[str, int], list[int]] = defaultdict(list)
    seen: Counter[tuple[str, int]] = Counter()
    for place, run in enumerate(runs):
        config = json.dumps([_config_without_seed(run.config), run.changes])
        places[config, seen[config, run.config.seed]].append(place)  # a repeated seed is no further seed
        seen[config, run.config.seed] += 1
    curves = [run.by_set for run in runs]
    if not any(curves):
        curves = [{"reward in training": run.reward} for run in runs]
    sets = list(dict.fromkeys(name for by_set in curves for name in by_set))

    def results(
        group: Sequence[int], value: Callable[[Sequence[Point]], float | None]
    ) -> dict[str, tuple[float, ...]]:
        found = {name: [value(curves[place].get(name, ())) for place in group] for name in sets}
        return {name: tuple(it for it in values if it is not None) for name, values in found.items()}

    return tuple(
        SeedGroup(
            tuple(group),
            results(group, lambda points: points[-1].value if points else None),
            results(group, lambda points: value_at(points, DEVICE_HOURS, budget)),
        )
        for group in places.values()
    )


def seed_curves(runs: Sequence[ComparedRun], group: SeedGroup, curves: Sequence[Sequence[Point]]) -> Seeds:
    """Return the curves of a group by seed, from one curve of each run."""
    return {runs[it].config.seed: SeedCurve(curves[it], runs[it].answers) for it in group.runs}


def _config_without_seed(config: RunConfig) -> str:
    """Return a config as JSON without its name, its seed, its folder and its trackers."""
    tree = config.model_dump(mode="json", exclude={"name", "seed", "runs", "tracking"})
    (tree["warm_start"] or {}).pop("cache", None)
    return json.dumps(tree, sort_keys=True)


def _levels(curves: Sequence[Sequence[Point]]) -> list[float]:
    """Return levels between the best start and the worst end, none if the curves do not overlap.

    A level within the interval of a first evaluation is left out, since the start may be there already.
    """
    if not all(curves):
        return []
    firsts = [curve[0] for curve in curves]
    start = max(point.value for point in firsts)
    surely = max(point.value if point.figures is None else point.figures.mean.high for point in firsts)
    end = min(max(point.value for point in curve) for curve in curves)
    levels = [start + (end - start) * stage for stage in _STAGES] if end > start else []
    return [level for level in levels if level > surely]


def _first_at(curve: Sequence[Point], level: float) -> Point | None:
    return next((point for point in curve if point.value >= level - 1e-9), None)


# ---- tables


@dataclass(frozen=True, slots=True)
class CompareRow:
    """A row of a table: a value of each run, None where it is unknown, and its format."""

    name: str
    values: list[float | None]
    format: Callable[[float], str]


def comparison_tables(
    runs: Sequence[ComparedRun], comparison: Comparison, *, width: int
) -> Iterator[Group | Text]:
    """Yield tables of the configs, verdicts, tables of held-out sets, of time to a level, and of speed.

    Tables fit `width` columns of the terminal.
    """
    reports = [run.report for run in runs]
    heads, names = short_names(reports), group_names(runs, comparison)
    yield differences_table([run.config for run in runs], heads, width=width)
    yield from change_lines(runs, heads)
    if (warning := seed_warning(comparison, names)) is not None:
        yield Text()
        yield warning
    yield from verdict_lines(comparison, names)
    yield from _held_out_tables(runs, heads, width=width)
    measure = comparison.measure
    if comparison.reached:
        reached = map(_cells, _reached_rows(comparison))
        yield _fit(f"\nUntil {measure} is", "", heads, reached, width=width)
    sets = comparison.groups[0].at_equal
    if len(sets) > 1 or (sets and len(comparison.groups) < len(runs)):
        yield sets_table(comparison, names, width=width)
    speed = [
        CompareRow(figure.compared, [figure.value(report) for report in reports], figure.format)
        for figure in FIGURES
        if figure.compared
    ]
    rows = [*speed, *_tail_rows(reports)]
    yield _fit("\nSpeed and tails", "", heads, map(_cells, rows), width=width)
    title = "\nStaleness of consumed trajectories"
    yield _fit(title, "learner steps", heads, _staleness_rows(reports), width=width)


def differences_table(configs: Sequence[RunConfig], heads: Sequence[str], *, width: int) -> Group | Text:
    """Return a table of the settings in which configs differ, or a line if they agree.

    Names, folders and trackers of runs always may differ, and are left out.
    """
    flat = [flatten(config) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one if not key.startswith(OWN))
    rows = [[key, *(_setting(one, key) for one in flat)] for key in keys]
    rows = [row for row in rows if len(set(row[1:])) > 1]
    if not rows:
        return Text("The configs agree in all settings.\n")
    shown = rows[:MOST_DIFFERENCES]
    if len(rows) > len(shown):
        shown.append([f"and {len(rows) - len(shown)} more", *("" for _ in heads)])
    return _fit("What differs in the configs", "", heads, shown, width=width)


def _setting(flat: Mapping[str, object], key: str) -> str:
    """Return a setting as text of at most `MOST_SETTING` columns; "-" where the config has no such section."""
    text = json.dumps(flat[key]).strip('"') if key in flat else "-"
    return text if len(text) <= MOST_SETTING else f"{text[: MOST_SETTING - 3]}..."


def _held_out_tables(runs: Sequence[ComparedRun], heads: Sequence[str], *, width: int) -> Iterator[Group]:
    """Yield a table of each set's last evaluation in each run, with each term and the mean of the first one."""
    for name in dict.fromkeys(name for run in runs for name in run.by_set):
        passes = [run.by_set.get(name, []) for run in runs]
        before = {
            "at step": [str(points[-1].step) if points else "-" for points in passes],
            "mean before": [f"{points[0].value:.3f}" if len(points) > 1 else "-" for points in passes],
        }
        last = [points[-1].figures if points else None for points in passes]
        yield figures_table(f"\n{name}: the last evaluation", heads, last, before, width=width)


def figures_table(
    title: str,
    heads: Sequence[str],
    found: Sequence[SetFigures | None],
    before: Mapping[str, Sequence[str]],
    *,
    width: int,
) -> Group:
    """Return a table of evaluations side by side: the rows `before`, then figures with their intervals."""
    columns = [{} if figures is None else figures.rows for figures in found]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *texts] for name, texts in before.items()]
    rows += [[name, *(column.get(name, "-") for column in columns)] for name in names]
    return _fit(title, "", heads, rows, width=width)


def sets_table(comparison: Comparison, names: Sequence[str], *, width: int) -> Group:
    """Return the table of each set's results at the end and at equal device-hours, a row for each group of seeds.

    The first set's intervals at the end are drawn on one axis, which has 0 on it: from 0 to 1 if no value is
    beyond. The table fits `width` columns.
    """
    title = "\nSets at the end: mean ± half of the 95 % t-interval over the runs of one config"
    first, *others = comparison.groups[0].at_end
    drawn = [value for group in comparison.groups for value in group.at_end[first]]
    low, high = min([0.0, *drawn]), max([0.0, *drawn])
    high = 1.0 if low == 0.0 and high <= 1.0 else max(high, low + 1e-9)
    rows = [
        [
            name,
            str(len(group.runs)),
            format_mean(group.at_end[first], seeds=len(group.runs)),
            draw_mean(group.at_end[first], low=low, high=high),
            *(format_mean(group.at_end[other], seeds=len(group.runs)) for other in others),
            *(format_mean(values, seeds=len(group.runs)) for values in group.at_equal.values()),
        ]
        for name, group in zip(names, comparison.groups, strict=True)
    ]
    axis = f"{low:<.3g}{f'{high:.3g}':>{BAR - len(f'{low:.3g}')}}"
    equal = [f"{name} at {comparison.device_hours:.3g} device-hours" for name in (first, *others)]
    return _fit(title, "runs", ["seeds", first, axis, *others, *equal], rows, width=width)


def verdict_lines(comparison: Comparison, names: Sequence[str]) -> Iterator[Text]:
    """Yield the verdicts on each pair of groups, which have these names, and the confounders of each pair."""
    for pair in comparison.pairs:
        title, *lines = pair.lines(names, comparison.measure)
        yield Text(f"\n{title}", style="bold")
        yield from (Text(line, style="red" if line.startswith(CONFOUNDED) else "") for line in lines)


def change_lines(runs: Sequence[ComparedRun], heads: Sequence[str]) -> Iterator[Text]:
    """Yield a line for each run, by its name in `heads`, that a user changed while it was running."""
    for head, run in zip(heads, runs, strict=True):
        if run.changes:
            line = f"CHANGED while it was running: {head}, {', '.join(run.changes)}; it is no seed of another run"
            yield Text(line, style="red")


def seed_warning(comparison: Comparison, names: Sequence[str]) -> Text | None:
    """Return a warning of configs that ran once, by their `names` in the order of the groups; None without any."""
    once = [name for name, group in zip(names, comparison.groups, strict=True) if len(group.runs) == 1]
    if not once:
        return None
    who = "each config" if len(once) == len(names) else ", ".join(once)
    return Text(
        f"ONE SEED: {who} ran once, so a difference may be the luck of a seed; run three seeds or more of each",
        style="bold red",
    )


def group_names(runs: Sequence[ComparedRun], comparison: Comparison) -> list[str]:
    """Return the name of each group: its first run, and the number of others, e.g. "grpo-1 +2"."""
    heads = short_names([run.report for run in runs])
    return [
        heads[group.runs[0]] + (f" +{len(group.runs) - 1}" if len(group.runs) > 1 else "")
        for group in comparison.groups
    ]


def short_names(reports: Sequence[RunReport]) -> list[str]:
    """Return the names of the folders, or whole paths where two names are equal."""
    names = [Path(report.run).name for report in reports]
    shown = names if len(set(names)) == len(names) else [report.run for report in reports]
    return [
        f"{name} (simulated)" if report.simulation else name for name, report in zip(shown, reports, strict=True)
    ]


def _fit(title: str, first: str, heads: Sequence[str], rows: Iterable[Iterable[str]], *, width: int) -> Group:
    """Return a table as parts that fit `width` columns, one below another; each part has the first column."""
    cells = [[first, *heads], *map(list, rows)]
    widths = [PADDING + max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    parts: list[list[int]] = []
    for place, needed in list(enumerate(widths))[1:]:
        if not parts or widths[0] + sum(widths[it] for it in parts[-1]) + needed > width + PADDING:
            parts.append([])
        parts[-1].append(place)
    return Group(
        *(
            make_table(
                "" if number else title,
                first,
                [cells[0][place] for place in part],
                ([row[0], *(row[place] for place in part)] for row in cells[1:]),
            )
            for number, part in enumerate(parts)
        )
    )


def _cells(row: CompareRow) -> Iterator[str]:
    """Yield the name of a row, then the value of each run with its ratio to the first run."""
    yield row.name
    first = row.values[0]
    for place, value in enumerate(row.values):
        if value is None:
            yield "-"
        else:
            ratio = f" ({value / first:.2f}x)" if place and first else ""
            yield f"{row.format(value)}{ratio}"


def _tail_rows(reports: Sequence[RunReport]) -> Iterator[CompareRow]:
    for measure in (Measure.GENERATION, Measure.ENVIRONMENT, Measure.END_TO_END):
        name, found = NAMES[measure], [report.tails.get(measure) for report in reports]
        if measure is Measure.ENVIRONMENT and not any(found):
            continue
        yield CompareRow(f"{name} p50", [None if times is None else times.p50 for times in found], format_seconds)
        yield CompareRow(f"{name} p95", [None if times is None else times.p95 for times in found], format_seconds)
        yield CompareRow(
            f"{name} p95/p50",
            [None if times is None else times.tail for times in found],
            "{:.2f}".format,
        )


def _staleness_rows(reports: Sequence[RunReport]) -> Iterator[list[str]]:
    found = [report.staleness for report in reports]
    yield ["mean", *("-" if ages is None else f"{ages.mean:.2f}" for ages in found)]
    yield ["max", *("-" if ages is None else str(ages.max) for ages in found)]
    for staleness in sorted({key for ages in found if ages is not None for key in ages.counts}):
        shares = [
            0.0 if ages is None else ages.counts.get(staleness, 0) / sum(ages.counts.values()) for ages in found
        ]
        yield [str(staleness), *(f"{share:.1%} {'#' * round(10 * share):<10}" for share in shares)]


def _reached_rows(comparison: Comparison) -> Iterator[CompareRow]:
    for reached in comparison.reached:
        level, points = f"{reached.level:.3f}", reached.points
        yield CompareRow(f"{level}: time", _values(lambda point: point.rl_s, points), format_seconds)
        yield CompareRow("  trained tokens", _values(lambda point: float(point.tokens), points), "{:,.0f}".format)
        yield CompareRow("  device-hours", _values(lambda point: point.device_hours, points), "{:.3g}".format)


def _values(value: Callable[[Point], float], points: Sequence[Point | None]) -> list[float | None]:
    return [None if point is None else value(point) for point in points]
