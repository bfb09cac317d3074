"""Trajectories of a run as arrays, from which all figures of the analytics are computed. Reads the ledger only.

A million trajectories take about 150 MB: rows are read in blocks, which become arrays at once.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from laminar_py.ledger.turns import FinishedTurns, read_turns
from laminar_py.records.codec import BoolArray
from laminar_py.records.trajectory import Cap, DropReason, FinishReason, Kind, Status

_BLOCK = 1_000  # rows that are taken apart while they are in the processor's caches
KINDS, STATUSES = tuple(Kind), tuple(Status)  # meanings of the codes, here and below
REASONS, FINISHES = tuple(DropReason), tuple(FinishReason)
CAPS = tuple(Cap)

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectories:
    """Columns [N] of trajectories of a run, in the order of issue; -1 and NaN stand for none.

    Times are seconds since `origin_s`, by the run's clock; codes are places in the tuples above.
    """

    number: Ints  # as in the ledger, from 1 on: the place of its id, its prompt and its pieces there
    group: Ints  # dense, in the order of issue
    kind: Ints
    prompt: Ints  # place of its prompt in the stream
    status: Ints
    epoch: Ints  # times that it was handed to a replica
    replica: Ints  # the last one that had it
    length: Ints  # response tokens
    oldest_version: Ints
    newest_version: Ints
    finish: Ints
    cap: Ints
    drop: Ints
    step: Ints  # that consumed it
    version: Ints  # of the learner then
    staleness: Ints
    task: Ints
    reward: Floats
    weight: Floats
    queue_s: Floats  # on its last replica, until its first tokens there
    generate_s: Floats  # on its last replica, until it finished
    score_s: Floats
    scorer_s: Floats  # of a scorer's time, which scores several at once
    turns: Ints  # of the model, once finished; none at all in a run without an environment
    environment_s: Floats  # that its environment worked, likewise
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
        """Trajectories for which `mask` [N] is true."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        kept: dict[str, Any] = {
            name: column[mask] for name, column in columns.items() if isinstance(column, np.ndarray)
        }
        return replace(self, **kept)

    @property
    def has_turns(self) -> bool:
        """True where environments answer turns, and something has finished."""
        return bool((self.turns >= 0).any())

    def is_kind(self, kind: Kind) -> BoolArray:
        """[N]"""
        found: BoolArray = self.kind == KINDS.index(kind)
        return found

    def is_status(self, status: Status) -> BoolArray:
        """[N]"""
        found: BoolArray = self.status == STATUSES.index(status)
        return found

    def dropped_for(self, reason: DropReason) -> BoolArray:
        """[N]"""
        found: BoolArray = self.drop == REASONS.index(reason)
        return found


_TYPES: dict[str, type] = {  # of the columns that are numbers
    **dict.fromkeys(
        ("number", "prompt", "epoch", "replica", "length", "oldest_version", "newest_version"), np.int32
    ),
    **dict.fromkeys(("step", "version", "staleness"), np.int32),
    **dict.fromkeys(("reward", "weight", "queue_s", "generate_s", "score_s", "scorer_s"), np.float32),
    **dict.fromkeys(("issued_s", "started_s", "finished_s", "scored_s", "ready_s", "ended_s"), np.float64),
}
_CODES = {"kind": KINDS, "status": STATUSES, "finish": FINISHES, "cap": CAPS, "drop": REASONS}
_IN_SQL = {"prompt": "prompt_index", "finish": "finish_reason", "drop": "drop_reason"}  # where the name is another


def read_trajectories(connection: sqlite3.Connection, *, has_environment: bool = False) -> Trajectories:
    """Every trajectory of a run. The columns that hold text become codes as they are read."""
    origin = connection.execute("SELECT coalesce(min(issued_s), 0) FROM trajectory").fetchone()[0]
    tasks = tuple(task for (task,) in connection.execute("SELECT DISTINCT task FROM prompt ORDER BY task"))
    columns = [_IN_SQL.get(name, name) for name in (*_TYPES, *_CODES)]
    cursor = connection.execute(
        f"SELECT {', '.join(columns)}, group_id, prompt_id FROM trajectory ORDER BY number"
    )
    codes = {name: {str(text): code for code, text in enumerate(texts)} for name, texts in _CODES.items()}
    groups: dict[str, int] = {}  # dense numbers, in the order in which they are met
    task_of = _read_tasks(connection, tasks)
    blocks: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*_TYPES, *_CODES, "group", "task")}
    while rows := cursor.fetchmany(_BLOCK):
        values = iter(zip(*rows, strict=True))
        for name, dtype in _TYPES.items():
            blocks[name].append(_array(next(values), dtype, origin if dtype is np.float64 else 0.0))
        for name, of in codes.items():
            blocks[name].append(np.array([of.get(text, -1) for text in next(values)], np.int32))
        blocks["group"].append(np.array([groups.setdefault(id, len(groups)) for id in next(values)], np.int32))
        blocks["task"].append(np.array([task_of[id] if task_of else 0 for id in next(values)], np.int32))
    joined = {
        name: np.concatenate([np.empty(0, _TYPES.get(name, np.int32)), *found]) for name, found in blocks.items()
    }
    found = read_turns(connection) if has_environment else ()
    turns, environment_s = _turns(joined["number"], found)
    return Trajectories(**joined, turns=turns, environment_s=environment_s, origin_s=origin, tasks=tasks)


def _turns(number: Ints, found: Iterable[FinishedTurns]) -> tuple[Ints, Floats]:
    """Turns [N] and seconds of environments [N] of trajectories with these numbers."""
    turns, environment_s = np.full(len(number), -1, np.int32), np.full(len(number), np.nan, np.float32)
    rows = np.array([(one.number, one.turns, one.environment_s) for one in found], np.float64).reshape(-1, 3)
    places = np.searchsorted(number, rows[:, 0])
    turns[places], environment_s[places] = rows[:, 1], rows[:, 2]
    return turns, environment_s


def _read_tasks(connection: sqlite3.Connection, tasks: Sequence[str]) -> dict[str, int]:
    """Codes of the tasks of prompts; none where all prompts have one task."""
    if len(tasks) < 2:
        return {}
    codes = {task: code for code, task in enumerate(tasks)}
    return {id: codes[task] for id, task in connection.execute("SELECT id, task FROM prompt")}


def _array(column: Sequence[Any], dtype: type, origin: float) -> npt.NDArray[Any]:
    values = np.array(column, np.float64) - origin  # makes NaN of None, and holds any count exactly
    if issubclass(dtype, np.integer):
        values[np.isnan(values)] = -1
    return values.astype(dtype, copy=False)
