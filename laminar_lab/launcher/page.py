"""`report.html` of an experiment: one file that needs no network, drawn from the run folders.

`laminar launch` draws the page at its end, and `--report` draws the page at any time.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from statistics import fmean

import msgspec

from laminar_lab.curves import REWARD_STEPS, Point, format_mean
from laminar_lab.launcher.experiment import Experiment
from laminar_lab.launcher.progress import RunProgress, RunState
from laminar_lab.launcher.results import Band, Line, Results, RunResult, trained_per_s
from laminar_lab.report.kit import Card, render

NOTHING = "–"
OF_SEEDS = "Means over finished seeds, or over begun seeds before one has finished"


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Curves of all variants in one pair of axes."""

    title: str
    x: str  # title of the axis
    y: str
    bands: list[Band]


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """A table of texts. Columns from the second on have numbers, except the last `words` columns."""

    title: str
    note: str = ""
    head: list[str]
    rows: list[list[str]]
    words: int = 0


class ExperimentPage(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the page from top to bottom."""

    name: str
    state: str
    headline: list[Card]
    variants: list[str]
    counted: list[str]  # [variants] number of seeds that count; "" for all
    first: list[Sheet]
    charts: list[Chart]
    last: list[Sheet]


def write_page(experiment: Experiment, progress: list[RunProgress]) -> Path:
    """Draw the page in one atomic write; return its path."""
    html = render(msgspec.json.encode(make_page(experiment, progress)), files("laminar_lab.launcher") / "web")
    written = experiment.report.with_suffix(".tmp")
    written.write_text(html, "utf-8")
    written.replace(experiment.report)
    return experiment.report


def make_page(experiment: Experiment, progress: list[RunProgress]) -> ExperimentPage:
    """Make the contents of the page from the progress of every run."""
    results = Results(experiment, progress)
    finished = sum(entry.state is RunState.FINISHED for entry in progress)
    failed = [
        [entry.run.name, entry.reason, str(entry.run.log)] for entry in progress if entry.state is RunState.FAILED
    ]
    first = [Sheet(title="Runs that failed", head=["run", "why", "log"], rows=failed, words=2)] if failed else []
    if results.left_out:
        note = "Their files cannot be read, or they were made with other settings."
        rows = [[name, reason] for name, reason in results.left_out.items()]
        first.append(Sheet(title="Runs that no figure counts", note=note, head=["run", "why"], rows=rows, words=1))
    return ExperimentPage(
        name=experiment.settings.name,
        state=f"{finished} of {len(progress)} runs have finished",
        headline=_headline(results, progress),
        variants=experiment.variants,
        counted=[_count_seeds(results, variant) for variant in experiment.variants],
        first=[*first, _outcomes(results)],
        charts=_charts(results),
        last=[_tails(results), _changes(experiment), _runs(results, progress)],
    )


def _count_seeds(results: Results, variant: str) -> str:
    """Return e.g. "2 of 3 seeds", or "" if all seeds count."""
    runs, every = results.counted(variant), len(results.experiment.settings.seeds)
    if not all(run.is_finished for run in runs):
        return f"{len(runs)} of {every} seeds, not finished"
    return f"{len(runs)} of {every} seeds" if len(runs) < every else ""


def _headline(results: Results, progress: list[RunProgress]) -> list[Card]:
    """Make the cards at the top: best variant, finished runs, device-hours, core-hours and trained tokens.

    Only variants whose seeds all have a result compete for the best.
    """
    compared, num_seeds = results.experiment.compared, len(results.experiment.settings.seeds)
    found = list[Card]()
    ends = {name: results.ends(name) for name in results.by_variant}
    # a mean over the surviving seeds alone would say nothing of a variant
    complete = {name: ends[name] for name in ends if len(results.counted(name)) == num_seeds == len(ends[name])}
    if complete:
        best = max(complete, key=lambda name: fmean(complete[name]))
        seeds = "one seed" if num_seeds == 1 else f"{num_seeds} seeds, ± half of the 95 % interval"
        note = f"{best}: the highest {results.name_of_results(compared)}, {seeds}"
        found.append(Card(f"best at the end: {compared}", format_mean(complete[best]), note))
    counts = Counter(run.state for run in progress)
    finished = counts.pop(RunState.FINISHED, 0)
    others = ", ".join(f"{counts[state]} {state}" for state in RunState if counts[state])
    found.append(Card("runs finished", f"{finished} of {len(progress)}", others or "all"))
    hours = sum(run.device_hours for run in results.all)
    found.append(Card(f"{results.device}-hours", _amount(hours), "of RL, all runs"))
    core_hours = [run.core_hours for run in results.all if run.core_hours is not None]
    if results.device == "process" and core_hours:
        found.append(Card("CPU core-hours", _amount(sum(core_hours)), "used in RL, all runs"))
    trained = sum(run.last.trained_tokens for run in results.all if run.last is not None)
    found.append(Card("trained tokens", f"{trained:,}", "all runs"))
    return found


def _outcomes(results: Results) -> Sheet:
    """Make the table of results and costs by variant."""
    experiment, cost = results.experiment, f"{results.device}-hours"
    head = ["variant", "finished", f"{experiment.compared} at the end"]
    head += [f"at {_amount(results.equal_hours or 0)} {cost}", f"reward, last {REWARD_STEPS}"]
    head += ["RL time", cost, "core-hours", "trained tokens", "tokens/s"]
    rows = []
    for variant, runs in results.by_variant.items():
        counted = results.counted(variant)
        rewards = [run.reward[1][-1] for run in counted if run.steps]
        values = (results.ends(variant), results.at_equal_hours(variant), rewards)
        finished = f"{sum(run.is_finished for run in runs)} of {len(experiment.settings.seeds)}"
        rows.append([variant, finished, *map(format_mean, values), *_costs(counted)])
    note = f"{OF_SEEDS}, ± half of the 95 % t-interval; costs are those of the RL phase."
    return Sheet(title="Variants", note=note, head=head, rows=rows)


def _costs(runs: list[RunResult]) -> list[str]:
    """Return the mean costs of a variant's runs as five table cells, without the runs that made no step."""
    stepped = [run for run in runs if run.last is not None]
    lasts = [run.last for run in stepped if run.last is not None]
    if not lasts:
        return [NOTHING] * 5
    core_hours = [run.core_hours for run in stepped if run.core_hours is not None]
    return [
        format_duration(fmean(run.costs.rl_s for run in stepped)),
        _amount(fmean(run.device_hours for run in stepped)),
        _amount(fmean(core_hours)) if core_hours else NOTHING,
        f"{fmean(last.trained_tokens for last in lasts):,.0f}",
        f"{fmean(trained_per_s(last) for last in lasts):,.0f}",
    ]


def _tails(results: Results) -> Sheet:
    """Make the table of response lengths and data ages by variant."""
    rows = []
    for variant in results.by_variant:
        runs = results.counted(variant)
        tails = [(run.lengths.p50, run.lengths.p95, run.lengths.p99) for run in runs if run.lengths is not None]
        lengths = [f"{fmean(column):,.0f}" for column in zip(*tails, strict=True)] or [NOTHING] * 3
        steps = [row for run in runs for row in run.steps]
        mean = f"{fmean(row.staleness_mean for row in steps):.2f}" if steps else NOTHING
        most = str(max(row.staleness_max for row in steps)) if steps else NOTHING
        waiting = [run.last.learner_waiting_share for run in runs if run.last is not None]
        rows.append([variant, *lengths, mean, most, f"{fmean(waiting):.0%}" if waiting else NOTHING])
    head = ["variant", "response tokens p50", "p95", "p99", "staleness, mean", "at most", "learner waiting"]
    note = f"{OF_SEEDS}, of every training response; staleness in learner steps, of trained responses."
    return Sheet(title="Tails and staleness", note=note, head=head, rows=rows)


def _charts(results: Results) -> list[Chart]:
    """Make the charts of every evaluation set over hours, tokens and steps, then of reward and costs."""
    places: dict[str, Callable[[Point], float]] = {
        f"{results.device}-hours of RL": lambda point: point.device_hours,
        "trained tokens": lambda point: point.tokens,
        "step": lambda point: point.step,
    }
    charts = []
    for name, (x, place) in itertools.product(results.sets, places.items()):
        bands = results.bands(partial(RunResult.evaluated, name=name, place=place))
        charts.append(Chart(title=f"{name} over {x}", x=x, y=results.name_of_results(name), bands=bands))
    lines: dict[str, tuple[str, Callable[[RunResult], Line]]] = {
        "Reward": (f"mean reward of the last {REWARD_STEPS} steps", lambda run: run.reward),
        "Response length, p50": ("tokens", lambda run: run.over_steps(lambda row: row.length_p50)),
        "Response length, p95": ("tokens", lambda run: run.over_steps(lambda row: row.length_p95)),
        "Throughput": ("trained tokens per second, so far", lambda run: run.over_steps(trained_per_s)),
        "Staleness": ("learner steps, mean", lambda run: run.over_steps(lambda row: row.staleness_mean)),
    }
    for title, (y, line) in lines.items():
        charts.append(Chart(title=title, x="step", y=y, bands=results.bands(line)))
    return charts


def _changes(experiment: Experiment) -> Sheet:
    """Make the table of the settings in which variants differ."""
    rows = [[key, *(_value(value) for value in values)] for key, values in experiment.changes]
    also = " with the settings of `set`" if experiment.settings.set else ""
    note = f"All other settings are as in {experiment.settings.base}{also}." if rows else "There are none."
    return Sheet(title="Differences of the configs", note=note, head=["setting", *experiment.variants], rows=rows)


def _runs(results: Results, progress: list[RunProgress]) -> Sheet:
    """Make the table of all runs."""
    compared = results.experiment.compared
    counted = {entry.run.name: entry for entry in results.all}
    rows = []
    for entry in progress:
        result = counted.get(entry.run.name)
        figures = [NOTHING] * 6 if result is None else _figures(result, compared)
        state = "not counted" if entry.run.name in results.left_out else entry.state
        rows.append([entry.run.name, f"{entry.step} of {entry.run.config.steps}", *figures, state])
    head = ["run", "step", compared, "reward", "RL time", f"{results.device}-hours", "trained tokens"]
    return Sheet(title="Runs", head=[*head, "length p50 / p95 / p99", "state"], rows=rows, words=1)


def _figures(run: RunResult, compared: str) -> list[str]:
    """Return the figures of a run as six table cells; `compared` is the evaluation set of the first."""
    points, last, lengths = run.evaluations.get(compared, []), run.last, run.lengths
    return [
        f"{points[-1].value:.3f}" if points else NOTHING,
        NOTHING if last is None else f"{last.reward:.3f}",
        format_duration(run.costs.rl_s),
        _amount(run.device_hours),
        NOTHING if last is None else f"{last.trained_tokens:,}",
        NOTHING if lengths is None else f"{lengths.p50:,.0f} / {lengths.p95:,.0f} / {lengths.p99:,.0f}",
    ]


def format_duration(seconds: float) -> str:
    """Format a duration, e.g. "3 h 20 min", "10 min", "4 min 5 s" or "50 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min" if minutes >= 10 else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _value(value: object) -> str:
    return NOTHING if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()
