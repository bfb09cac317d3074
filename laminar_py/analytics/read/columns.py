"""The trajectories of a run as arrays: what every figure of the analytics is computed from. Reads the ledger only.

A million trajectories take about 150 MB: rows are read in blocks, which become arrays at once.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from laminar_py.records.codec import BoolArray
from laminar_py.records.trajectory import DropReason, FinishReason, Kind, Status

_BLOCK = 1_000  # rows that are taken apart while they are in the processor's caches
STATUSES, REASONS, FINISHES = tuple(Status), tuple(DropReason), tuple(FinishReason)  # what codes stand for
CAPS = ("tokens", "seconds")

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectories:
    """Columns [N] of the training trajectories of a run, in the order of issue; -1 and NaN stand for none.

    Times are seconds since `origin_s`, by the run's clock; codes are places in the tuples above.
    """

    number: Ints  # as in the ledger, from 1 on: the place of its id, its prompt and its pieces there
    group: Ints  # dense, in the order of issue
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
        """Those for which `mask` [N] is true."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        kept: dict[str, Any] = {
            name: column[mask] for name, column in columns.items() if isinstance(column, np.ndarray)
        }
        return replace(self, **kept)

    def is_status(self, status: Status) -> BoolArray:
        """[N]"""
        found: BoolArray = self.status == STATUSES.index(status)
        return found

    def dropped_for(self, reason: DropReason) -> BoolArray:
        """[N]"""
        found: BoolArray = self.drop == REASONS.index(reason)
        return found


_NUMBERS: dict[str, tuple[str, type]] = {  # field: what SQL makes it of, its type here
    "number": ("number", np.int32),
    "prompt": ("prompt_index", np.int32),
    "epoch": ("epoch", np.int32),
    "replica": ("replica", np.int32),
    "length": ("length", np.int32),
    "oldest_version": ("oldest_version", np.int32),
    "newest_version": ("newest_version", np.int32),
    "step": ("step", np.int32),
    "version": ("version", np.int32),
    "staleness": ("staleness", np.int32),
    "reward": ("reward", np.float32),
    "weight": ("weight", np.float32),
    "queue_s": ("queue_s", np.float32),
    "generate_s": ("generate_s", np.float32),
    "score_s": ("score_s", np.float32),
    **{
        name: (f"{name} - :origin", np.float64)
        for name in ("issued_s", "started_s", "finished_s", "scored_s", "ready_s", "ended_s")
    },
}
_CODES = {
    "status": ("status", STATUSES),
    "finish": ("finish_reason", FINISHES),
    "cap": ("cap", CAPS),
    "drop": ("drop_reason", REASONS),
}


def read_trajectories(connection: sqlite3.Connection, *, kind: Kind = Kind.TRAIN) -> Trajectories:
    """All of one kind. The columns that hold text become codes as they are read."""
    origin = connection.execute("SELECT coalesce(min(issued_s), 0) FROM trajectory").fetchone()[0]
    tasks = tuple(task for (task,) in connection.execute("SELECT DISTINCT task FROM prompt ORDER BY task"))
    columns = [sql for sql, _ in (*_NUMBERS.values(), *_CODES.values())]
    cursor = connection.execute(
        f"SELECT {', '.join(columns)}, group_id, prompt_id FROM trajectory WHERE kind = :kind ORDER BY number",
        {"origin": origin, "kind": kind},
    )
    codes = {
        name: {text: place for place, text in enumerate(map(str, texts))} for name, (_, texts) in _CODES.items()
    }
    blocks: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*_NUMBERS, *_CODES, "group", "task")}
    of_task, groups = _TaskOf(connection, tasks), _GroupOf()
    while rows := cursor.fetchmany(_BLOCK):
        values = iter(zip(*rows, strict=True))
        for name, (_, dtype) in _NUMBERS.items():
            blocks[name].append(_array(next(values), dtype))
        for name in _CODES:
            of = codes[name]
            blocks[name].append(np.array([of.get(text, -1) for text in next(values)], np.int32))
        blocks["group"].append(groups(next(values)))
        blocks["task"].append(of_task(next(values)))
    types = {name: dtype for name, (_, dtype) in _NUMBERS.items()}
    joined = {
        name: np.concatenate(parts) if parts else np.empty(0, types.get(name, np.int32))
        for name, parts in blocks.items()
    }
    return Trajectories(**joined, origin_s=origin, tasks=tasks)


class _TaskOf:
    """Codes of the tasks of prompts."""

    def __init__(self, connection: sqlite3.Connection, tasks: Sequence[str]) -> None:
        self._codes: dict[str, int] = {}
        if len(tasks) > 1:
            of = {task: code for code, task in enumerate(tasks)}
            self._codes = {id: of[task] for id, task in connection.execute("SELECT id, task FROM prompt")}

    def __call__(self, prompt_ids: Sequence[str]) -> Ints:
        codes = self._codes
        return np.array([codes[id] for id in prompt_ids] if codes else np.zeros(len(prompt_ids)), np.int32)


class _GroupOf:
    """Dense numbers of groups, in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def __call__(self, group_ids: Sequence[str]) -> Ints:
        numbers = self._numbers
        return np.array([numbers.setdefault(id, len(numbers)) for id in group_ids], np.int32)


def _array(column: Sequence[Any], dtype: type) -> npt.NDArray[Any]:
    values = np.array(column, np.float64)  # makes NaN of None, and holds any count exactly
    if issubclass(dtype, np.integer):
        values[np.isnan(values)] = -1
    return values.astype(dtype, copy=False)
