"""Panels of the page of a run, each made of its figures. Called by `page`.

Invariant: every panel is bounded, however long the run; where a bound leaves something out, the panel says so. The
timeline has how many trajectories a replica runs; single trajectories are in the trace for Perfetto.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from laminar_py.config.rollout import Schedule
from laminar_py.observe.diagnosis import MEANINGS, STAGE_OF, Diagnosis, wall_rows
from laminar_py.observe.kit import Chart, Heat, Panel, Series, Table
from laminar_py.observe.mean_step import StageTimes, StepStage
from laminar_py.observe.record import History, Snapshot
from laminar_py.observe.remedies import Wall
from laminar_py.observe.report import RunReport
from laminar_py.observe.tails import COUNTED, NAMES, Measure, distribution, measures, tell_seconds
from laminar_py.observe.trace import natural, occupancy, thin
from laminar_py.observe.trajectories import REASONS, StayEnd, Stays, Times, Trajectories
from laminar_py.records.events import (
    Checkpointed,
    PartDied,
    Pulled,
    Reattached,
    Relayed,
    RolledBack,
    VersionLoaded,
    VersionPublished,
)
from laminar_py.records.trajectory import DropReason, Status

Event = TypeVar("Event")

MOST_BINS, MOST_COLUMNS, MOST_POINTS, MOST_ROWS, NUM_EXAMPLES = 50, 240, 2_000, 200, 3
MOST_CELLS, MOST_TIMES, MOST_MARKS = 60_000, 600, 400  # of the timeline
MOST_VERSIONS, MOST_HOPS = 20, 128  # of the relay tree: a larger one is told of all versions together
DRAWN_S = 1e-4  # of a stage: less has no bar


def wall_panel(diagnosis: Diagnosis) -> Panel:
    """What limits the run, its evidence as the terminal tells it, and what to change."""
    binding = diagnosis.binding
    advice = ("change first", "or instead")
    evidence = [
        f"{heading}: {words}".removeprefix(": ")
        for heading, words in wall_rows(diagnosis)
        if heading not in advice
    ]
    return Panel(
        id="wall",
        title="What limits this run",
        lead=str(binding.wall),
        note=MEANINGS[binding.wall],
        lists=[evidence, [f"{one.key}: {one.change}: {one.why}" for one in binding.remedies]],
        is_wide=True,
    )


# ---- the timeline


def timeline(snapshot: Snapshot) -> Panel:
    """Replicas over time, as how many trajectories each has or under which weights; learner steps and events."""
    stays, history, end_s = snapshot.stays, snapshot.history, max(snapshot.end_s, 1e-3)
    loaded = {event.replica for _, event in history.of_kind(VersionLoaded)}
    replicas = sorted(set(np.unique(stays.replica).tolist()) | loaded)
    rows = [f"replica {replica}" for replica in replicas]
    bins = max(1, min(MOST_TIMES, MOST_CELLS // max(1, len(replicas))))
    edges = np.linspace(0.0, end_s, bins + 1)
    grids = _occupancies(stays, replicas, edges)
    marks = [*_steps(snapshot), *_marks(snapshot)]
    names = {"trajectories": "running", "version": "weight version", "in environments": "in environments"}
    charts = [
        Chart(
            name=name,
            x="time since the first trajectory (s)",
            y="",
            heat=Heat(name=unit, x=np.round((edges[1:] + edges[:-1]) / 2, 3).tolist(), y=rows, z=grid),
            series=marks,
            is_empty=not rows,
        )
        for (unit, name), grid in zip(names.items(), grids, strict=True)
        if unit != "in environments" or snapshot.everyone.has_turns
    ]
    note = (
        f"{len(snapshot.everyone):,} trajectories. A row is a replica: how many it has at a time, or the mean"
        " version of their weights; grey is idle. Single trajectories are in trace.json, for Perfetto."
    )
    return Panel(id="timeline", title="Timeline", note=note, charts=charts, choose="show", is_wide=True)


def _occupancies(stays: Stays, replicas: list[int], edges: Times) -> list[list[list[float]]]:
    """Mean number running, mean version and mean number away: three grids of [replicas][bins]."""
    by_replica = stays.where(np.argsort(stays.replica, kind="stable"))  # so that each replica is one slice
    bounds = np.searchsorted(by_replica.replica, [*replicas, (replicas or [0])[-1] + 1])
    grids: list[list[list[float]]] = [[], [], []]
    for replica, first, last in zip(replicas, bounds, bounds[1:], strict=False):
        found = occupancy(by_replica.where(np.arange(first, last)), replica=replica, edges=edges)
        for grid, row in zip(grids, found, strict=True):
            grid.append([round(value, 2) for value in row.tolist()])
    return grids


def _steps(snapshot: Snapshot) -> Iterator[Series]:
    """Bars of the learner steps, each with the mean reward of what it trained on."""
    train, steps = snapshot.trajectories, thin(snapshot.history.steps, MOST_MARKS)
    used = train.is_status(Status.CONSUMED) & ~np.isnan(train.reward)
    rewards = _means_of(train.step[used], train.reward[used])
    if steps:
        yield Series(
            name="learner step",
            kind="row",
            x=[round(step.elapsed_s, 4) for _, step in steps],
            y=["learner"] * len(steps),
            base=[round(at_s - step.elapsed_s, 4) for at_s, step in steps],
            words=[
                f"learner, step {step.step}: {tell_seconds(step.elapsed_s)},"
                f" after {tell_seconds(step.waited_s)} without a batch; {step.num_trajectories:,} trajectories,"
                f" {step.num_tokens:,} tokens, reward {rewards.get(step.step, np.nan):.3g}"
                for _, step in steps
            ],
        )


class _Mark(NamedTuple):
    at_s: float
    row: str
    words: str


def _marks(snapshot: Snapshot) -> Iterator[Series]:
    """What happened at a moment, each kind with a sign of its own."""
    history = snapshot.history
    found = {
        ("publish", "second", "triangle-up"): [
            _Mark(at_s, "learner", f"version {one.version} published, stall {one.stall_s * 1000:.1f} ms")
            for at_s, one in history.of_kind(VersionPublished)
        ],
        ("weights loaded", "ink", "line-ns-open"): [
            _Mark(at_s, f"replica {one.replica}", f"version {one.version} loaded in {one.elapsed_s * 1000:.1f} ms")
            for at_s, one in history.of_kind(VersionLoaded)
        ],
        ("checkpoint", "third", "square"): [
            _Mark(at_s, "learner", f"checkpoint of step {one.step}, {one.elapsed_s:.2f} s")
            for at_s, one in history.of_kind(Checkpointed)
        ],
        ("repack, other move", "quiet", "arrow-right"): list(_moves(snapshot.stays)),
        ("death, roll-back", "alarm", "x"): [
            *(
                _Mark(
                    at_s, f"replica {number}" if stem == "replica" else "learner", f"{one.part} died: {one.reason}"
                )
                for at_s, one in history.of_kind(PartDied)
                for stem, number in [natural(one.part)]
            ),
            *(
                _Mark(at_s, "learner", f"back to step {one.step}: {one.reason}")
                for at_s, one in history.of_kind(RolledBack)
            ),
        ],
    }
    for (name, colour, symbol), every in found.items():
        if marks := thin(every, MOST_MARKS):
            yield Series(
                name=name,
                kind="points",
                colour=colour,
                symbol=symbol,
                x=[round(mark.at_s, 4) for mark in marks],
                y=[mark.row for mark in marks],
                words=[f"{mark.words} ({mark.at_s:.2f} s)" for mark in marks],
            )


def _row_of(part: str) -> str:
    return part.replace("-", " ") if part.startswith("replica-") else "learner"


def _moves(stays: Stays) -> Iterator[_Mark]:
    """Moves from each stay to the next of the same trajectory, those of a moment together."""
    places = np.flatnonzero(
        (stays.trajectory[1:] == stays.trajectory[:-1]) & (stays.replica[1:] != stays.replica[:-1])
    )
    columns = (
        np.round(stays.end_s[places], 1),
        stays.replica[places],
        stays.replica[places + 1],
        stays.end[places],
    )
    counts = Counter(zip(*(column.tolist() for column in columns), strict=True))
    for (at_s, source, to, end), count in sorted(counts.items()):
        words = "repacked" if end == StayEnd.MOVED else "moved"
        yield _Mark(at_s, f"replica {source}", f"{count} {words} to replica {to}")


# ---- distributions, staleness, the step


def distribution_panels(train: Trajectories) -> tuple[Panel, Panel]:
    """Lengths, and turns where there are some; then times."""
    values = measures(train)
    counted = [_histogram(one, column) for one, column in values.items() if one in COUNTED]
    times = [_histogram(one, column) for one, column in values.items() if one not in COUNTED]
    return (
        Panel(id="lengths", title="Response length", charts=counted, choose="of"),
        Panel(id="latencies", title="Latency", charts=times, choose="stage"),
    )


def _histogram(measure: Measure, values: Times) -> Chart:
    """Histogram of the values that are known; times have a logarithmic axis."""
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
    bars = zip(edges, edges[1:], counts.tolist(), strict=False)
    words = [f"{_told(low, measure)} to {_told(high, measure)}: {count:,}" for low, high, count in bars]
    series = Series(
        name=name,
        kind="bar",
        x=middles.tolist(),
        y=counts.tolist(),
        width=np.diff(edges).tolist(),
        words=words,
    )
    marks = list(found.percentiles.items())
    return Chart(name=name, x=title, y="trajectories", series=[series], marks=marks, log=log)


def _told(value: float, measure: Measure) -> str:
    return f"{value:,.0f}" if measure in COUNTED else tell_seconds(value)


def staleness_panel(train: Trajectories) -> Panel:
    """Map of what was consumed: trajectories by step, or several steps, and staleness."""
    consumed = train.is_status(Status.CONSUMED)
    step, staleness = train.step[consumed], train.staleness[consumed]
    if not len(step):
        empty = Chart(x="step", y="staleness", is_empty=True)
        return Panel(id="staleness", title="Staleness", charts=[empty])
    first, last, oldest = int(step.min()), int(step.max()), int(staleness.max())
    per_column = -(-(last - first + 1) // MOST_COLUMNS)
    columns = (step - first) // per_column
    counts = np.zeros((oldest + 1, int(columns.max()) + 1), np.int64)
    np.add.at(counts, (np.clip(staleness, 0, None), columns), 1)
    starts = [float(first + column * per_column) for column in range(counts.shape[1])]
    heat = Heat(name="trajectories", x=starts, y=list(range(oldest + 1)), z=counts.tolist())
    title = f"step (a column is {per_column})" if per_column > 1 else "step"
    return Panel(id="staleness", title="Staleness", charts=[Chart(x=title, y="learner steps old", heat=heat)])


class StageBar(NamedTuple):
    """Stage of the mean step, which begins `start_s` into it, e.g. generation from 0 s on for 31.5 s, binding."""

    name: str
    start_s: float
    seconds: float
    binding: bool


def stage_bars(schedule: Schedule, times: StageTimes, wall: Wall) -> list[StageBar]:
    """Bars of a mean step: stages that wait for each other one after another, see `mean_step.compose`."""
    turns = times.generation_s + times.environment_s
    rollout = max(turns, times.reward_s, times.reference_s)
    match schedule:
        case Schedule.SYNC:
            begin = {StepStage.LEARNER: rollout, StepStage.WEIGHTS: rollout + times.learner_s}
        case Schedule.ONE_STEP:
            begin = {StepStage.WEIGHTS: max(rollout, times.learner_s)}
        case Schedule.ASYNC:
            begin = {StepStage.WEIGHTS: turns}
    begin[StepStage.ENVIRONMENT] = times.generation_s
    of_wall = StepStage.GENERATION if wall is Wall.LONG_TAIL else STAGE_OF.get(wall)
    return [
        StageBar(str(stage), begin.get(stage, 0.0), times.of(stage), stage is of_wall)
        for stage in StepStage
        if times.of(stage) >= DRAWN_S
    ]


def step_panel(report: RunReport) -> Panel:
    """Bars of the mean step as it was diagnosed, else those of the learner, one after the other."""
    history, bars, step_s = report.snapshot.history, list[StageBar](), 0.0
    if report.diagnosis is not None:
        step = report.diagnosis.mean_step
        bars, step_s = stage_bars(step.schedule, step.times, report.diagnosis.binding.wall), step.measured_s
    if not bars and history.steps:
        bars, step_s = _learner_bars(history)
    series = Series(
        name="stage",
        kind="row",
        x=[bar.seconds for bar in bars],
        y=[bar.name for bar in bars],
        base=[bar.start_s for bar in bars],
        colours=["second" if bar.binding else "accent" for bar in bars],
        words=[f"{bar.name}: {tell_seconds(bar.seconds)}" for bar in bars],
    )
    title = f"time in the step (s); measured: {tell_seconds(step_s)}"
    note = "Stages that begin together run at the same time. Orange: what limits the run, or the longest."
    charts = [Chart(x=title, y="", series=[series], is_empty=not bars)]
    return Panel(id="step", title="The mean step", note=note if bars else "", charts=charts)


def _learner_bars(history: History) -> tuple[list[StageBar], float]:
    ends, steps = [at_s for at_s, _ in history.steps], [step for _, step in history.steps]
    whole = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else steps[0].elapsed_s
    waited, busy = fmean(step.waited_s for step in steps), fmean(step.elapsed_s for step in steps)
    stall = fmean([event.stall_s for _, event in history.of_kind(VersionPublished)] or [0.0])
    times = {"waiting for a batch": waited, "learner": busy, "publishing": stall}
    times["the rest"] = max(0.0, whole - waited - busy - stall)
    longest, bars, start_s = max(times.values()), list[StageBar](), 0.0
    for name, seconds in times.items():
        bars.append(StageBar(name, start_s, seconds, seconds == longest))
        start_s += seconds
    return bars, whole


# ---- curves


def curves_panel(snapshot: Snapshot) -> Panel:
    """Reward of what each step's time brought and evaluations; entropy of what each step trained."""
    ends = {step.step: at_s for at_s, step in snapshot.history.steps}
    rows = [row for row in thin(snapshot.samples.steps, MOST_POINTS) if row.step in ends]
    at_s = [round(row.rl_s, 3) for row in rows]
    rewards = rewards_until(snapshot.trajectories, np.array([ends[row.step] for row in rows], np.float64))
    series = [Series(name="reward", x=at_s, y=rewards)] if rows else []
    for place, (name, passes) in enumerate(snapshot.history.of_sets.items()):
        means = [one.figures.mean for one in passes]
        series.append(
            Series(
                name=f"{name}: {passes[-1].figures.name}",
                colour=("second", "third", "ink", "quiet")[place % 4],
                symbol=("circle", "square", "diamond", "x")[place // 4 % 4],
                x=[one.rl_s for one in passes],
                y=[mean.value for mean in means],
                low=[mean.low for mean in means],
                high=[mean.high for mean in means],
            )
        )
    entropy = Series(name="entropy", colour="third", x=at_s, y=[round(row.entropy, 5) for row in rows])
    time, charts = "time of the RL phase (s)", list[Chart]()
    charts.append(Chart(name="reward, evaluations", x=time, y="", series=series, is_empty=not series))
    charts.append(Chart(name="entropy", x=time, y="nats", series=[entropy], from_zero=True, is_empty=not rows))
    return Panel(id="curves", title="Reward, evaluations, entropy", charts=charts, is_wide=True)


def learner_panel(snapshot: Snapshot) -> Panel:
    """Figures of the steps that count; NaN where one is not known."""
    train, counted = snapshot.trajectories, {step.step for _, step in snapshot.history.steps}
    rows = [row for row in thin(snapshot.samples.steps, MOST_POINTS) if row.step in counted]
    used = train.where(train.is_status(Status.CONSUMED))
    lengths, steps = _means_of(used.step, used.length), [float(row.step) for row in rows]
    found = {
        "loss": [row.loss for row in rows],
        "gradient norm": [row.grad_norm for row in rows],
        "mean response (tokens)": [lengths.get(row.step, np.nan) for row in rows],
        "KL from the policy that drew (nats)": [row.kl_behaviour_k3 for row in rows],
        "share of the tokens clipped": [row.clip_fraction for row in rows],
        "effective sample size, share of the tokens": [row.effective_share for row in rows],
    }
    charts = [
        Chart(
            name=name,
            x="step",
            y="",
            series=[Series(name=name, x=steps, y=values)],
            from_zero=name not in ("loss", "gradient norm"),
            is_empty=not rows,
        )
        for name, values in found.items()
    ]
    return Panel(id="learner", title="Learner steps", charts=charts, is_wide=True)


def _means_of(step: npt.NDArray[np.integer], values: npt.NDArray[np.floating | np.integer]) -> dict[int, float]:
    """Mean value of what each step has."""
    counts, sums = np.bincount(step), np.bincount(step, weights=values)
    return {at: round(float(sums[at] / counts[at]), 4) for at in np.flatnonzero(counts).tolist()}


def rewards_until(train: Trajectories, ends_s: Times) -> list[float]:
    """Mean rewards [S] of scores between these moments [S], the first since the start; NaN: nothing was scored."""
    known = ~np.isnan(train.scored_s) & ~np.isnan(train.reward)
    place = np.searchsorted(ends_s, train.scored_s[known])
    means = _means_of(place, train.reward[known])
    return [means.get(step, np.nan) for step in range(len(ends_s))]


# ---- relays and drops


class RelayHop(NamedTuple):
    """Relay or, as a leaf, subscriber; seconds of its versions, each with the parent that it came from."""

    name: str
    parent: str  # "" at the root, or where the ledger does not tell
    is_relay: bool
    taken: dict[int, tuple[float, str]]  # by version
    note: str = ""


def relay_panel(history: History) -> Panel:
    """Who got versions from whom, in what time: of all versions, and of each of the newest."""
    hops = [*_relay_hops(history), *_subscriber_hops(history)]
    versions = sorted({version for hop in hops for version in hop.taken}, reverse=True)[:MOST_VERSIONS]
    tables = [_relay_table("all", hops)]
    for version in versions if len(hops) <= MOST_HOPS else ():
        of_one = [
            hop._replace(parent=hop.taken[version][1], taken={version: hop.taken[version]})
            for hop in hops
            if version in hop.taken
        ]
        tables.append(_relay_table(str(version), of_one))
    note = (
        "Seconds from a node's first request for a version until it held all of it, verified; for a replica, until"
    )
    return Panel(
        id="relays",
        title="Relay tree",
        note=f"{note} its relay handed it over.",
        tables=tables if hops else [],
        choose="version",
        is_wide=True,
    )


def _relay_table(name: str, hops: Sequence[RelayHop]) -> Table:
    """Rows of the tree, each below its parent and behind a sign of its depth."""
    below, names = defaultdict[str, list[RelayHop]](list), {hop.name for hop in hops}
    for hop in hops:
        below[hop.parent if hop.parent in names and hop.parent != hop.name else ""].append(hop)
    rows, waiting, seen = list[list[str]](), [(hop, 0) for hop in reversed(below[""])], set[str]()
    while waiting:
        hop, depth = waiting.pop()
        if hop.name in seen:
            continue
        seen.add(hop.name)
        times = [seconds for seconds, _ in hop.taken.values()]
        told = [tell_seconds(median(times)), tell_seconds(max(times))]
        rows.append(["· " * depth + hop.name, hop.parent, f"{len(times):,}", *told, hop.note])
        waiting += [(one, depth + 1) for one in reversed(below[hop.name])]
    head = ["node", "from", "versions", "median", "longest", ""]
    return Table(name=name, head=head, rows=rows, words=1)


def _relay_hops(history: History) -> Iterator[RelayHop]:
    relayed = _grouped((event.node, event) for _, event in history.of_kind(Relayed))
    left = Counter(event.node for _, event in history.of_kind(Reattached))
    for name in sorted(relayed, key=natural):
        events = relayed[name]
        size, came = sum(event.num_bytes for event in events), sum(event.wire_bytes for event in events)
        note = f"{came / max(1, size):.1%} of whole versions came over the wire"
        note += f", left its parent {left[name]} times" if left[name] else ""
        taken = {event.version: (event.elapsed_s, event.parent) for event in events}
        yield RelayHop(name, events[-1].parent, True, taken, note)


def _subscriber_hops(history: History) -> Iterator[RelayHop]:
    pulled = _grouped((pull.subscriber, pull) for _, pull in history.of_kind(Pulled))
    for name in sorted(pulled, key=natural):
        pulls = pulled[name]
        yield RelayHop(name, pulls[-1].node, False, {pull.version: (pull.waited_s, pull.node) for pull in pulls})


def _grouped(pairs: Iterable[tuple[str, Event]]) -> dict[str, list[Event]]:
    found = defaultdict[str, list[Event]](list)
    for name, event in pairs:
        found[name].append(event)
    return found


def drops_panel(snapshot: Snapshot) -> Panel:
    """Drops by reason, the most frequent first; and rows of each reason, the newest first.

    Those without signal are counted alone: groups whose rewards are equal are no loss to look into one by one.
    """
    train = snapshot.trajectories
    dropped = train.is_status(Status.DROPPED)
    codes, counts = np.unique(train.drop[dropped], return_counts=True)
    kinds, rows = list[list[str]](), list[list[str]]()
    silent = REASONS.index(DropReason.NO_SIGNAL)
    each = max(1, MOST_ROWS // max(1, int((codes != silent).sum())))
    for code, count in sorted(zip(codes.tolist(), counts.tolist(), strict=True), key=lambda pair: -pair[1]):
        of_kind = train.where(dropped & (train.drop == code))
        rewards = of_kind.reward[~np.isnan(of_kind.reward)]
        reward = f"{rewards.mean():.3f}" if len(rewards) else "–"
        examples = ", ".join(snapshot.ids(of_kind.number[:NUM_EXAMPLES]))
        reason = str(REASONS[code]).replace("_", " ")
        kinds.append([reason, f"{count:,}", f"{of_kind.length.mean():,.0f}", reward, examples])
        rows += map(_drop_row, snapshot.dropped(of_kind.number[-each:])) if code != silent else []
    whole = int((dropped & (train.drop != silent)).sum())
    note = f"The newest {len(rows):,} of {whole:,}; " if len(rows) < whole else f"All {whole:,}; "
    head = ["trajectory", "tokens", "reward", "replica", "at", "reason"]
    by_reason = Table(head=["reason", "number", "mean tokens", "mean reward", "examples"], rows=kinds, words=1)
    newest = Table(
        note=f"{note}groups without signal are counted, not listed.",
        head=head,
        rows=rows,
        words=1,
        opens_texts=True,
        has_filter=True,
    )
    return Panel(
        id="drops", title="Dropped trajectories", tables=[by_reason, newest] if kinds else [], is_wide=True
    )


def _drop_row(row: tuple[str, str, str, int, float | None, int | None, float]) -> list[str]:
    id, reason, detail, length, reward, replica, at_s = row
    told = ["–" if reward is None else f"{reward:.3g}", "–" if replica is None else str(replica)]
    return [
        id,
        f"{length:,}",
        *told,
        f"{at_s:.1f} s",
        f"{reason.replace('_', ' ')}{f': {detail}' if detail else ''}",
    ]
