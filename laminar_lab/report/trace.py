"""`trace.json` for Perfetto: trajectories on replicas, scores, learner steps, relays, loads and counters.

`laminar report` writes it. A replica is a process with a lane for each slot; learner, scorer and relays are
processes, too. The page's timeline uses `occupancy`.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
import numpy as np

from laminar_lab.report.intervals import area_of, integral, step_function
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.snapshot import Snapshot
from laminar_lab.report.trajectories import STATUSES, Ints, ResidenceEnd, Residences, Times
from laminar_py.ledger import ledger_path
from laminar_py.records.codec import BoolArray
from laminar_py.records.events import Checkpointed, PartCrashed, Relayed, VersionLoaded, VersionPublished


def lanes_of(replica: Ints, start_s: Times, end_s: Times) -> Ints:
    """Return the lane [M] of each residence: the lowest lane of its replica that is free when it begins.

    If all residences of a replica are given, the number of lanes in use is its number of running trajectories.
    """
    lanes = np.zeros(len(replica), np.int32)
    order = np.lexsort((start_s, replica))
    rows = zip(*(column.tolist() for column in (order, replica[order], start_s[order], end_s[order])), strict=True)
    current, busy, free = None, list[tuple[float, int]](), list[int]()
    for place, own, start, end in rows:
        if own != current:
            current, busy, free = own, [], []
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes[place] = lane
    return lanes


def occupancy(residences: Residences, *, edges: Times) -> Iterator[tuple[int, Times, Times]]:
    """Yield each replica, its mean number of trajectories, and how many of these are in environments, both [B].

    Replicas ascend, and bins lie between `edges` [B + 1]. The first number is exact; for the second a trajectory
    is in its environment at any moment by the share of its time there.
    """
    width, bins = np.diff(edges), (edges[:-1], edges[1:])
    order = np.argsort(residences.replica, kind="stable")
    replicas, firsts = np.unique(residences.replica[order], return_index=True)
    for replica, mine in zip(replicas.tolist(), np.split(order, firsts)[1:], strict=True):
        start_s, end_s = residences.start_s[mine], residences.end_s[mine]
        area = integral(*step_function(start_s, end_s), *bins)
        yield replica, area / width, area_of(start_s, end_s, residences.away[mine], *bins) / width


TRACE_NAME = "trace.json"
MOST_STAYS = 60_000
MOST_EVENTS = 8_000  # of each kind
MOST_COUNTS = 400  # of each counter
LEARNER, SCORER, RELAYS, REPLICAS = 1, 2, 3, 10  # processes; replica r is REPLICAS + r
WEIGHTS = 0  # lane of a replica for loads; its slots come after

Args = Mapping[str, str | int | float | None]
Row = TypeVar("Row")


class TraceEvent(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Event with `ts` and `dur` in microseconds, e.g. a slice "step 3" in lane 0 of process 1 at 1500 for 700.

    `ph` is its kind: M names a process or lane, X is a slice, C a counter, i a moment, s and f end an arrow.
    """

    ph: Literal["M", "X", "C", "i", "s", "f"]
    pid: int
    tid: int
    name: str
    ts: int = msgspec.field(default=-1)  # a name has none
    dur: int | None = None
    cat: str | None = None
    id: int | None = None
    bp: str | None = None
    s: str | None = None
    args: Args | None = None


class Trace(msgspec.Struct, frozen=True, rename="camel"):
    """Content of `trace.json`."""

    trace_events: list[TraceEvent]
    other_data: dict[str, str]
    display_time_unit: str = "ms"


def choose_residences(snapshot: Snapshot, most: int) -> tuple[Residences, BoolArray]:
    """Return about `most` residences or fewer, and a mask [N] of their trajectories among all."""
    residences, numbers = snapshot.residences, snapshot.all_trajectories.number
    chosen = np.ones(len(numbers), np.bool_)
    if len(residences) > most:
        hashed = (numbers.astype(np.uint64) * np.uint64(2654435761)) % np.uint64(2**32)
        chosen = hashed < np.uint64(int(most / len(residences) * 2**32))
    return residences.where(chosen[snapshot.places(residences)]), chosen


def natural_order(name: str) -> tuple[str, int]:
    """Return a sort key by which relay-10 comes after relay-9."""
    stem, _, number = name.rpartition("-")
    return (stem, int(number)) if number.isdigit() else (name, 0)


def keep_evenly(rows: Iterable[Row], most: int = MOST_EVENTS) -> list[Row]:
    """Return at most `most` rows at even distances, the last row included."""
    rows = list(rows)
    every = -(-len(rows) // most)
    return rows[(len(rows) - 1) % every :: every] if every > 1 else rows


def write_beside(report: RunReport, name: str, content: bytes) -> Path:
    """Write a file into the folder of the run by a rename, and return its path."""
    path = ledger_path(report.snapshot.run).parent / name
    partial = path.with_suffix(".tmp")
    partial.write_bytes(content)
    partial.replace(path)
    return path


def write_trace(report: RunReport) -> Path:
    """Write `trace.json` into the run's folder and return its path. Raises `ConfigError` without a ledger."""
    snapshot = report.snapshot
    drawn, chosen = choose_residences(snapshot, MOST_STAYS)
    shown = np.flatnonzero(chosen)
    ids = dict(zip(shown.tolist(), snapshot.ids(snapshot.all_trajectories.number[shown]), strict=True))
    trace = make_trace(snapshot, drawn, ids)
    return write_beside(report, TRACE_NAME, msgspec.json.encode(trace))


def make_trace(snapshot: Snapshot, drawn: Residences, ids: Mapping[int, str]) -> Trace:
    """Return the trace of these residences; `ids` has the ids of their trajectories by place."""
    relayed = keep_evenly(snapshot.history.of_kind(Relayed))
    relay_lanes = _relay_lanes(relayed)
    slots = _lanes(drawn.replica, drawn.start_s, drawn.end_s)
    events = [*_residences(snapshot, drawn, slots, ids), *_arrows(drawn, slots), *_scores(snapshot, ids)]
    events += [*_learner(snapshot), *_relays(relayed, relay_lanes), *_loads(snapshot)]
    events += _running(snapshot)
    first = min((event.ts for event in events), default=0)
    events = [msgspec.structs.replace(event, ts=event.ts - first) for event in events]
    events.sort(key=lambda event: event.ts)
    other = {"run": snapshot.name, "trajectories": f"{len(ids)} of {len(snapshot.all_trajectories)}"}
    return Trace([*_names(events, relay_lanes), *events], other)


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _slice(
    lane: tuple[int, int], name: str, start_s: float, end_s: float, cat: str, args: Args | None = None
) -> TraceEvent:
    dur = max(1, _us(end_s) - _us(start_s))  # Perfetto does not show a slice without length
    return TraceEvent(ph="X", pid=lane[0], tid=lane[1], name=name, ts=_us(start_s), dur=dur, cat=cat, args=args)


def _moment(name: str, at_s: float, scope: str, args: Args | None = None) -> TraceEvent:
    return TraceEvent(ph="i", pid=LEARNER, tid=0, name=name, ts=_us(at_s), s=scope, args=args)


def _count(pid: int, name: str, at_s: float, args: Args) -> TraceEvent:
    return TraceEvent(ph="C", pid=pid, tid=0, name=name, ts=_us(at_s), args=args)


def _lanes(row: Ints, start_s: Times, end_s: Times) -> Ints:
    """Return the lanes [M] of slices within their rows, by times in whole microseconds as in the file."""
    start = np.round(start_s * 1e6)
    return lanes_of(row, start, np.maximum(start + 1, np.round(end_s * 1e6)))


def _residences(
    snapshot: Snapshot, drawn: Residences, lanes: Ints, ids: Mapping[int, str]
) -> Iterator[TraceEvent]:
    """Yield a slice for each drawn residence, on its replica and lane, with figures of its trajectory."""
    trajectories = snapshot.all_trajectories
    columns = (snapshot.places(drawn), drawn.replica, drawn.version, drawn.end, lanes, drawn.start_s, drawn.end_s)
    for place, replica, version, how, lane, start_s, end_s in zip(*(c.tolist() for c in columns), strict=True):
        reward = float(trajectories.reward[place])
        args: dict[str, str | int | float | None] = {
            "version": version,
            "length": int(trajectories.length[place]),
            "reward": None if np.isnan(reward) else reward,
            "stay": ResidenceEnd(how).name.lower(),
            "status": str(STATUSES[trajectories.status[place]]),
        }
        if trajectories.turns[place] >= 0:
            args |= {
                "turns": int(trajectories.turns[place]),
                "environment_s": round(float(trajectories.environment_s[place]), 6),
            }
        yield _slice((REPLICAS + replica, lane + 1), ids[place], start_s, end_s, f"v{version}", args)


def _arrows(drawn: Residences, lanes: Ints) -> Iterator[TraceEvent]:
    """Yield arrows from the end of a residence to the next residence of the same trajectory."""
    moved = np.flatnonzero(drawn.trajectory[1:] == drawn.trajectory[:-1]).tolist()
    for number, place in enumerate(moved, start=1):
        name = "repack" if drawn.end[place] == ResidenceEnd.MOVED else "interruption"
        # within its slice, which binds the arrow
        leaves = max(_us(drawn.start_s[place]), _us(drawn.end_s[place]) - 1)
        comes = max(leaves, _us(drawn.start_s[place + 1]))
        (pid, tid), (pid_to, tid_to) = (
            (REPLICAS + int(drawn.replica[at]), int(lanes[at]) + 1) for at in (place, place + 1)
        )
        yield TraceEvent(ph="s", pid=pid, tid=tid, name=name, ts=leaves, cat="move", id=number)
        yield TraceEvent(ph="f", pid=pid_to, tid=tid_to, name=name, ts=comes, cat="move", id=number, bp="e")


def _scores(snapshot: Snapshot, ids: Mapping[int, str]) -> Iterator[TraceEvent]:
    """Yield a slice for the scoring of each scored trajectory in `ids`, on lanes of the scorer."""
    trajectories = snapshot.all_trajectories
    places = np.fromiter(ids, np.int64, len(ids))
    places = places[~np.isnan(trajectories.scored_s[places]) & ~np.isnan(trajectories.score_s[places])]
    end_s, took_s = trajectories.scored_s[places], trajectories.score_s[places].astype(np.float64)
    start_s = end_s - took_s
    lanes = _lanes(np.zeros(len(places), np.int32), start_s, end_s)
    columns = (column.tolist() for column in (places, lanes, start_s, end_s))
    for place, lane, start, end in zip(*columns, strict=True):
        reward = float(trajectories.reward[place])
        args = None if np.isnan(reward) else {"reward": reward}
        yield _slice((SCORER, lane), ids[place], start, end, "reward", args)


def _learner(snapshot: Snapshot) -> Iterator[TraceEvent]:
    """Yield slices of learner steps, and moments of publishes and checkpoints."""
    history = snapshot.history
    for at_s, step in keep_evenly(history.steps):
        args = {"trajectories": step.num_trajectories, "tokens": step.num_tokens, "waited_s": step.waited_s}
        yield _slice((LEARNER, 0), f"step {step.step}", at_s - step.elapsed_s, at_s, "step", args)
    for at_s, published in keep_evenly(history.of_kind(VersionPublished)):
        yield _moment(f"version {published.version} published", at_s, "g")
    for at_s, saved in history.of_kind(Checkpointed):
        yield _moment(f"checkpoint of step {saved.step}", at_s, "t")
    for at_s, crash in history.of_kind(PartCrashed):
        yield _moment(f"{crash.part} crashed", at_s, "g", {"reason": crash.reason})


def _relay_lanes(relayed: list[tuple[float, Relayed]]) -> list[str]:
    """Return the lane name [N] of each transfer; a relay with two transfers at a time has a second lane."""
    rows = {name: row for row, name in enumerate({event.node for _, event in relayed})}
    row = np.array([rows[event.node] for _, event in relayed], np.int32)
    end_s = np.array([at_s for at_s, _ in relayed], np.float64)
    took_s = np.array([event.elapsed_s for _, event in relayed], np.float64)
    lanes = _lanes(row, end_s - took_s, end_s).tolist()
    return [
        event.node if not lane else f"{event.node}, beside {lane}"
        for (_, event), lane in zip(relayed, lanes, strict=True)
    ]


def _relays(relayed: list[tuple[float, Relayed]], lanes: list[str]) -> Iterator[TraceEvent]:
    tids = {lane: tid for tid, lane in enumerate(_ordered(lanes))}
    for (at_s, event), lane in zip(relayed, lanes, strict=True):
        sent: Args = {"wire_bytes": event.wire_bytes, "num_bytes": event.num_bytes, "parent": event.parent}
        start_s, name = at_s - event.elapsed_s, f"version {event.version}"
        yield _slice((RELAYS, tids[lane]), name, start_s, at_s, "relay", sent)


def _ordered(lanes: list[str]) -> list[str]:
    return sorted(set(lanes), key=lambda lane: (natural_order(lane.partition(", ")[0]), lane))


def _loads(snapshot: Snapshot) -> Iterator[TraceEvent]:
    for at_s, event in keep_evenly(snapshot.history.of_kind(VersionLoaded)):
        lane, name = (REPLICAS + event.replica, WEIGHTS), f"load version {event.version}"
        yield _slice(lane, name, at_s - event.elapsed_s, at_s, "load")


def _running(snapshot: Snapshot) -> Iterator[TraceEvent]:
    edges = np.linspace(0.0, max(snapshot.end_s, 1e-3), MOST_COUNTS + 1)
    for replica, running, away in occupancy(snapshot.residences, edges=edges):
        for at_s, value in zip(edges.tolist(), running.tolist(), strict=False):
            yield _count(REPLICAS + replica, "running", at_s, {"running": round(value, 2)})
        for at_s, value in zip(edges.tolist(), away.tolist(), strict=False) if away.any() else ():
            yield _count(REPLICAS + replica, "in environments", at_s, {"away": round(value, 2)})


def _names(events: list[TraceEvent], relay_lanes: list[str]) -> Iterator[TraceEvent]:
    """Yield the titles of all processes and lanes that `events` use."""
    relays = _ordered(relay_lanes)
    titles = {LEARNER: "learner", SCORER: "scorer", RELAYS: "relays"}
    seen = sorted({(event.pid, event.tid) for event in events})
    for pid in sorted({pid for pid, _ in seen}):
        title = titles.get(pid, f"replica {pid - REPLICAS}")
        yield TraceEvent(ph="M", pid=pid, tid=0, name="process_name", args={"name": title})
        yield TraceEvent(ph="M", pid=pid, tid=0, name="process_sort_index", args={"sort_index": pid})
    for pid, tid in seen:
        lane = "weights" if tid == WEIGHTS else f"slot {tid - 1}"
        title = relays[tid] if pid == RELAYS else {LEARNER: "steps", SCORER: f"worker {tid}"}.get(pid, lane)
        yield TraceEvent(ph="M", pid=pid, tid=tid, name="thread_name", args={"name": title})
