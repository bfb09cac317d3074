"""The panels beside the timeline: headline, distributions, staleness, curves, relays, the step, drops.

Called by `page`; pure functions of a snapshot, but for ids of dropped trajectories.
"""

import sqlite3
from collections import Counter, defaultdict
from statistics import fmean, median

import numpy as np
import numpy.typing as npt

from laminar_py.analytics.read.columns import REASONS, Times, Trajectories
from laminar_py.analytics.show.panels import (
    Curves,
    Distribution,
    DropKind,
    DropRow,
    Figure,
    Hop,
    StageBar,
    StalenessMap,
    WallPanel,
)
from laminar_py.analytics.show.snapshot import Snapshot
from laminar_py.analytics.show.timeline import ids_of, natural, thin
from laminar_py.records.events import Pulled, Reattached, Relayed, VersionPublished
from laminar_py.records.trajectory import Status

PERCENTILES = (50, 95, 99)
MOST_BINS, MOST_COLUMNS, MOST_POINTS, MOST_RECENT, MOST_ROWS, NUM_EXAMPLES = 50, 240, 2_000, 60, 200, 3

Values = npt.NDArray[np.floating] | npt.NDArray[np.integer]


def headline(snapshot: Snapshot, wall: WallPanel | None) -> list[Figure]:
    """What a reader wants first."""
    train, figures = snapshot.trajectories, list[Figure]()
    if wall is not None:
        figures.append(Figure("limited by", wall.name, "evidence and remedies are below"))
    consumed = train.is_status(Status.CONSUMED)
    dropped = int(train.is_status(Status.DROPPED).sum())
    used, rl_s = int(consumed.sum()), snapshot.rl_s
    words = f"{snapshot.useful_tokens:,} useful in {rl_s:,.1f} s of RL"
    figures.append(Figure("goodput", f"{snapshot.goodput:,.0f} tokens/s", words))
    if snapshot.accuracies:
        first, last = snapshot.accuracies[0][1], snapshot.accuracies[-1][1]
        figures.append(Figure("held-out accuracy", f"{last:.3f}", f"{first:.3f} at the first evaluation"))
    state = "has not ended" if snapshot.live else "has ended"
    figures.append(Figure("learner steps", f"{len(snapshot.history.steps):,}", f"the run {state}"))
    live = len(train) - used - dropped
    words = f"{used:,} consumed + {dropped:,} dropped + {live:,} live"
    figures.append(Figure("trajectories", f"{len(train):,}", words))
    staleness = train.staleness[consumed]
    if used:
        figures.append(
            Figure("staleness", f"{staleness.mean():.2f}", f"versions, the mean; {staleness.max()} at most")
        )
    return figures


def latencies(train: Trajectories) -> dict[str, npt.NDArray[np.floating]]:
    """Seconds of the stages of a trajectory's way, each of all that have passed it."""
    consumed = train.is_status(Status.CONSUMED)
    return {
        "end to end": _known((train.ended_s - train.issued_s)[consumed]),
        "generation": _known(train.generate_s),
        "waiting in the engine": _known(train.queue_s),
        "reward": _known(train.scored_s - train.finished_s),
        "waiting for the group": _known(train.ready_s - train.scored_s),
        "in the buffer": _known((train.ended_s - train.ready_s)[consumed]),
    }


def lengths(train: Trajectories) -> npt.NDArray[np.int32]:
    """Response tokens of those that are finished."""
    found: npt.NDArray[np.int32] = train.length[~np.isnan(train.finished_s)]
    return found


def distributions(train: Trajectories) -> list[Distribution]:
    """Response lengths first, then latencies."""
    first = _distribution("response length", "tokens", lengths(train), log=False)
    return [first, *(_distribution(name, "s", values, log=True) for name, values in latencies(train).items())]


def percentiles(values: Values) -> dict[str, float]:
    """p50, p95, p99; none of nothing."""
    if not len(values):
        return {}
    found = np.percentile(values, PERCENTILES, method="inverted_cdf")
    return {f"p{q}": float(value) for q, value in zip(PERCENTILES, found, strict=True)}


def _distribution(name: str, unit: str, values: Values, *, log: bool) -> Distribution:
    if not len(values):
        return Distribution(name=name, unit=unit, log=log, edges=[], counts=[], percentiles={}, total=0)
    least = max(float(np.percentile(values, 0.1)), 1e-4) if log else float(values.min())
    most = max(float(values.max()), least * 1.01 if log else least + 1)
    edges = np.geomspace(least, most, MOST_BINS + 1) if log else np.linspace(least, most, MOST_BINS + 1)
    counts, _ = np.histogram(np.clip(values, least, most), edges)
    return Distribution(
        name=name,
        unit=unit,
        log=log,
        edges=edges.tolist(),
        counts=counts.tolist(),
        percentiles=percentiles(values),
        total=len(values),
    )


def _known(values: npt.NDArray[np.floating]) -> npt.NDArray[np.floating]:
    found: npt.NDArray[np.floating] = values[~np.isnan(values)]
    return found


def staleness_map(train: Trajectories) -> StalenessMap:
    """Of all that was consumed."""
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
    """Reward of what each step's time brought, entropy of what it trained, held-out accuracy."""
    lines = thin(list(snapshot.metrics), MOST_POINTS)
    ends = {step.step: at_s for at_s, step in snapshot.history.steps}
    lines = [line for line in lines if line.step in ends]
    return Curves(
        [round(line.rl_s, 3) for line in lines],
        _rewards_until(snapshot.trajectories, np.array([ends[line.step] for line in lines], np.float64)),
        [round(line.entropy, 5) for line in lines],
        snapshot.accuracies,
    )


def _rewards_until(train: Trajectories, ends_s: Times) -> list[float]:
    """[S] mean rewards of what was scored between these moments [S], the first since the start; NaN: nothing."""
    known = ~np.isnan(train.scored_s) & ~np.isnan(train.reward)
    place = np.searchsorted(ends_s, train.scored_s[known])
    counts = np.bincount(place, minlength=len(ends_s) + 1)[: len(ends_s)]
    sums = np.bincount(place, weights=train.reward[known], minlength=len(ends_s) + 1)[: len(ends_s)]
    with np.errstate(invalid="ignore"):
        found: list[float] = np.round(sums / counts, 5).tolist()
    return found


def hops(snapshot: Snapshot) -> list[Hop]:
    """Relays, root first, then those that pull from them."""
    history = snapshot.history
    relayed, pulled = defaultdict[str, list[Relayed]](list), defaultdict[str, list[Pulled]](list)
    for _, event in history.of(Relayed):
        relayed[event.node].append(event)
    for _, pull in history.of(Pulled):
        pulled[pull.subscriber].append(pull)
    left = Counter(event.node for _, event in history.of(Reattached))
    found = []
    for name in sorted(relayed, key=natural):
        events = relayed[name]
        took = [event.elapsed_s for event in events]
        size, came = sum(event.num_bytes for event in events), sum(event.wire_bytes for event in events)
        recent = [(event.version, event.elapsed_s, event.parent) for event in events[-MOST_RECENT:]]
        first = median(event.first_byte_s for event in events)
        share = came / size if size else 0.0
        parent = events[-1].parent
        found.append(
            Hop(
                name=name,
                parent=parent,
                is_relay=True,
                versions=len(events),
                median_s=median(took),
                worst_s=max(took),
                first_byte_s=first,
                wire_share=share,
                left_parent=left[name],
                recent=recent,
            )
        )
    for name in sorted(pulled, key=natural):
        pulls = pulled[name]
        took = [pull.waited_s for pull in pulls]
        recent = [(pull.version, pull.waited_s, pull.node) for pull in pulls[-MOST_RECENT:]]
        found.append(
            Hop(
                name=name,
                parent=pulls[-1].node,
                is_relay=False,
                versions=len(pulls),
                median_s=median(took),
                worst_s=max(took),
                first_byte_s=0.0,
                wire_share=0.0,
                left_parent=0,
                recent=recent,
            )
        )
    return found


def step_stages(snapshot: Snapshot) -> tuple[list[StageBar], float]:
    """What the mean step of the learner consists of, one after the other; and how long it is."""
    steps = snapshot.history.steps
    if not steps:
        return [], 0.0
    ends = [at_s for at_s, _ in steps]
    whole = (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else steps[0][1].elapsed_s
    stalls = [event.stall_s for _, event in snapshot.history.of(VersionPublished)]
    waited = fmean(step.waited_s for _, step in steps)
    busy = fmean(step.elapsed_s for _, step in steps)
    reference = fmean(step.reference_s for _, step in steps)
    stall = fmean(stalls) if stalls else 0.0
    note = f"of it, or beside it, {reference:.3f} s in the reference model" if reference > 1e-3 * busy else ""
    parts = [
        ("waiting for a batch", waited, ""),
        ("learner", busy, note),
        ("publishing", stall, "it stands still for the copy of its weights"),
        ("the rest", max(0.0, whole - waited - busy - stall), "commits, checkpoints, evaluations"),
    ]
    longest = max(seconds for _, seconds, _ in parts)
    stages, start_s = [], 0.0
    for name, seconds, words in parts:
        stages.append(
            StageBar(name=name, start_s=start_s, seconds=seconds, binding=seconds == longest, note=words)
        )
        start_s += seconds
    return stages, whole


def drops(connection: sqlite3.Connection, train: Trajectories) -> tuple[list[DropKind], list[DropRow]]:
    """By reason, the most frequent first; and rows of each reason, the newest first."""
    dropped = train.is_status(Status.DROPPED)
    codes, counts = np.unique(train.drop[dropped], return_counts=True)
    found, rows = [], list[DropRow]()
    for code, count in sorted(zip(codes.tolist(), counts.tolist(), strict=True), key=lambda pair: -pair[1]):
        of_kind = np.flatnonzero(dropped & (train.drop == code))
        rewards = _known(train.reward[of_kind])
        examples = ids_of(connection, train.number[of_kind[:NUM_EXAMPLES]])
        mean = float(rewards.mean()) if len(rewards) else None
        mean_length = float(train.length[of_kind].mean())
        found.append(
            DropKind(
                reason=str(REASONS[code]),
                count=count,
                mean_length=mean_length,
                mean_reward=mean,
                examples=examples,
            )
        )
        rows += _rows(connection, train, of_kind[-max(1, MOST_ROWS // len(codes)) :])
    return found, rows


def _rows(connection: sqlite3.Connection, train: Trajectories, places: npt.NDArray[np.int64]) -> list[DropRow]:
    marks = ", ".join(map(str, train.number[places].tolist()))
    rows = connection.execute(
        "SELECT id, drop_reason, coalesce(drop_detail, ''), length, reward, replica, ended_s - ?"
        f" FROM trajectory WHERE number IN ({marks}) ORDER BY number DESC",
        (train.origin_s,),
    )
    return [DropRow(*row) for row in rows]
