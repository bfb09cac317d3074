"""`report.html` of an experiment: one file without network, drawn from what run folders hold at the moment.

Called at the end of `laminar launch`, and by `--report` at any time. Owns which curves and tables there are.
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
from laminar_lab.launcher.results import Band, Line, Results, RunResult, trained_per_s
from laminar_lab.launcher.standing import RunState, Standing, format_duration, read_standings
from laminar_py.observe import Card, render

NOTHING = "–"
OF_SEEDS = "Means over the seeds that have finished, or before any has, over those that were begun"


class Chart(msgspec.Struct, frozen=True, kw_only=True):
    """Curves of all variants in one pair of axes."""

    title: str
    x: str  # title of the axis
    y: str
    bands: list[Band]


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """Table of texts; columns from the second on are numbers, but for the last `words`."""

    title: str
    note: str = ""
    head: list[str]
    rows: list[list[str]]
    words: int = 0


class ExperimentPage(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that the page shows, from top to bottom."""

    name: str
    state: str
    headline: list[Card]
    variants: list[str]
    counted: list[str]  # [variants] words on how many seeds count, where that is not all
    first: list[Sheet]
    charts: list[Chart]
    last: list[Sheet]


def write_page(experiment: Experiment) -> Path:
    """Draw the experiment into its folder, whole or not at all, and say where."""
    page = make_page(experiment, read_standings(experiment))
    html = render(msgspec.json.encode(page), files("laminar_lab.launcher") / "web")
    written = experiment.report.with_suffix(".tmp")
    written.write_text(html, "utf-8")
    written.replace(experiment.report)
    return experiment.report


def make_page(experiment: Experiment, standings: list[Standing]) -> ExperimentPage:
    """Everything that the page shows."""
    results = Results(experiment, standings)
    failed = [one for one in standings if one.state is RunState.FAILED]
    ended = sum(one.state is RunState.FINISHED for one in standings)
    return ExperimentPage(
        name=experiment.settings.name,
        state=f"{ended} of {len(standings)} runs have finished",
        headline=_headline(results),
        variants=experiment.variants,
        counted=[_counted(results, variant) for variant in experiment.variants],
        first=[*_failures(failed), *_left_out(results.left_out), _outcomes(results)],
        charts=_charts(results),
        last=[_tails(results), _changes(experiment), _runs(results)],
    )


def _counted(results: Results, variant: str) -> str:
    """E.g. "2 of 3 seeds", or "" for all."""
    runs, every = results.counted(variant), len(results.experiment.settings.seeds)
    unfinished = not all(one.is_finished for one in runs)
    told = f"{len(runs)} of {every} seeds{', not finished' if unfinished else ''}"
    return told if unfinished or len(runs) < every else ""


def _headline(results: Results) -> list[Card]:
    experiment, found = results.experiment, list[Card]()
    whole = {name: runs for name, runs in results.by_variant.items() if _is_whole(experiment, runs)}
    best = max(whole, key=lambda name: _mean_end(whole[name]), default="")
    ends = _ends(whole.get(best, []))
    if ends:
        name = experiment.compared
        note = f"{best}: the highest {results.word(name)}, {_of_seeds(len(ends))}"
        found.append(Card(f"best at the end: {name}", format_mean(ends), note))
    counts = Counter(one.state for one in results.standings)
    others = ", ".join(
        f"{counts[state]} {state}" for state in RunState if counts[state] and state is not RunState.FINISHED
    )
    finished, every = counts[RunState.FINISHED], len(results.standings)
    found.append(Card("runs finished", f"{finished} of {every}", others or "all"))
    hours = sum(one.device_hours for one in results.all)
    found.append(Card(f"{results.device}-hours", _amount(hours), "of RL, all runs"))
    core_hours = [one.core_hours for one in results.all if one.core_hours is not None]
    if results.device == "process" and core_hours:
        found.append(Card("CPU core-hours", _amount(sum(core_hours)), "used in RL, all runs"))
    trained = sum(one.last.trained_tokens for one in results.all if one.last is not None)
    found.append(Card("trained tokens", f"{trained:,}", "all runs"))
    return found


def _is_whole(experiment: Experiment, runs: list[RunResult]) -> bool:
    """True where all seeds have finished: a mean over survivors says nothing of a variant."""
    return sum(one.is_finished for one in runs) == len(experiment.settings.seeds)


def _outcomes(results: Results) -> Sheet:
    """Row for each variant: what it reached, and what that cost."""
    experiment, cost = results.experiment, f"{results.device}-hours"
    head = ["variant", "finished", f"{experiment.compared} at the end"]
    head += [f"at {_amount(results.equal_hours or 0)} {cost}", f"reward, last {REWARD_STEPS}"]
    head += ["RL time", cost, "core-hours", "trained tokens", "tokens/s"]
    rows = []
    for variant, runs in results.by_variant.items():
        ended = sum(one.is_finished for one in runs)
        counted = results.counted(variant)
        rewards = [one.reward[1][-1] for one in counted if one.steps]
        values = (_ends(runs), results.at_equal_hours(variant), rewards)
        finished = f"{ended} of {len(experiment.settings.seeds)}"
        rows.append([variant, finished, *map(format_mean, values), *_costs(counted)])
    note = f"{OF_SEEDS}, ± half of the 95 % t-interval; costs are those of the RL phase."
    return Sheet(title="Variants", note=note, head=head, rows=rows)


def _costs(runs: list[RunResult]) -> list[str]:
    done = [(one, one.last) for one in runs]
    lasts = [last for _, last in done if last is not None]
    if not lasts:
        return [NOTHING] * 5
    stepped = [one for one, last in done if last is not None]
    core_hours = [one.core_hours for one in stepped if one.core_hours is not None]
    return [
        format_duration(fmean(one.costs.rl_s for one in stepped)),
        _amount(fmean(one.device_hours for one in stepped)),
        _amount(fmean(core_hours)) if core_hours else NOTHING,
        f"{fmean(last.trained_tokens for last in lasts):,.0f}",
        f"{fmean(trained_per_s(last) for last in lasts):,.0f}",
    ]


def _tails(results: Results) -> Sheet:
    """Row for each variant: how long its responses are, and how old its data."""
    rows = []
    for variant in results.by_variant:
        runs = results.counted(variant)
        tails = [one.tails for one in runs if one.tails is not None]
        lengths = [f"{fmean(tail[place] for tail in tails):,.0f}" if tails else NOTHING for place in range(3)]
        steps = [row for one in runs for row in one.steps]
        mean = f"{fmean(row.staleness_mean for row in steps):.2f}" if steps else NOTHING
        most = str(max(row.staleness_max for row in steps)) if steps else NOTHING
        waiting = [one.last.learner_waiting_share for one in runs if one.last is not None]
        waited = f"{fmean(waiting):.0%}" if waiting else NOTHING
        rows.append([variant, *lengths, mean, most, waited])
    head = ["variant", "response tokens p50", "p95", "p99", "staleness, mean", "at most", "learner waiting"]
    note = f"{OF_SEEDS}, of every training response; staleness in learner steps, of what was trained on."
    return Sheet(title="Tails and staleness", note=note, head=head, rows=rows)


def _charts(results: Results) -> list[Chart]:
    places: dict[str, Callable[[Point], float]] = {
        f"{results.device}-hours of RL": lambda point: point.device_hours,
        "trained tokens": lambda point: point.tokens,
        "step": lambda point: point.step,
    }
    charts = []
    for name, (x, place) in itertools.product(results.sets, places.items()):
        bands = results.bands(partial(RunResult.evaluated, name=name, place=place))
        charts.append(Chart(title=f"{name} over {x}", x=x, y=results.word(name), bands=bands))
    lines: dict[str, tuple[str, Callable[[RunResult], Line]]] = {
        "Reward": (f"mean reward of the last {REWARD_STEPS} steps", lambda one: one.reward),
        "Response length, p50": ("tokens", lambda one: one.over_steps(lambda row: row.length_p50)),
        "Response length, p95": ("tokens", lambda one: one.over_steps(lambda row: row.length_p95)),
        "Throughput": ("trained tokens per second, so far", lambda one: one.over_steps(trained_per_s)),
        "Staleness": ("learner steps, mean", lambda one: one.over_steps(lambda row: row.staleness_mean)),
    }
    for title, (y, line) in lines.items():
        charts.append(Chart(title=title, x="step", y=y, bands=results.bands(line)))
    return charts


def _failures(failed: list[Standing]) -> list[Sheet]:
    rows = [[one.run.name, one.why, str(one.run.log)] for one in failed]
    return [Sheet(title="Runs that failed", head=["run", "why", "log"], rows=rows, words=2)] if rows else []


def _left_out(runs: list[RunResult]) -> list[Sheet]:
    rows = [[one.standing.run.name, one.left_out] for one in runs]
    note = "Their files cannot be read, or they were made with other settings."
    title = "Runs that no figure counts"
    return [Sheet(title=title, note=note, head=["run", "why"], rows=rows, words=1)] if rows else []


def _changes(experiment: Experiment) -> Sheet:
    """Settings in which variants differ."""
    rows = [[key, *(_value(value) for value in values)] for key, values in experiment.changes]
    also = " with what `set` says" if experiment.settings.set else ""
    note = f"All else is as in {experiment.settings.base}{also}." if rows else "There are none."
    return Sheet(title="Differences of the configs", note=note, head=["setting", *experiment.variants], rows=rows)


def _runs(results: Results) -> Sheet:
    name = results.experiment.compared
    begun = {one.standing.run.name: one for one in results.all}
    left_out = {one.standing.run.name for one in results.left_out}
    rows = []
    for standing in results.standings:
        one = begun.get(standing.run.name)
        figures = [NOTHING] * 6 if one is None else _figures_of(one)
        state = "not counted" if standing.run.name in left_out else standing.state
        rows.append([standing.run.name, f"{standing.step} of {standing.run.config.steps}", *figures, state])
    head = [
        "run",
        "step",
        name,
        "reward",
        "RL time",
        f"{results.device}-hours",
        "trained tokens",
        "length p50 / p95 / p99",
        "state",
    ]
    return Sheet(title="Runs", head=head, rows=rows, words=1)


def _figures_of(one: RunResult) -> list[str]:
    last, tails = one.last, one.tails
    return [
        f"{one.points[-1].value:.3f}" if one.points else NOTHING,
        NOTHING if last is None else f"{last.reward:.3f}",
        format_duration(one.costs.rl_s),
        _amount(one.device_hours),
        NOTHING if last is None else f"{last.trained_tokens:,}",
        NOTHING if tails is None else " / ".join(f"{length:,.0f}" for length in tails),
    ]


def _ends(runs: list[RunResult]) -> list[float]:
    """Last results of runs that have finished."""
    return [one.points[-1].value for one in runs if one.points and one.standing.state is RunState.FINISHED]


def _mean_end(runs: list[RunResult]) -> float:
    ends = _ends(runs)
    return fmean(ends) if ends else float("-inf")


def _of_seeds(count: int) -> str:
    return "one seed" if count == 1 else f"{count} seeds, ± half of the 95 % interval"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _value(value: object) -> str:
    return NOTHING if value is None else value if isinstance(value, str) else msgspec.json.encode(value).decode()
