"""The timeline of the page: every trajectory as bars on replicas, beside learner and relays. Called by `page`.

Beyond `MOST_BARS` stays a fixed part of the trajectories is drawn, by a hash of their numbers, whole ones with all
their stays; what is aggregated (`Heat`, moves) always counts all of them.
"""

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from laminar_py.analytics.read.columns import STATUSES
from laminar_py.analytics.read.stays import StayEnd, Stays
from laminar_py.analytics.show.lanes import occupancy
from laminar_py.analytics.show.panels import Bars, Heat, Mark, Move, StepBar, Timeline, Transfer, pack
from laminar_py.analytics.show.snapshot import Snapshot
from laminar_py.records.codec import BoolArray
from laminar_py.records.events import Checkpointed, PartDied, Relayed, RolledBack, VersionLoaded, VersionPublished
from laminar_py.records.trajectory import Status

MOST_BARS = 130_000
MOST_CELLS = 240_000
MOST_BINS = 1_200
MOST_MARKS = 8_000  # of each kind, as of steps and of moves

Row = TypeVar("Row")


def read_timeline(connection: sqlite3.Connection, snapshot: Snapshot) -> Timeline:
    """All of it; ids of what is drawn are read from the ledger."""
    everyone, stays, end_s = snapshot.everyone, snapshot.stays, snapshot.end_s
    replicas = sorted(set(np.unique(stays.replica).tolist()) | {event.replica for _, event in _loads(snapshot)})
    place = {replica: row for row, replica in enumerate(replicas)}
    start_s = 0.0
    drawn, chosen = draw(snapshot, MOST_BARS)
    heat = _heat(stays, replicas, start_s, end_s)
    shown = np.flatnonzero(chosen)
    renumbered = np.cumsum(chosen) - 1
    rows = np.array([place[replica] for replica in drawn.replica.tolist()], np.int32)
    bars = Bars(
        of=pack(renumbered[snapshot.places(drawn)], "uint32"),
        replica=pack(rows, "uint16"),
        version=pack(drawn.version, "int32"),
        fate=pack(drawn.end, "uint8"),
        start=pack(_ms(drawn.start_s - start_s), "uint32"),
        end=pack(_ms(drawn.end_s - start_s), "uint32"),
        ids=ids_of(connection, everyone.number[shown]),
        length=pack(everyone.length[shown], "uint32"),
        status=pack(everyone.status[shown], "uint8"),
        reward=pack(everyone.reward[shown], "float32"),
        staleness=pack(everyone.staleness[shown], "int32"),
        is_eval=pack(snapshot.is_eval[shown], "uint8"),
        statuses=list(STATUSES),
    )
    relays = sorted({event.node for _, event in snapshot.history.of(Relayed)}, key=natural)
    return Timeline(
        start_s=start_s,
        end_s=end_s,
        replicas=replicas,
        relays=relays,
        trajectories=len(everyone),
        shown=len(shown),
        most_running=max(1.0, float(heat[1])),
        heat=heat[0],
        bars=bars,
        moves=thin(list(_moves(stays, place))),
        steps=thin(_steps(snapshot)),
        marks=list(_marks(snapshot, place)),
        transfers=thin(_transfers(snapshot, relays)),
    )


def draw(snapshot: Snapshot, most: int) -> tuple[Stays, BoolArray]:
    """The stays to draw, at most about `most` of them, and of which trajectories [N] they are."""
    stays, numbers = snapshot.stays, snapshot.everyone.number
    chosen = np.ones(len(numbers), np.bool_)
    if len(stays) > most:
        hashed = (numbers.astype(np.uint64) * np.uint64(2654435761)) % np.uint64(2**32)
        chosen = hashed < np.uint64(int(most / len(stays) * 2**32))
    return stays.where(chosen[snapshot.places(stays)]), chosen


def ids_of(connection: sqlite3.Connection, numbers: npt.NDArray[np.int32]) -> list[str]:
    """Of trajectories with these ascending numbers."""
    rows = connection.execute(
        "SELECT id FROM trajectory WHERE number IN (SELECT value FROM json_each(?)) ORDER BY number",
        (json.dumps(numbers.tolist()),),
    )
    return [id for (id,) in rows]


def natural(name: str) -> tuple[str, int]:
    """So that relay-10 comes after relay-9."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (name, 0)


def thin(rows: list[Row], most: int = MOST_MARKS) -> list[Row]:
    """Every nth of them, the last included, where there are more than `most`."""
    every = -(-len(rows) // most)
    return rows[(len(rows) - 1) % every :: every] if every > 1 else rows


def _ms(seconds: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    milliseconds: npt.NDArray[np.float64] = np.clip(np.round(seconds * 1000), 0, 2**32 - 1)
    return milliseconds


def _heat(stays: Stays, replicas: list[int], start_s: float, end_s: float) -> tuple[Heat, float]:
    bins = max(1, min(MOST_BINS, MOST_CELLS // max(1, len(replicas))))
    edges = np.linspace(start_s, max(end_s, start_s + 1e-3), bins + 1)
    order = np.argsort(stays.replica, kind="stable")  # so that each replica is one slice
    by_replica = stays.where(order)
    bounds = np.searchsorted(by_replica.replica, [*replicas, (replicas or [0])[-1] + 1])
    rows = [
        occupancy(by_replica.where(np.arange(first, last)), replica=replica, edges=edges)
        for replica, first, last in zip(replicas, bounds, bounds[1:], strict=False)
    ]
    running = np.concatenate([row for row, _ in rows]) if rows else np.empty(0, np.float32)
    version = np.concatenate([row for _, row in rows]) if rows else np.empty(0, np.float32)
    heat = Heat(
        start_s=start_s,
        bin_s=float(edges[1] - edges[0]),
        bins=bins,
        running=pack(running, "float32"),
        version=pack(version, "float32"),
    )
    return heat, float(running.max(initial=0.0))


def _moves(stays: Stays, place: dict[int, int]) -> Iterator[Move]:
    """From each stay to the next of the same trajectory, those of a moment together."""
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
    for (at_s, source, destination, repacked), count in sorted(counts.items()):
        yield Move(at_s=at_s, source=place[source], destination=place[destination], count=count, repacked=repacked)


def _steps(snapshot: Snapshot) -> list[StepBar]:
    train = snapshot.trajectories
    used = train.is_status(Status.CONSUMED) & ~np.isnan(train.reward)
    counts = np.maximum(1, np.bincount(train.step[used]))
    rewards = dict(enumerate((np.bincount(train.step[used], weights=train.reward[used]) / counts).tolist()))
    return [
        StepBar(
            step=step.step,
            start_s=round(at_s - step.elapsed_s, 4),
            end_s=round(at_s, 4),
            waited_s=round(step.waited_s, 4),
            trajectories=step.num_trajectories,
            tokens=step.num_tokens,
            reward=round(rewards.get(step.step, np.nan), 4),
        )
        for at_s, step in snapshot.history.steps
    ]


def _marks(snapshot: Snapshot, place: dict[int, int]) -> Iterator[Mark]:
    history = snapshot.history
    published = [
        Mark(
            at_s=round(at_s, 4),
            kind="publish",
            row=-1,
            version=event.version,
            text=f"stall {event.stall_s * 1000:.1f} ms",
        )
        for at_s, event in history.of(VersionPublished)
    ]
    loaded = [
        Mark(
            at_s=round(at_s, 4),
            kind="load",
            row=place[event.replica],
            version=event.version,
            text=f"{event.elapsed_s * 1000:.1f} ms",
        )
        for at_s, event in _loads(snapshot)
    ]
    yield from thin(published)
    yield from thin(loaded)
    for at_s, saved in history.of(Checkpointed):
        yield Mark(
            at_s=round(at_s, 4),
            kind="checkpoint",
            row=-1,
            version=saved.version,
            text=f"step {saved.step}, {saved.elapsed_s:.2f} s",
        )
    for at_s, back in history.of(RolledBack):
        yield Mark(
            at_s=round(at_s, 4), kind="rollback", row=-1, version=-1, text=f"to step {back.step}: {back.reason}"
        )
    for at_s, died in history.of(PartDied):
        stem, number = natural(died.part)
        row = place.get(number, -1) if stem == "replica" else -1
        yield Mark(at_s=round(at_s, 4), kind="death", row=row, version=-1, text=f"{died.part}: {died.reason}")


def _loads(snapshot: Snapshot) -> Iterator[tuple[float, VersionLoaded]]:
    return snapshot.history.of(VersionLoaded)


def _transfers(snapshot: Snapshot, relays: list[str]) -> list[Transfer]:
    row = {name: place for place, name in enumerate(relays)}
    found = []
    for at_s, event in snapshot.history.of(Relayed):
        share = event.wire_bytes / event.num_bytes if event.num_bytes else 0.0
        kind = "full" if event.base is None else f"against version {event.base}"
        text = f"{event.wire_bytes / 1e6:,.2f} MB came ({share:.0%}, {kind})"
        start_s = round(at_s - event.elapsed_s, 4)
        found.append(
            Transfer(row=row[event.node], start_s=start_s, end_s=round(at_s, 4), version=event.version, text=text)
        )
    return found
