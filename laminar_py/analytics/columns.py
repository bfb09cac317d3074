"""The trajectories of a run as arrays: what every figure of the analytics is computed from. Reads the ledger only.

A million trajectories take about 150 MB: rows are read in blocks, which become arrays at once.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from laminar_py.codec import BoolArray
from laminar_py.types import DropReason, FinishReason, Kind, Status

_BLOCK = 50_000
STATUSES, REASONS, FINISHES = tuple(Status), tuple(DropReason), tuple(FinishReason)  # what codes stand for
CAPS = ("tokens", "seconds")

Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Times = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Columns [N] of the training trajectories of a run, in the order of issue; -1 and NaN stand for none.

    Times are seconds since `origin_s`, by the run's clock; codes are places in the tuples above.
    """

    number: Ints  # as in the ledger, from 1 on: the place of its id, its prompt and its pieces there
    group: Ints  # dense, in the order of issue
    prompt: Ints  # place of its prompt in the stream
    status: Ints
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
    queue_s: Floats  # of its last stream, in the engine
    generate_s: Floats  # of all streams, queueing included
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


_PLAIN = (
    ("number", "number", np.int32),
    ("prompt", "prompt_index", np.int32),
    ("replica", "replica", np.int32),
    ("length", "length", np.int32),
    ("oldest_version", "oldest_version", np.int32),
    ("newest_version", "newest_version", np.int32),
    ("step", "step", np.int32),
    ("version", "version", np.int32),
    ("staleness", "staleness", np.int32),
    ("reward", "reward", np.float32),
    ("weight", "weight", np.float32),
    ("queue_s", "queue_s", np.float32),
    ("generate_s", "generate_s", np.float32),
    ("score_s", "score_s", np.float32),
    *((name, f"{name} - :origin", np.float64) for name in ("issued_s", "started_s", "finished_s", "scored_s")),
    *((name, f"{name} - :origin", np.float64) for name in ("ready_s", "ended_s")),
)


def read_trajectories(connection: sqlite3.Connection, *, kind: Kind = Kind.TRAIN) -> Trajectories:
    """All of one kind."""
    origin = connection.execute("SELECT coalesce(min(issued_s), 0) FROM trajectory").fetchone()[0]
    tasks = tuple(task for (task,) in connection.execute("SELECT DISTINCT task FROM prompt ORDER BY task"))
    coded = {
        "status": _case("status", STATUSES),
        "finish": _case("finish_reason", FINISHES),
        "cap": _case("cap", CAPS),
        "drop": _case("drop_reason", REASONS),
    }
    numbers = {name: sql for name, sql, _ in _PLAIN} | coded
    cursor = connection.execute(
        f"SELECT {', '.join(numbers.values())}, group_id, prompt_id FROM trajectory WHERE kind = :kind"
        " ORDER BY number",
        {"origin": origin, "kind": kind},
    )
    types = {name: dtype for name, _, dtype in _PLAIN} | dict.fromkeys(coded, np.int32)
    blocks: dict[str, list[npt.NDArray[Any]]] = {name: [] for name in (*numbers, "group", "task")}
    of_task = _TaskOf(connection, tasks)
    groups: dict[str, int] = {}
    while rows := cursor.fetchmany(_BLOCK):
        *columns, group_ids, prompt_ids = zip(*rows, strict=True)
        for name, column in zip(numbers, columns, strict=True):
            blocks[name].append(_array(column, types[name]))
        blocks["group"].append(np.array([groups.setdefault(g, len(groups)) for g in group_ids], np.int32))
        blocks["task"].append(of_task(prompt_ids))
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


def _case(column: str, names: Sequence[str]) -> str:
    """SQL for the place of a column's text in `names`, -1 where it is none of them."""
    cases = " ".join(f"WHEN '{name}' THEN {place}" for place, name in enumerate(names))
    return f"CASE {column} {cases} ELSE -1 END"


def _array(column: Sequence[Any], dtype: type) -> npt.NDArray[Any]:
    none = np.nan if issubclass(dtype, np.floating) else -1
    return np.array([none if value is None else value for value in column], dtype)
