"""`report.html`: which panels a run's page has, and their data. One file without network.

`laminar report` writes the file, and the dashboard serves the same page with fresh data. Each panel is bounded,
however long the run (`tests/report/test_page.py`). Single trajectories over time are in `trace.json` for
Perfetto.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from rich.text import Text

from laminar_lab.audit.sample_lines import Colour, describe_sample
from laminar_lab.audit.samples import newest_contrasts, read_samples
from laminar_lab.report.diagnosis import BALANCED, MEANINGS, Diagnosis, describe_diagnosis
from laminar_lab.report.figures import headline
from laminar_lab.report.kit import Card, Chart, Heat, Panel, Series, Table, render
from laminar_lab.report.learning import LearningFinding
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import Snapshot, Stop
from laminar_lab.report.tails import (
    COUNTED,
    NAMES,
    Measure,
    distribution,
    format_duration,
    format_seconds,
    measures,
)
from laminar_lab.report.tokens import TOKEN_COLUMNS, token_cells
from laminar_lab.report.trace import keep_evenly, occupancy, write_beside
from laminar_lab.report.trajectories import Ints, Times, Trajectories
from laminar_py.config.loading import dump_config
from laminar_py.records.events import SettingChanged
from laminar_py.records.host import counted
from laminar_py.records.metrics import CriticFigures
from laminar_py.records.scoring import short_terms
from laminar_py.records.trajectory import Status

REPORT_NAME = "report.html"
MOST_BINS, MOST_COLUMNS, MOST_POINTS = 50, 240, 2_000
MOST_MARKS = 12  # stops, on a chart over time
MOST_TEXTS = 12  # responses on the page
MOST_TERMS = 6  # of the reward, each a chart
MOST_CELLS, MOST_TIMES, MOST_STEPS = 60_000, 600, 400  # of the timeline


_PLACES = (Measure.GENERATION, *Measure)  # of the choices: the panel opens on generation


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """Data of a run's page."""

    name: str
    seq: int
    live: bool  # as `History.live`
    heard_s: float  # time of the last event, seconds since 1970
    note: str = ""  # beside the name, instead of words on the end of the run
    cards: list[Card]
    panels: list[Panel]


def write_page(report: RunReport) -> Path:
    """Write the page into the folder of the run and return its path."""
    return write_beside(report, REPORT_NAME, render_page(make_page(report)).encode())


def encode_page(page: Page) -> bytes:
    """Return a page as JSON; numbers that are not finite become null."""
    return msgspec.json.encode(page)


def render_page(page: Page | None) -> str:
    """Return the HTML of a page. Without data the page requests `data.json` again and again."""
    return render(b"null" if page is None else encode_page(page), files("laminar_lab.report") / "web")


def make_page(report: RunReport) -> Page:
    """Return the data of a run's page."""
    snapshot, train = report.snapshot, report.snapshot.trajectories
    lengths, latencies = distribution_panels(train)
    config = "" if snapshot.config is None else dump_config(snapshot.config)
    return Page(
        name=snapshot.name,
        seq=snapshot.seq,
        live=snapshot.history.live,
        heard_s=snapshot.heard_s,
        cards=headline(report),
        panels=[
            *([] if report.diagnosis is None else [bottleneck_panel(report.diagnosis, report.learning)]),
            timeline_panel(snapshot),
            lengths,
            latencies,
            staleness_panel(train, snapshot.replays),
            tokens_panel(report),
            curves_panel(snapshot),
            rewards_panel(snapshot),
            learner_panel(snapshot),
            texts_panel(snapshot.run),
            *([Panel(id="config", title="Config", text=config, is_wide=True)] if config else []),
        ],
    )


def texts_panel(run: Path) -> Panel:
    """Return the panel that shows responses from the newest groups, as `laminar samples` prints them."""
    note = f"The best and worst of the newest groups; laminar samples {run} shows any."
    lines: list[Text] = []
    try:
        ids = [row.id for row in newest_contrasts(run, limit=MOST_TEXTS)]
        for sample in read_samples(run, ids):
            lines += [*describe_sample(sample, colour=Colour.NONE, full=False), Text()]
    except ValueError as error:  # a `ConfigError`, or a response whose pieces have a gap
        note = str(error)
    text = "\n".join(line.plain for line in lines)
    return Panel(id="texts", title="What the model wrote", note=note, text=text, is_wide=True)


def bottleneck_panel(diagnosis: Diagnosis, learning: Sequence[LearningFinding]) -> Panel:
    """Return the panel of the bottleneck and of what slows learning, with the evidence that the terminal shows."""
    bottleneck = diagnosis.binding.bottleneck
    lines = [f"{heading}: {words}" for heading, words in describe_diagnosis(diagnosis)]
    lines += [f"learning: {finding}" for finding in learning]
    return Panel(
        id="wall",
        title="What limits this run",
        lead=diagnosis.verdict.lower(),
        note=BALANCED if diagnosis.is_balanced else MEANINGS[bottleneck],
        lines=lines,
        is_wide=True,
    )


def timeline_panel(snapshot: Snapshot) -> Panel:
    """Return the panel of replicas over time, by their number of trajectories, with the learner steps."""
    residences, stops = snapshot.residences, snapshot.history.stops
    residences = replace(
        residences,
        start_s=without_stops(residences.start_s, stops),
        end_s=without_stops(residences.end_s, stops),
    )
    end_s = max(float(without_stops(np.array([snapshot.end_s]), stops)[0]), 1e-3)
    bins = max(1, min(MOST_TIMES, MOST_CELLS // max(1, len(np.unique(residences.replica)))))
    edges = np.linspace(0.0, end_s, bins + 1)
    running = {replica: mean for replica, mean, _ in occupancy(residences, edges=edges)}
    heat = Heat(
        name="trajectories",
        x=np.round((edges[1:] + edges[:-1]) / 2, 3).tolist(),
        y=[f"replica {replica}" for replica in running],
        z=[[round(value, 2) for value in row.tolist()] for row in running.values()],
    )
    chart = Chart(
        x="time since the first trajectory (s)" + (", without stops" if stops else ""),
        y="",
        heat=heat,
        series=list(_step_bars(snapshot)),
        marks=stop_marks(stops, without_stops(np.array([stop.begin_s for stop in stops], np.float64), stops)),
        is_empty=not running,
    )
    note = (
        f"{counted(len(snapshot.all_trajectories), 'trajectory')}. The colour of a replica is its number of"
        " trajectories; grey is idle."
        " Single trajectories, weights, moves and crashes are in trace.json, for Perfetto."
    )
    return Panel(id="timeline", title="Timeline", note=note, charts=[chart], is_wide=True)


def without_stops(times: Times, stops: Sequence[Stop]) -> Times:
    """Return times [N] less the seconds without a controller before each, so that a chart has no empty night."""
    stopped_s = [np.clip(times - stop.begin_s, 0.0, stop.end_s - stop.begin_s) for stop in stops]
    return times - np.sum(stopped_s, axis=0) if stopped_s else times


def stop_marks(stops: Sequence[Stop], at: Sequence[float] | Times) -> list[tuple[str, float]]:
    """Return marks of the last stops, whose places on the axis are `at` [S]."""
    places = zip(stops, at, strict=True)
    marks = [(f"stopped for {format_duration(stop.end_s - stop.begin_s)}", float(place)) for stop, place in places]
    return marks[-MOST_MARKS:]


def _change_marks(snapshot: Snapshot, rl_s: Mapping[int, float]) -> list[tuple[str, float]]:
    """Return marks of the last changes of settings; `rl_s` has seconds of RL by step."""
    changes = [change for _, change in snapshot.history.of_kind(SettingChanged)][-MOST_MARKS:]
    return [(f"{change.name}={change.value}", rl_s.get(change.step, 0.0)) for change in changes]


def _step_bars(snapshot: Snapshot) -> Iterator[Series]:
    """Yield bars of the learner steps, each with the mean reward of its trajectories."""
    train, steps = snapshot.trajectories, keep_evenly(snapshot.history.steps, MOST_STEPS)
    at = without_stops(np.array([at_s for at_s, _ in steps], np.float64), snapshot.history.stops).tolist()
    used = train.is_status(Status.CONSUMED) & ~np.isnan(train.reward)
    rewards = _means_by_step(train.step[used], train.reward[used])
    if steps:
        yield Series(
            name="learner step",
            kind="row",
            x=[round(step.elapsed_s, 4) for _, step in steps],
            y=["learner"] * len(steps),
            base=[round(end_s - step.elapsed_s, 4) for end_s, (_, step) in zip(at, steps, strict=True)],
            words=[
                f"learner, step {step.step}: {format_seconds(step.elapsed_s)},"
                f" after {format_seconds(step.waited_s)} without a batch;"
                f" {counted(step.num_trajectories, 'trajectory')},"
                f" {step.num_tokens:,} tokens, reward {rewards.get(step.step, np.nan):.3g}"
                for _, step in steps
            ],
        )


def distribution_panels(train: Trajectories) -> tuple[Panel, Panel]:
    """Return the panel of lengths (and turns, if there are any), and the panel of times."""
    values = measures(train)
    counted = [_histogram(name, column) for name, column in values.items() if name in COUNTED]
    stages = sorted(values.keys() - COUNTED.keys(), key=_PLACES.index)
    times = [_histogram(name, values[name]) for name in stages]
    return (
        Panel(id="lengths", title="Response length", charts=counted, choose="of"),
        Panel(id="latencies", title="Latency", charts=times, choose="stage"),
    )


def _histogram(measure: Measure, values: Times) -> Chart:
    """Return the histogram of known values; times have a logarithmic axis."""
    log, found, name = measure not in COUNTED, distribution(values), NAMES[measure]
    title = f"{name} (log scale)" if log else f"{name} ({COUNTED[measure]})"
    if found is None:
        return Chart(name=name, x=title, y="trajectories", is_empty=True)
    known = values[~np.isnan(values)]
    least = max(float(np.percentile(known, 0.1)), 1e-4) if log else float(known.min())
    most = max(found.max, least * 1.01 if log else least + 1)
    edges = np.geomspace(least, most, MOST_BINS + 1) if log else np.linspace(least, most, MOST_BINS + 1)
    counts, _ = np.histogram(np.clip(known, least, most), edges)
    middles = np.sqrt(edges[1:] * edges[:-1]) if log else (edges[1:] + edges[:-1]) / 2
    show = format_seconds if log else "{:,.0f}".format
    bars = zip(edges, edges[1:], counts.tolist(), strict=False)
    series = Series(
        name=name,
        kind="bar",
        x=middles.tolist(),
        y=counts.tolist(),
        width=np.diff(edges).tolist(),
        words=[f"{show(low)} to {show(high)}: {count:,}" for low, high, count in bars],
    )
    marks = [(f"{name} {show(value)}", value) for name, value in found.percentiles.items()]
    return Chart(name=name, x=title, y="trajectories", series=[series], marks=marks, log=log)


def staleness_panel(train: Trajectories, replays: Ints) -> Panel:
    """Return the panel of consumed and of replayed trajectories by step, or by several steps, and staleness."""
    consumed = train.is_status(Status.CONSUMED)
    charts = [_staleness_chart("consumed", train.step[consumed], train.staleness[consumed])]
    if len(replays):
        charts.append(_staleness_chart("replayed", replays[:, 0], replays[:, 1]))
    return Panel(id="staleness", title="Staleness", charts=charts)


def _staleness_chart(name: str, step: Ints, staleness: Ints) -> Chart:
    """Return the chart of trajectories with [N] step and staleness."""
    if not len(step):
        return Chart(x="step", y="staleness", is_empty=True)
    first, last, oldest = int(step.min()), int(step.max()), int(staleness.max())
    per_column = -(-(last - first + 1) // MOST_COLUMNS)
    columns = (step - first) // per_column
    counts = np.zeros((oldest + 1, int(columns.max()) + 1), np.int64)
    np.add.at(counts, (np.clip(staleness, 0, None), columns), 1)
    starts = [float(first + column * per_column) for column in range(counts.shape[1])]
    heat = Heat(name="trajectories", x=starts, y=list(range(oldest + 1)), z=counts.tolist())
    title = f"step (a column is {per_column})" if per_column > 1 else "step"
    return Chart(name=name, x=title, y="learner steps old", heat=heat)


def curves_panel(snapshot: Snapshot) -> Panel:
    """Return the panel of rewards, evaluations and entropy over seconds of RL, with each set's last evaluation."""
    ends = {step.step: at_s for at_s, step in snapshot.history.steps}
    rows = [row for row in keep_evenly(snapshot.samples.steps, MOST_POINTS) if row.step in ends]
    at_s = [round(row.rl_s, 3) for row in rows]
    rewards = rewards_until(snapshot.trajectories, np.array([ends[row.step] for row in rows], np.float64))
    series = [Series(name="reward", x=at_s, y=rewards)] if rows else []
    for place, (name, passes) in enumerate(snapshot.history.evaluations_by_set.items()):
        means = [one.figures.mean for one in passes]
        series.append(
            Series(
                name=f"{name}: {passes[-1].figures.name}",
                colour=("second", "third", "ink", "quiet")[place % 4],
                x=[one.rl_s for one in passes],
                y=[mean.value for mean in means],
                low=[mean.low for mean in means],
                high=[mean.high for mean in means],
            )
        )
    entropy = Series(name="entropy", colour="third", x=at_s, y=[round(row.entropy, 5) for row in rows])
    is_empty = all(math.isnan(row.entropy) for row in rows)
    stops, rl_s = snapshot.history.stops, {row.step: row.rl_s for row in snapshot.samples.steps}
    chart = partial(
        Chart,
        x="time of the RL phase (s)",
        marks=[*stop_marks(stops, [rl_s.get(stop.step, 0.0) for stop in stops]), *_change_marks(snapshot, rl_s)],
        from_zero=True,
    )
    charts = [
        chart(name="reward, evaluations", y="", series=series, is_empty=not series),
        chart(name="entropy", y="nats", series=[entropy], is_empty=is_empty),
    ]
    lines = [
        f"{name}: {last.figures.describe()}" for name, (*_, last) in snapshot.history.evaluations_by_set.items()
    ]
    return Panel(id="curves", title="Reward, evaluations, entropy", lines=lines, charts=charts, is_wide=True)


def learner_panel(snapshot: Snapshot) -> Panel:
    """Return the panel of the learner's figures over steps that were not undone."""
    train, counted = snapshot.trajectories, {step.step for _, step in snapshot.history.steps}
    rows = [row for row in keep_evenly(snapshot.samples.steps, MOST_POINTS) if row.step in counted]
    used = train.where(train.is_status(Status.CONSUMED))
    lengths, steps = _means_by_step(used.step, used.length), [float(row.step) for row in rows]
    found = {
        "loss": [row.loss for row in rows],
        "gradient norm": [row.grad_norm for row in rows],
        "learning rate": [row.learning_rate for row in rows],
        "mean response (tokens)": [lengths.get(row.step, np.nan) for row in rows],
        "KL from the sampling policy (nats)": [row.kl_behaviour_k3 for row in rows],
        "share of the tokens clipped": [row.clip_fraction for row in rows],
        "effective sample size, share of the tokens": [row.effective_share for row in rows],
    }
    if any(row.critic for row in rows):
        critics = [row.critic or CriticFigures() for row in rows]
        found["loss of the critic"] = [critic.value_loss for critic in critics]
        found["variance of targets that the critic explains"] = [critic.explained_variance for critic in critics]
    charts = [
        step_chart(name, steps, values, from_zero=name not in ("loss", "gradient norm"))
        for name, values in found.items()
    ]
    return Panel(id="learner", title="Learner steps", charts=charts, is_wide=True)


def rewards_panel(snapshot: Snapshot) -> Panel:
    """Return the panel of rewards over steps that were not undone: groups, cut answers, each term."""
    counted = {step.step for _, step in snapshot.history.steps}
    rows = [row for row in keep_evenly(snapshot.samples.steps, MOST_POINTS) if row.step in counted]
    steps = [float(row.step) for row in rows]
    found = {
        "standard deviation within a group": [row.reward_std for row in rows],
        "share of groups whose rewards are all equal": [row.frac_reward_zero_std for row in rows],
        "share of answers cut by a cap": [row.clipped_ratio for row in rows],
    }
    terms = short_terms({name: name for row in rows for name in row.reward_terms})
    for shown, name in list(terms.items())[:MOST_TERMS]:
        found[f"mean of {shown}"] = [row.reward_terms.get(name, np.nan) for row in rows]
    charts = [step_chart(name, steps, values) for name, values in found.items()]
    return Panel(id="rewards", title="Rewards", charts=charts, is_wide=True)


def step_chart(name: str, steps: list[float], values: list[float], *, from_zero: bool = True) -> Chart:
    """Return the chart of a figure over steps; it is empty if no step has the figure."""
    series = [Series(name=name, x=steps, y=values)]
    return Chart(
        name=name, x="step", y="", series=series, from_zero=from_zero, is_empty=bool(np.isnan(values).all())
    )


def _means_by_step(
    step: npt.NDArray[np.integer], values: npt.NDArray[np.floating | np.integer]
) -> dict[int, float]:
    """Return the mean value of each step that has values."""
    counts, sums = np.bincount(step), np.bincount(step, weights=values)
    return {at: round(float(sums[at] / counts[at]), 4) for at in np.flatnonzero(counts).tolist()}


def rewards_until(train: Trajectories, ends_s: Times) -> list[float]:
    """Return the mean reward [S] of scores since the previous of these times [S]; NaN without a score."""
    known = ~np.isnan(train.scored_s) & ~np.isnan(train.reward)
    place = np.searchsorted(ends_s, train.scored_s[known])
    means = _means_by_step(place, train.reward[known])
    return [means.get(step, np.nan) for step in range(len(ends_s))]


def tokens_panel(report: RunReport) -> Panel:
    """Return the panel with the waterfall of tokens."""
    rows = token_cells(report.tokens) if report.tokens.issued_trajectories else []
    tables = [Table(head=["", *TOKEN_COLUMNS], rows=rows)] if rows else []
    return Panel(id="tokens", title="Where the tokens went", tables=tables)
