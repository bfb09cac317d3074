"""Which replica had which trajectory when: a stay lasts from one hand-over to the end, or to an interruption.

Called for the pictures; reads the ledger only. Most trajectories have one stay, which their row tells; events are
read of those alone that were interrupted.
"""

import heapq
import json
import sqlite3
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.analytics.columns import Floats, Ints, Times, Trajectories
from laminar_py.analytics.history import EventClock
from laminar_py.codec import BoolArray
from laminar_py.events import Assigned, Interrupted
from laminar_py.store.rows import decode_event


class Fate(IntEnum):
    """How a stay ended."""

    RUNNING = 0
    FINISHED = 1
    MOVED = 2  # repacked: it goes on elsewhere
    INTERRUPTED = 3  # for new weights, by a death, by a stop
    DROPPED = 4


@dataclass(frozen=True, slots=True)
class Stays:
    """Columns [M] in the order of trajectories, and of each in time; -1 stands for none."""

    of: Ints  # place of the trajectory in the columns that these were read for
    replica: Ints
    version: Ints  # of its last token there
    fate: Ints
    start_s: Times
    end_s: Times  # NaN while it runs

    def __len__(self) -> int:
        return len(self.of)

    def where(self, chosen: BoolArray | npt.NDArray[np.int64]) -> "Stays":
        """Those of a mask [M], or at these places."""
        return Stays(
            self.of[chosen],
            self.replica[chosen],
            self.version[chosen],
            self.fate[chosen],
            self.start_s[chosen],
            self.end_s[chosen],
        )

    def until(self, now_s: float) -> "Stays":
        """What still runs ends now."""
        return Stays(
            self.of,
            self.replica,
            self.version,
            self.fate,
            self.start_s,
            np.fmax(self.start_s, _or(self.end_s, now_s)),
        )


def read_stays(connection: sqlite3.Connection, trajectories: Trajectories) -> Stays:
    """All stays of all these trajectories."""
    clock = EventClock(connection, trajectories.origin_s)
    parted = _interrupted(connection, trajectories, clock)
    whole = ~np.isnan(trajectories.started_s)
    whole[parted.of] = False
    places = np.flatnonzero(whole)
    of_whole = _whole(trajectories, places)
    order = np.argsort(np.concatenate([of_whole.of, parted.of]), kind="stable")
    joined = [
        np.concatenate([mine, others])[order]
        for mine, others in zip(_columns(of_whole), _columns(parted), strict=True)
    ]
    return Stays(*joined)


def lanes_of(stays: Stays) -> Ints:
    """[M] a row for each stay among those of its replica, the lowest that is free when it begins.

    Where all stays of a replica are given, its rows in use are what it ran at that moment.
    """
    lanes = np.zeros(len(stays), np.int32)
    order = np.lexsort((stays.start_s, stays.replica))
    replica, busy, free = None, list[tuple[float, int]](), list[int]()
    rows = zip(
        order.tolist(),
        stays.replica[order].tolist(),
        stays.start_s[order].tolist(),
        stays.end_s[order].tolist(),
        strict=True,
    )
    for place, own, start, end in rows:
        if own != replica:
            replica, busy, free = own, [], []
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, lane))
        lanes[place] = lane
    return lanes


def occupancy(stays: Stays, *, replica: int, edges: Times) -> tuple[Floats, Floats]:
    """Mean number running on a replica and their mean version, for each bin between `edges` [B + 1]: two of [B].

    The version is NaN where nothing ran. Exact, by integrals of steps up and down.
    """
    mine = stays.replica == replica
    start, end = stays.start_s[mine], stays.end_s[mine]
    version = stays.version[mine].astype(np.float64)
    ones = np.ones_like(version)
    width = np.diff(edges)
    area = np.diff(_integral(start, ones, edges) - _integral(end, ones, edges))
    weighted = np.diff(_integral(start, version, edges) - _integral(end, version, edges))
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.where(area > 1e-9, weighted / area, np.nan)
    return (area / width).astype(np.float32), mean.astype(np.float32)


def _integral(steps: Times, heights: Times, edges: Times) -> Times:
    """[B + 1] up to each edge, of a function that rises by `heights` at `steps`."""
    order = np.argsort(steps)
    steps, heights = steps[order], heights[order]
    count = np.searchsorted(steps, edges)
    rise = np.concatenate([[0.0], np.cumsum(heights)])[count]
    moment = np.concatenate([[0.0], np.cumsum(heights * steps)])[count]
    found: Times = edges * rise - moment
    return found


def _columns(stays: Stays) -> tuple[npt.NDArray[np.generic], ...]:
    return stays.of, stays.replica, stays.version, stays.fate, stays.start_s, stays.end_s


def _or(times: Times, other: float | Times) -> Times:
    found: Times = np.where(np.isnan(times), other, times)
    return found


def _whole(trajectories: Trajectories, places: npt.NDArray[np.int64]) -> Stays:
    """The one stay of trajectories that nothing interrupted."""
    finished, ended = trajectories.finished_s[places], trajectories.ended_s[places]
    fate = np.full(len(places), Fate.RUNNING, np.int32)
    fate[~np.isnan(ended)] = Fate.DROPPED  # unless it had finished before
    fate[~np.isnan(finished)] = Fate.FINISHED
    return Stays(
        places.astype(np.int32),
        trajectories.replica[places],
        trajectories.newest_version[places],
        fate,
        trajectories.started_s[places],
        _or(finished, ended),
    )


def _interrupted(connection: sqlite3.Connection, trajectories: Trajectories, clock: EventClock) -> Stays:
    """The stays of trajectories that were."""
    rows = connection.execute("SELECT DISTINCT subject FROM event WHERE kind = 'interrupted'")
    ids = json.dumps([id for (id,) in rows])
    of = _find(connection, trajectories.number, ids)
    events = connection.execute(
        "SELECT seq, wall, mono, body FROM event WHERE kind IN ('assigned', 'interrupted')"
        " AND subject IN (SELECT value FROM json_each(?)) ORDER BY seq",
        (ids,),
    )
    stays: list[tuple[int, int, int, int, float, float]] = []
    open_: dict[str, tuple[int, float]] = {}  # replica and start
    for seq, wall, mono, body in events:
        event, at_s = decode_event(body), clock.at(seq, wall, mono)
        assert isinstance(event, Assigned | Interrupted), f"{body} is of another kind"
        if event.trajectory_id not in of:
            continue
        if isinstance(event, Assigned):
            open_[event.trajectory_id] = event.replica, at_s
        elif event.trajectory_id in open_:
            place, spans = of[event.trajectory_id]
            replica, start_s = open_.pop(event.trajectory_id)
            version = _version_at(spans, event.length, int(trajectories.newest_version[place]))
            fate = Fate.MOVED if event.reason == "repacked" else Fate.INTERRUPTED
            stays.append((place, replica, version, fate, start_s, at_s))
    stays += [_last(trajectories, of[id][0], *stay) for id, stay in open_.items()]
    stays.sort(key=lambda stay: (stay[0], stay[4]))
    columns = np.array(stays, np.float64).reshape(-1, 6).T
    of_, replicas, versions, fates = (column.astype(np.int32) for column in columns[:4])
    return Stays(of_, replicas, versions, fates, columns[4], columns[5])


def _find(connection: sqlite3.Connection, numbers: Ints, ids: str) -> dict[str, tuple[int, list[tuple[int, int]]]]:
    """Place and spans of those of `ids`, a JSON array, that are among `numbers` [N]."""
    rows = connection.execute(
        "SELECT id, number, spans FROM trajectory WHERE id IN (SELECT value FROM json_each(?))", (ids,)
    ).fetchall()
    wanted = np.array([number for _, number, _ in rows], numbers.dtype)
    places = np.searchsorted(numbers, wanted)
    there = np.isin(wanted, numbers)
    return {
        id: (place, _spans(spans))
        for (id, _, spans), place, found in zip(rows, places.tolist(), there.tolist(), strict=True)
        if found
    }


def _last(
    trajectories: Trajectories, place: int, replica: int, start_s: float
) -> tuple[int, int, int, int, float, float]:
    finished, ended = trajectories.finished_s[place], trajectories.ended_s[place]
    fate = Fate.FINISHED if not np.isnan(finished) else Fate.DROPPED if not np.isnan(ended) else Fate.RUNNING
    end_s = ended if np.isnan(finished) else finished
    return place, replica, int(trajectories.newest_version[place]), fate, start_s, float(end_s)


def _spans(text: str | None) -> list[tuple[int, int]]:
    """(version, start) of each, ascending."""
    return [(span[0], span[1]) for span in msgspec.json.decode(text)] if text else []


def _version_at(spans: list[tuple[int, int]], length: int, otherwise: int) -> int:
    """The version of the last of `length` tokens."""
    return next((version for version, start in reversed(spans) if start < max(length, 1)), otherwise)
