"""Trajectories of a run and their residences on replicas, as arrays from the ledger.

All figures are computed from these arrays. A million trajectories take about 150 MB, since rows are read in
blocks. A residence is the time of a trajectory on one replica until it ends, moves or is interrupted. Most
trajectories have one residence, which their row has; events are read only for interrupted trajectories.
Residences of one trajectory do not overlap (`tests/report/test_residences.py`).
"""

import json
import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.ledger import FinishedTurns, decode_event, read_turns
from laminar_py.records.codec import BoolArray
from laminar_py.records.events import Assigned, Dropped, Finished, Interrupted
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, Kind, Status

_BLOCK = 1_000  # rows, which fit the processor's caches
KINDS, STATUSES = tuple(Kind), tuple(Status)  # a column of codes has indices into one of these tuples
REASONS, FINISHES = tuple(DropReason), tuple(FinishReason)
CAPS = tuple(Cap)

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectories:
    """Columns [N] of a run's trajectories, in the order of issue; -1 and NaN mean unknown.

    Times are seconds since `origin_s`, by the run's clock. Columns of enums hold integer codes: `kind` is an index
    into `KINDS`, `status` into `STATUSES`, `drop` into `REASONS`, `finish` into `FINISHES`, and `cap` into `CAPS`.
    """

    number: Ints  # in the ledger, from 1 on
    group: Ints  # dense, in the order of issue
    kind: Ints
    prompt: Ints  # place of its prompt in the stream
    status: Ints
    epoch: Ints  # number of assignments to a replica
    replica: Ints  # the last replica
    length: Ints  # response tokens
    oldest_version: Ints
    newest_version: Ints
    finish: Ints
    cap: Ints
    drop: Ints
    step: Ints  # the learner step that consumed it
    version: Ints  # of the learner in that step
    staleness: Ints
    task: Ints
    reward: Floats
    weight: Floats
    queue_s: Floats  # on its last replica, until its first tokens there
    generate_s: Floats  # on its last replica, until it finished
    score_s: Floats
    scorer_s: Floats  # its share of a scorer's time, which scores several at once
    turns: Ints  # of the model, once finished; all unknown in a run without an environment
    environment_s: Floats  # work of its environment, once finished
    issued_s: Times
    started_s: Times
    finished_s: Times
    scored_s: Times
    ready_s: Times
    ended_s: Times
    origin_s: float  # seconds since 1970 of the first event
    tasks: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.number)

    def where(self, mask: BoolArray) -> "Trajectories":
        """Return the trajectories for which `mask` [N] is true."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        chosen: dict[str, Any] = {
            name: column[mask] for name, column in columns.items() if isinstance(column, np.ndarray)
        }
        return replace(self, **chosen)

    @property
    def last_s(self) -> float:
        """The last known time of any trajectory; 0 without one."""
        columns = np.concatenate([self.ended_s, self.finished_s, self.started_s, self.issued_s])
        return float(np.nanmax(columns, initial=0.0))

    @property
    def has_turns(self) -> bool:
        """Whether some finished trajectory has turns with an environment."""
        return bool((self.turns >= 0).any())

    def is_kind(self, kind: Kind) -> BoolArray:
        """Whether each trajectory [N] has this kind."""
        mask: BoolArray = self.kind == KINDS.index(kind)
        return mask

    def is_status(self, status: Status) -> BoolArray:
        """Whether each trajectory [N] has this status."""
        mask: BoolArray = self.status == STATUSES.index(status)
        return mask

    def dropped_for(self, reason: DropReason) -> BoolArray:
        """Whether each trajectory [N] was dropped for this reason."""
        mask: BoolArray = self.drop == REASONS.index(reason)
        return mask


_TYPES: dict[str, type] = {  # of numeric columns
    **dict.fromkeys(
        ("number", "prompt", "epoch", "replica", "length", "oldest_version", "newest_version"), np.int32
    ),
    **dict.fromkeys(("step", "version", "staleness"), np.int32),
    **dict.fromkeys(("reward", "weight", "queue_s", "generate_s", "score_s", "scorer_s"), np.float32),
    **dict.fromkeys(("issued_s", "started_s", "finished_s", "scored_s", "ready_s", "ended_s"), np.float64),
}
_CODES = {"kind": KINDS, "status": STATUSES, "finish": FINISHES, "cap": CAPS, "drop": REASONS}
# columns with another name there
_IN_SQL = {"prompt": "prompt_index", "finish": "finish_reason", "drop": "drop_reason"}


def read_trajectories(connection: sqlite3.Connection, *, has_environment: bool = False) -> Trajectories:
    """Read every trajectory of a run; columns of text become codes."""
    origin = connection.execute("SELECT coalesce(min(issued_s), 0) FROM trajectory").fetchone()[0]
    tasks = tuple(task for (task,) in connection.execute("SELECT DISTINCT task FROM prompt ORDER BY task"))
    columns = [_IN_SQL.get(name, name) for name in (*_TYPES, *_CODES)]
    cursor = connection.execute(
        f"SELECT {', '.join(columns)}, group_id, prompt_id FROM trajectory ORDER BY number"
    )
    codes = {name: {str(text): code for code, text in enumerate(texts)} for name, texts in _CODES.items()}
    groups: dict[str, int] = {}  # dense numbers, in the order of issue
    task_of = _read_tasks(connection, tasks)
    blocks: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*_TYPES, *_CODES, "group", "task")}
    while rows := cursor.fetchmany(_BLOCK):
        values = iter(zip(*rows, strict=True))
        for name, dtype in _TYPES.items():
            blocks[name].append(_array(next(values), dtype, origin if dtype is np.float64 else 0.0))
        for name, by_text in codes.items():
            blocks[name].append(np.array([by_text.get(text, -1) for text in next(values)], np.int32))
        blocks["group"].append(np.array([groups.setdefault(id, len(groups)) for id in next(values)], np.int32))
        blocks["task"].append(np.array([task_of[id] if task_of else 0 for id in next(values)], np.int32))
    joined = {
        name: np.concatenate([np.empty(0, _TYPES.get(name, np.int32)), *parts]) for name, parts in blocks.items()
    }
    finished = read_turns(connection) if has_environment else ()
    turns, environment_s = _turn_columns(joined["number"], finished)
    return Trajectories(**joined, turns=turns, environment_s=environment_s, origin_s=origin, tasks=tasks)


def _turn_columns(number: Ints, finished: Iterable[FinishedTurns]) -> tuple[Ints, Floats]:
    """Return turns [N] and seconds of environments [N] of trajectories with these numbers."""
    turns, environment_s = np.full(len(number), -1, np.int32), np.full(len(number), np.nan, np.float32)
    rows = np.array([(row.number, row.turns, row.environment_s) for row in finished], np.float64).reshape(-1, 3)
    places = np.searchsorted(number, rows[:, 0])
    turns[places], environment_s[places] = rows[:, 1], rows[:, 2]
    return turns, environment_s


def _read_tasks(connection: sqlite3.Connection, tasks: Sequence[str]) -> dict[str, int]:
    """Read the task code of each prompt; {} if all prompts have one task."""
    if len(tasks) < 2:
        return {}
    codes = {task: code for code, task in enumerate(tasks)}
    return {id: codes[task] for id, task in connection.execute("SELECT id, task FROM prompt")}


def _array(column: Sequence[Any], dtype: type, origin: float) -> npt.NDArray[Any]:
    values = np.array(column, np.float64) - origin  # None becomes NaN; a float64 holds any count exactly
    if issubclass(dtype, np.integer):
        values[np.isnan(values)] = -1
    return values.astype(dtype, copy=False)


_ROWS = 100_000


class ResidenceEnd(IntEnum):
    """End of a residence."""

    OPEN = 0  # still there
    FINISHED = 1
    INTERRUPTED = 2  # continues on another replica, or here under newer weights
    DROPPED = 3
    MOVED = 4  # interrupted by a repack


@dataclass(frozen=True, slots=True, kw_only=True)
class Residences:
    """Columns [M] by trajectory and time, e.g. trajectory 17 on replica 1 from 3.2 s to 4.1 s, FINISHED.

    Seconds are by the run's clock since `RunTimes.origin_s`; an open residence ends at infinity.
    """

    trajectory: Ints  # its number in the ledger
    replica: Ints
    version: Ints  # of the last token there; -1: no token
    start_s: Times
    end_s: Times
    end: npt.NDArray[np.int8]
    away: Times  # share of the time in its environment, equal for all residences of a trajectory

    def __len__(self) -> int:
        return len(self.trajectory)

    def where(self, chosen: BoolArray | npt.NDArray[np.int64]) -> "Residences":
        """Return the residences of a mask [M], or at these places."""
        return Residences(**{name: getattr(self, name)[chosen] for name in self.__dataclass_fields__})

    def until(self, now_s: float) -> "Residences":
        """Return a copy in which open residences end at `now_s`."""
        end_s = np.maximum(self.start_s, np.where(np.isinf(self.end_s), now_s, self.end_s))
        return replace(self, end_s=end_s)

    def with_environments(self, all_trajectories: Trajectories) -> "Residences":
        """Return a copy with the share of time that each trajectory spent in its environment.

        An unfinished trajectory, whose share is not on record, gets the mean share.
        """
        if not all_trajectories.has_turns:
            return self
        places = np.searchsorted(all_trajectories.number, self.trajectory)
        known = ~np.isnan(all_trajectories.environment_s)
        spent_s = np.bincount(places, weights=self.end_s - self.start_s, minlength=len(all_trajectories))
        environment_s = np.where(known, all_trajectories.environment_s.astype(np.float64), 0.0)
        mean = environment_s.sum() / max(float(spent_s[known].sum()), 1e-9)
        share = np.where(known, environment_s / np.maximum(spent_s, 1e-9), mean)
        return replace(self, away=np.clip(share, 0.0, 1.0)[places])


class RunTimes:
    """Converts stamps of events into seconds of the run's clock, as `ledger.machine.RunClock` does."""

    def __init__(self, connection: sqlite3.Connection, origin_s: float) -> None:
        rows = connection.execute(
            "SELECT seq, wall, mono FROM event WHERE seq = 1 OR seq IN (SELECT seq FROM incarnation) ORDER BY seq"
        ).fetchall()
        self._since, self._wall, self._mono = np.array(rows, np.float64).reshape(-1, 3).T
        self.origin_s = origin_s
        last = connection.execute(  # the seal of a finished run is broken by the resume
            "SELECT seq, mono FROM event WHERE seq IN (SELECT (SELECT seq FROM event WHERE seq < incarnation.seq"
            " AND kind != 'sealbroken' ORDER BY seq DESC LIMIT 1) FROM incarnation) ORDER BY seq"
        ).fetchall()
        self.stops_s = self.at([seq for seq, _ in last], [mono for _, mono in last])  # before each later start

    def at(self, seq: npt.ArrayLike, mono: npt.ArrayLike) -> Times:
        """Return seconds since the origin for events with these numbers and monotonic stamps [n]."""
        place = np.searchsorted(self._since, np.asarray(seq), side="right") - 1
        times: Times = self._wall[place] - self.origin_s + (np.asarray(mono, np.float64) - self._mono[place])
        return times

    @property
    def starts_s(self) -> Times:
        """Start of each controller."""
        return self.at(self._since, self._mono)


def read_residences(connection: sqlite3.Connection, times: RunTimes) -> Residences:
    """Read the residences of all trajectories, with evaluations."""
    numbers, from_events = _read_interrupted(connection, times)
    single = _read_single(connection, times)
    rows = np.concatenate([single[~np.isin(single[:, 0], numbers)], from_events])
    rows = rows[np.lexsort((rows[:, 3], rows[:, 0]))]
    number, replica, version, start_s, end_s, end = rows.T
    return Residences(
        trajectory=number.astype(np.int32),
        replica=replica.astype(np.int32),
        version=version.astype(np.int32),
        start_s=start_s.copy(),
        end_s=np.where(np.isnan(end_s), np.inf, end_s),
        end=end.astype(np.int8),
        away=np.zeros(len(number)),
    )


def _read_single(connection: sqlite3.Connection, times: RunTimes) -> Times:
    """Read one residence of each trajectory [M, 6], as if none was interrupted; an open end is NaN.

    The columns are the first six of `Residences`.
    """
    cursor = connection.execute(
        "SELECT number, replica, coalesce(newest_version, -1), started_s - :origin,"
        " coalesce(finished_s, ended_s) - :origin,"
        f" CASE WHEN finished_s IS NOT NULL THEN {ResidenceEnd.FINISHED:d}"
        f" WHEN ended_s IS NOT NULL THEN {ResidenceEnd.DROPPED:d} ELSE {ResidenceEnd.OPEN:d} END"
        " FROM trajectory WHERE started_s IS NOT NULL",
        {"origin": times.origin_s},
    )
    blocks = [np.empty((0, 6))]
    while rows := cursor.fetchmany(_ROWS):
        blocks.append(np.array(rows, np.float64))
    return np.concatenate(blocks)


def _read_interrupted(connection: sqlite3.Connection, times: RunTimes) -> tuple[Times, Times]:
    """Read numbers of interrupted trajectories, and their residences from events, as `_read_single` does."""
    rows = connection.execute(
        "SELECT DISTINCT subject FROM event WHERE kind = 'interrupted'"
        " UNION SELECT id FROM trajectory WHERE replica IS NOT NULL AND started_s IS NULL"
    )
    ids = json.dumps([id for (id,) in rows])
    among = "IN (SELECT value FROM json_each(?))"
    known = {
        id: (number, _sampled_spans(spans), newest)
        for id, number, spans, newest in connection.execute(
            f"SELECT id, number, spans, coalesce(newest_version, -1) FROM trajectory WHERE id {among}", (ids,)
        )
    }
    events = connection.execute(
        "SELECT seq, mono, body FROM event WHERE kind IN ('assigned', 'interrupted', 'finished', 'dropped')"
        f" AND subject {among} ORDER BY seq",
        (ids,),
    ).fetchall()
    at = times.at([seq for seq, _, _ in events], [mono for _, mono, _ in events]) if events else np.empty(0)
    residences: list[tuple[float, ...]] = []
    begun: dict[str, tuple[int, float]] = {}  # replica and start
    for (_, _, body), at_s in zip(events, at.tolist(), strict=True):
        event = decode_event(body)
        assert isinstance(event, Assigned | Interrupted | Finished | Dropped), f"{body} is of another kind"
        id = event.trajectory_id
        if isinstance(event, Assigned):
            begun[id] = event.replica, at_s
        elif id in begun:
            number, spans, newest = known[id]
            length = event.length if isinstance(event, Interrupted) else None
            residences.append(
                (number, begun[id][0], _version_at(spans, length, newest), begun.pop(id)[1], at_s, _end_of(event))
            )
    for id, (replica, start_s) in begun.items():
        residences.append((known[id][0], replica, known[id][2], start_s, np.nan, ResidenceEnd.OPEN))
    numbers = np.array([number for number, _, _ in known.values()], np.float64)
    return numbers, np.array(residences, np.float64).reshape(-1, 6)


def _end_of(event: Interrupted | Finished | Dropped) -> ResidenceEnd:
    match event:
        case Finished():
            return ResidenceEnd.FINISHED
        case Dropped():
            return ResidenceEnd.DROPPED
    return ResidenceEnd.MOVED if event.reason == "repacked" else ResidenceEnd.INTERRUPTED


def _sampled_spans(text: str | None) -> list[tuple[int, int]]:
    """Return (version, start) of each sampled span, ascending."""
    return [(span[0], span[1]) for span in msgspec.json.decode(text) if span[0] is not None] if text else []


def _version_at(spans: list[tuple[int, int]], length: int | None, newest: int) -> int:
    """Return the version of the last sampled token among the first `length`, or of the whole response."""
    if length is None:
        return newest
    return next((version for version, start in reversed(spans) if start < max(length, 1)), newest)
