"""Panels beside the timeline: headline, histograms, staleness, curves, relays, the step, drops. Called by `page`.

Pure functions of a report and its snapshot, but for ids of dropped trajectories.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np

from laminar_py.observe.analytics.measure.tails import COUNTED, NAMES, Measure, distribution, measures
from laminar_py.observe.analytics.read.columns import REASONS, Times, Trajectories
from laminar_py.observe.analytics.read.history import History
from laminar_py.observe.analytics.read.snapshot import Snapshot
from laminar_py.observe.analytics.show.panels import (
    Curves,
    DropKind,
    DroppedTrajectory,
    EvaluationCurve,
    Figure,
    Histogram,
    LearnerCurves,
    RelayHop,
    StageBar,
    StalenessMap,
)
from laminar_py.observe.analytics.show.timeline import natural, thin
from laminar_py.observe.analytics.show.walls import stage_bars
from laminar_py.observe.analytics.triage.report import RunReport
from laminar_py.records.events import Evaluated, Pulled, Reattached, Relayed, VersionPublished
from laminar_py.records.trajectory import DropReason, Status

MOST_BINS, MOST_COLUMNS, MOST_POINTS, MOST_RECENT, MOST_ROWS, NUM_EXAMPLES = 50, 240, 2_000, 60, 200, 3


def headline(report: RunReport) -> list[Figure]:
    """Figures that a reader wants first."""
    snapshot, tokens, figures = report.snapshot, report.tokens, list[Figure]()
    if report.simulation:
        figures.append(Figure("simulated", "no real run", report.simulation))
    if report.diagnosis is not None:
        wall = str(report.diagnosis.binding.wall)
        figures.append(Figure("limited by", wall, "evidence and remedies are below"))
    words = f"{tokens.useful:,} useful in {report.rl_s:,.1f} s of RL"
    figures.append(Figure("goodput", f"{tokens.goodput:,.0f} tokens/s", words))
    figures += [_evaluation(name, passes) for name, passes in snapshot.history.of_sets.items()]
    state = "has not ended" if snapshot.history.live else "has ended"
    figures.append(Figure("learner steps", f"{len(snapshot.history.steps):,}", f"the run {state}"))
    train = snapshot.trajectories
    used, dropped = (int(train.is_status(status).sum()) for status in (Status.CONSUMED, Status.DROPPED))
    words = f"{used:,} consumed + {dropped:,} dropped + {len(train) - used - dropped:,} live"
    figures.append(Figure("trajectories", f"{len(train):,}", words))
    if Measure.TURNS in report.tails.overall:
        figures.append(_turns(report))
    if (staleness := report.staleness) is not None:
        words = f"versions, the mean; {staleness.max} at most"
        figures.append(Figure("staleness", f"{staleness.mean:.2f}", words))
    return figures


def _turns(report: RunReport) -> Figure:
    """Turns of a trajectory, and how much of its time on a replica its environment takes."""
    train, turns = report.snapshot.trajectories, report.tails.overall[Measure.TURNS]
    known = ~np.isnan(train.environment_s)
    spent_s = float(np.sum(train.finished_s[known] - train.started_s[known]))
    share = float(train.environment_s[known].sum()) / spent_s if spent_s > 0 else 0.0
    words = (
        f"of the model, the mean; {turns.max:.0f} at most; environments take {share:.0%} of the time on replicas"
    )
    return Figure("turns", f"{turns.mean:.2f}", words)


def _evaluation(name: str, passes: Sequence[Evaluated]) -> Figure:
    """The last evaluation of a set, beside its first."""
    last = passes[-1].figures
    words = f"{passes[0].figures.mean.value:.3f} at the first evaluation; the last: {last.tell()}"
    return Figure(f"{name}: {last.name}", f"{last.mean.value:.3f}", words)


def histograms(train: Trajectories) -> list[Histogram]:
    """Response lengths first, turns where there are some, then times."""
    return [_histogram(measure, values) for measure, values in measures(train).items()]


def _histogram(measure: Measure, values: Times) -> Histogram:
    """Histogram of the values that are known; times have a logarithmic axis."""
    log, found = measure not in COUNTED, distribution(values)
    edges, counts = np.empty(0), np.empty(0, np.int64)
    if found is not None:
        known = values[~np.isnan(values)]
        least = max(float(np.percentile(known, 0.1)), 1e-4) if log else float(known.min())
        most = max(found.max, least * 1.01 if log else least + 1)
        edges = np.geomspace(least, most, MOST_BINS + 1) if log else np.linspace(least, most, MOST_BINS + 1)
        counts, _ = np.histogram(np.clip(known, least, most), edges)
    return Histogram(
        name=NAMES[measure],
        unit=COUNTED.get(measure, "s"),
        log=log,
        edges=edges.tolist(),
        counts=counts.tolist(),
        percentiles={} if found is None else found.percentiles,
        total=0 if found is None else found.count,
    )


def staleness_map(train: Trajectories) -> StalenessMap:
    """Map of everything that was consumed."""
    consumed = train.is_status(Status.CONSUMED)
    step, staleness = train.step[consumed], train.staleness[consumed]
    if not len(step):
        return StalenessMap([], 1, [], [])
    first, last, oldest = int(step.min()), int(step.max()), int(staleness.max())
    per_column = -(-(last - first + 1) // MOST_COLUMNS)
    columns = (step - first) // per_column
    counts = np.zeros((oldest + 1, int(columns.max()) + 1), np.int64)
    np.add.at(counts, (np.clip(staleness, 0, None), columns), 1)
    starts = [first + column * per_column for column in range(counts.shape[1])]
    return StalenessMap(starts, per_column, list(range(oldest + 1)), counts.tolist())


def curves(snapshot: Snapshot) -> Curves:
    """Reward of what each step's time brought, entropy of what it trained, evaluations."""
    ends = {step.step: at_s for at_s, step in snapshot.history.steps}
    rows = [row for row in thin(snapshot.samples.steps, MOST_POINTS) if row.step in ends]
    return Curves(
        [round(row.rl_s, 3) for row in rows],
        _rewards_until(snapshot.trajectories, np.array([ends[row.step] for row in rows], np.float64)),
        [round(row.entropy, 5) for row in rows],
        [
            EvaluationCurve(
                name=f"{name}: {passes[-1].figures.name}",
                rl_s=[one.rl_s for one in passes],
                mean=[one.figures.mean.value for one in passes],
                low=[one.figures.mean.low for one in passes],
                high=[one.figures.mean.high for one in passes],
            )
            for name, passes in snapshot.history.of_sets.items()
        ],
    )


def learner_curves(snapshot: Snapshot) -> LearnerCurves:
    """Figures of the steps that count."""
    train, counted = snapshot.trajectories, {step.step for _, step in snapshot.history.steps}
    rows = [row for row in thin(snapshot.samples.steps, MOST_POINTS) if row.step in counted]
    used = train.where(train.is_status(Status.CONSUMED))
    counts, tokens = np.bincount(used.step), np.bincount(used.step, weights=used.length)
    with np.errstate(invalid="ignore"):
        lengths = dict(enumerate(np.round(tokens / counts, 2).tolist()))
    return LearnerCurves(
        steps=[row.step for row in rows],
        loss=[row.loss for row in rows],
        grad_norm=[row.grad_norm for row in rows],
        kl=[row.kl_behaviour_k3 for row in rows],
        clipped=[row.clip_fraction for row in rows],
        effective=[row.effective_share for row in rows],
        length=[lengths.get(row.step, np.nan) for row in rows],
    )


def _rewards_until(train: Trajectories, ends_s: Times) -> list[float]:
    """Mean rewards [S] of scores between these moments [S], the first since the start; NaN: nothing was scored."""
    known = ~np.isnan(train.scored_s) & ~np.isnan(train.reward)
    place = np.searchsorted(ends_s, train.scored_s[known])
    counts = np.bincount(place, minlength=len(ends_s) + 1)[: len(ends_s)]
    sums = np.bincount(place, weights=train.reward[known], minlength=len(ends_s) + 1)[: len(ends_s)]
    with np.errstate(invalid="ignore"):
        found: list[float] = np.round(sums / counts, 5).tolist()
    return found


def relay_hops(history: History) -> list[RelayHop]:
    """Relays, root first, then subscribers that pull from them."""
    relayed, pulled = defaultdict[str, list[Relayed]](list), defaultdict[str, list[Pulled]](list)
    for _, event in history.of(Relayed):
        relayed[event.node].append(event)
    for _, pull in history.of(Pulled):
        pulled[pull.subscriber].append(pull)
    left = Counter(event.node for _, event in history.of(Reattached))
    return [
        *(_relay_hop(name, relayed[name], left[name]) for name in sorted(relayed, key=natural)),
        *(_subscriber_hop(name, pulled[name]) for name in sorted(pulled, key=natural)),
    ]


def _relay_hop(name: str, events: list[Relayed], left_parent: int) -> RelayHop:
    size, came = sum(event.num_bytes for event in events), sum(event.wire_bytes for event in events)
    return RelayHop(
        name=name,
        parent=events[-1].parent,
        is_relay=True,
        versions=len(events),
        median_s=median(event.elapsed_s for event in events),
        worst_s=max(event.elapsed_s for event in events),
        first_byte_s=median(event.first_byte_s for event in events),
        wire_share=came / size if size else 0.0,
        left_parent=left_parent,
        recent=[(event.version, event.elapsed_s, event.parent) for event in events[-MOST_RECENT:]],
    )


def _subscriber_hop(name: str, pulls: list[Pulled]) -> RelayHop:
    return RelayHop(
        name=name,
        parent=pulls[-1].node,
        is_relay=False,
        versions=len(pulls),
        median_s=median(pull.waited_s for pull in pulls),
        worst_s=max(pull.waited_s for pull in pulls),
        recent=[(pull.version, pull.waited_s, pull.node) for pull in pulls[-MOST_RECENT:]],
    )


def step_bars(report: RunReport) -> tuple[list[StageBar], float]:
    """Bars of the mean step, and its seconds: as diagnosed, else those of the learner, one after the other."""
    history = report.snapshot.history
    if report.diagnosis is not None:
        step = report.diagnosis.mean_step
        bars = stage_bars(step.schedule, step.times, report.diagnosis.binding.wall)
        if bars:
            return bars, step.measured_s
    return _learner_bars(history) if history.steps else ([], 0.0)


def _learner_bars(history: History) -> tuple[list[StageBar], float]:
    ends = [at_s for at_s, _ in history.steps]
    steps = [step for _, step in history.steps]
    whole = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else steps[0].elapsed_s
    waited, busy = fmean(step.waited_s for step in steps), fmean(step.elapsed_s for step in steps)
    reference = fmean(step.reference_s for step in steps)
    stall = fmean([event.stall_s for _, event in history.of(VersionPublished)] or [0.0])
    note = f"of it, or beside it, {reference:.3f} s in the reference model" if reference > 1e-3 * busy else ""
    times = [
        ("waiting for a batch", waited, ""),
        ("learner", busy, note),
        ("publishing", stall, "it stands still for the copy of its weights"),
        ("the rest", max(0.0, whole - waited - busy - stall), "commits, checkpoints, evaluations"),
    ]
    longest = max(seconds for _, seconds, _ in times)
    bars, start_s = list[StageBar](), 0.0
    for name, seconds, note in times:
        bars.append(StageBar(name=name, start_s=start_s, seconds=seconds, binding=seconds == longest, note=note))
        start_s += seconds
    return bars, whole


def drops(snapshot: Snapshot) -> tuple[list[DropKind], list[DroppedTrajectory]]:
    """Drops by reason, the most frequent first; and rows of each reason, the newest first.

    Those without signal are counted alone: groups whose rewards are equal are no loss to look into one by one.
    """
    train = snapshot.trajectories
    dropped = train.is_status(Status.DROPPED)
    codes, counts = np.unique(train.drop[dropped], return_counts=True)
    kinds, rows = list[DropKind](), list[DroppedTrajectory]()
    silent = REASONS.index(DropReason.NO_SIGNAL)
    each = max(1, MOST_ROWS // max(1, int((codes != silent).sum())))
    for code, count in sorted(zip(codes.tolist(), counts.tolist(), strict=True), key=lambda pair: -pair[1]):
        of_kind = train.where(dropped & (train.drop == code))
        rewards = of_kind.reward[~np.isnan(of_kind.reward)]
        kinds.append(
            DropKind(
                reason=str(REASONS[code]),
                count=count,
                mean_length=float(of_kind.length.mean()),
                mean_reward=float(rewards.mean()) if len(rewards) else None,
                examples=snapshot.ids(of_kind.number[:NUM_EXAMPLES]),
            )
        )
        if code != silent:
            rows += [DroppedTrajectory(*row) for row in snapshot.dropped(of_kind.number[-each:])]
    return kinds, rows
