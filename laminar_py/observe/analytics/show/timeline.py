"""Timeline of the page: every trajectory as bars on replicas, beside learner and relays. Called by `page`.

Beyond `MOST_BARS` stays a fixed share of the trajectories is drawn, by a hash of their numbers, each with all its
stays; aggregates (`Heat`, moves) always count all of them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np

from laminar_py.observe.analytics.read.columns import STATUSES, Floats, Times
from laminar_py.observe.analytics.read.snapshot import Snapshot
from laminar_py.observe.analytics.read.stays import StayEnd, Stays
from laminar_py.observe.analytics.show.lanes import occupancy
from laminar_py.observe.analytics.show.panels import Bars, Heat, Mark, MoveArrow, StepBar, Timeline, Transfer, pack
from laminar_py.records.codec import BoolArray
from laminar_py.records.events import Checkpointed, PartDied, Relayed, RolledBack, VersionLoaded, VersionPublished
from laminar_py.records.trajectory import Status

MOST_BARS = 130_000
MOST_CELLS = 240_000
MOST_BINS = 1_200
MOST_MARKS = 8_000  # of each kind, as of steps and of moves

Row = TypeVar("Row")


def make_timeline(snapshot: Snapshot) -> Timeline:
    """Everything on it; ids of what is drawn are read from the ledger."""
    everyone, stays, history = snapshot.everyone, snapshot.stays, snapshot.history
    loaded = {event.replica for _, event in history.of(VersionLoaded)}
    replicas = sorted(set(np.unique(stays.replica).tolist()) | loaded)
    place = {replica: row for row, replica in enumerate(replicas)}
    relays = sorted({event.node for _, event in history.of(Relayed)}, key=natural)
    drawn, chosen = draw(snapshot, MOST_BARS)
    heat, most_running = _heat(stays, snapshot.is_eval[snapshot.places(stays)], replicas, snapshot.end_s)
    return Timeline(
        start_s=0.0,
        end_s=snapshot.end_s,
        replicas=replicas,
        relays=relays,
        trajectories=len(everyone),
        shown=int(chosen.sum()),
        most_running=max(1.0, most_running),
        heat=heat,
        bars=_bars(snapshot, drawn, chosen, place),
        moves=thin(_moves(stays, place)),
        steps=thin(_steps(snapshot)),
        marks=list(_marks(snapshot, place)),
        transfers=thin(_transfers(snapshot, relays)),
    )


def draw(snapshot: Snapshot, most: int) -> tuple[Stays, BoolArray]:
    """Stays to draw, at most about `most` of them; and a mask of their trajectories [N] among everyone."""
    stays, numbers = snapshot.stays, snapshot.everyone.number
    chosen = np.ones(len(numbers), np.bool_)
    if len(stays) > most:
        hashed = (numbers.astype(np.uint64) * np.uint64(2654435761)) % np.uint64(2**32)
        chosen = hashed < np.uint64(int(most / len(stays) * 2**32))
    return stays.where(chosen[snapshot.places(stays)]), chosen


def natural(name: str) -> tuple[str, int]:
    """Key of an order in which relay-10 comes after relay-9."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (name, 0)


def thin(rows: Iterable[Row], most: int = MOST_MARKS) -> list[Row]:
    """Every nth of them, the last included, where there are more than `most`."""
    rows = list(rows)
    every = -(-len(rows) // most)
    return rows[(len(rows) - 1) % every :: every] if every > 1 else rows


def _bars(snapshot: Snapshot, drawn: Stays, chosen: BoolArray, place: dict[int, int]) -> Bars:
    everyone, shown = snapshot.everyone, np.flatnonzero(chosen)
    renumbered = np.cumsum(chosen) - 1
    rows = np.array([place[replica] for replica in drawn.replica.tolist()], np.int32)
    return Bars(
        of=pack(renumbered[snapshot.places(drawn)], "uint32"),
        replica=pack(rows, "uint16"),
        version=pack(drawn.version, "int32"),
        fate=pack(drawn.end, "uint8"),
        start=pack(_ms(drawn.start_s), "uint32"),
        end=pack(_ms(drawn.end_s), "uint32"),
        away=pack(drawn.away, "float32") if everyone.has_turns else None,
        ids=snapshot.ids(everyone.number[shown]),
        length=pack(everyone.length[shown], "uint32"),
        status=pack(everyone.status[shown], "uint8"),
        reward=pack(everyone.reward[shown], "float32"),
        staleness=pack(everyone.staleness[shown], "int32"),
        is_eval=pack(snapshot.is_eval[shown], "uint8"),
        statuses=list(STATUSES),
        turns=pack(everyone.turns[shown], "int32") if everyone.has_turns else None,
        environment_s=pack(everyone.environment_s[shown], "float32") if everyone.has_turns else None,
    )


def _ms(seconds: Times) -> Times:
    milliseconds: Times = np.clip(np.round(seconds * 1000), 0, 2**32 - 1)
    return milliseconds


def _heat(stays: Stays, is_eval: BoolArray, replicas: list[int], end_s: float) -> tuple[Heat, float]:
    """Areas of all replicas, and the most that one runs of training in a bin; of evaluations in a run of these."""
    bins = max(1, min(MOST_BINS, MOST_CELLS // max(1, len(replicas))))
    edges = np.linspace(0.0, max(end_s, 1e-3), bins + 1)
    running, version, away = _occupancies(stays, replicas, edges)
    training = running if is_eval.all() else _occupancies(stays.where(~is_eval), replicas, edges)[0]
    heat = Heat(
        start_s=0.0,
        bin_s=float(edges[1] - edges[0]),
        bins=bins,
        running=pack(running, "float32"),
        version=pack(version, "float32"),
        away=pack(away, "float32") if away.any() else None,
    )
    return heat, float(training.max(initial=0.0))


def _occupancies(stays: Stays, replicas: list[int], edges: Times) -> tuple[Floats, Floats, Floats]:
    """Mean number running, mean version and mean number away, replica by replica: three of [replicas x bins]."""
    order = np.argsort(stays.replica, kind="stable")  # so that each replica is one slice
    by_replica = stays.where(order)
    bounds = np.searchsorted(by_replica.replica, [*replicas, (replicas or [0])[-1] + 1])
    rows = [
        occupancy(by_replica.where(np.arange(first, last)), replica=replica, edges=edges)
        for replica, first, last in zip(replicas, bounds, bounds[1:], strict=False)
    ]
    none = np.empty(0, np.float32)
    running, version, away = (np.concatenate([none, *(row[column] for row in rows)]) for column in range(3))
    return running, version, away


def _moves(stays: Stays, place: dict[int, int]) -> Iterator[MoveArrow]:
    """Arrows from each stay to the next of the same trajectory, those of a moment together."""
    following = np.flatnonzero(
        (stays.trajectory[1:] == stays.trajectory[:-1]) & (stays.replica[1:] != stays.replica[:-1])
    )
    counts = Counter(
        zip(
            np.round(stays.end_s[following], 1).tolist(),
            stays.replica[following].tolist(),
            stays.replica[following + 1].tolist(),
            (stays.end[following] == StayEnd.MOVED).tolist(),
            strict=True,
        )
    )
    for (at_s, source, to, repacked), count in sorted(counts.items()):
        yield MoveArrow(at_s=at_s, source=place[source], destination=place[to], count=count, repacked=repacked)


def _steps(snapshot: Snapshot) -> Iterator[StepBar]:
    train = snapshot.trajectories
    used = train.is_status(Status.CONSUMED) & ~np.isnan(train.reward)
    counts = np.maximum(1, np.bincount(train.step[used]))
    rewards = dict(enumerate((np.bincount(train.step[used], weights=train.reward[used]) / counts).tolist()))
    for at_s, step in snapshot.history.steps:
        yield StepBar(
            step=step.step,
            start_s=round(at_s - step.elapsed_s, 4),
            end_s=round(at_s, 4),
            waited_s=round(step.waited_s, 4),
            trajectories=step.num_trajectories,
            tokens=step.num_tokens,
            reward=round(rewards.get(step.step, np.nan), 4),
        )


def _marks(snapshot: Snapshot, place: dict[int, int]) -> Iterator[Mark]:
    def mark(at_s: float, kind: str, text: str, *, row: int = -1, version: int = -1) -> Mark:
        return Mark(at_s=round(at_s, 4), kind=kind, row=row, version=version, text=text)

    history = snapshot.history
    for at_s, published in thin(history.of(VersionPublished)):
        yield mark(at_s, "publish", f"stall {published.stall_s * 1000:.1f} ms", version=published.version)
    for at_s, loaded in thin(history.of(VersionLoaded)):
        row, text = place[loaded.replica], f"{loaded.elapsed_s * 1000:.1f} ms"
        yield mark(at_s, "load", text, row=row, version=loaded.version)
    for at_s, saved in history.of(Checkpointed):
        yield mark(at_s, "checkpoint", f"step {saved.step}, {saved.elapsed_s:.2f} s", version=saved.version)
    for at_s, back in history.of(RolledBack):
        yield mark(at_s, "rollback", f"to step {back.step}: {back.reason}")
    for at_s, died in history.of(PartDied):
        stem, number = natural(died.part)
        row = place.get(number, -1) if stem == "replica" else -1
        yield mark(at_s, "death", f"{died.part}: {died.reason}", row=row)


def _transfers(snapshot: Snapshot, relays: list[str]) -> Iterator[Transfer]:
    row = {name: place for place, name in enumerate(relays)}
    for at_s, event in snapshot.history.of(Relayed):
        share = event.wire_bytes / event.num_bytes if event.num_bytes else 0.0
        kind = "full" if event.base is None else f"against version {event.base}"
        yield Transfer(
            row=row[event.node],
            start_s=round(at_s - event.elapsed_s, 4),
            end_s=round(at_s, 4),
            version=event.version,
            text=f"{event.wire_bytes / 1e6:,.2f} MB came ({share:.0%}, {kind})",
        )
