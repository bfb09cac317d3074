"""The writer puts a batch of events on disk in one transaction. The ledger calls it, from one thread at a time.

The transaction has the events of a batch, the rows that they changed and the references that they name (law 1).
The hash of every event covers all events before it (law 11). A batch with an event of `DURABLE` survives a power
cut, with everything before it.
"""

import sqlite3
from dataclasses import dataclass, field
from typing import get_args

import msgspec

from laminar_py.ledger.pieces import INSERT, PieceRow
from laminar_py.ledger.rows import TRAJECTORY_COLUMNS
from laminar_py.records import events as e
from laminar_py.records.codec import event_hash, prompt_digest
from laminar_py.records.trajectory import Prompt

_UPDATED = TRAJECTORY_COLUMNS[TRAJECTORY_COLUMNS.index("status") :]
_UPSERT_TRAJECTORY = (
    f"INSERT INTO trajectory VALUES ({', '.join('?' * len(TRAJECTORY_COLUMNS))})"
    f" ON CONFLICT (number) DO UPDATE SET {', '.join(f'{column} = excluded.{column}' for column in _UPDATED)}"
)

# Statements by which events that are not about a trajectory change other tables; event fields are the parameters.
_STATEMENTS: dict[type, tuple[str, ...]] = {
    e.RunStarted: (
        "INSERT INTO incarnation VALUES (:seq, :incarnation, :host, :pid, :config_digest, :drain,"
        " :max_staleness, :resumed_step, NULL)",
    ),
    e.RunEnded: ("UPDATE incarnation SET ended = :reason WHERE incarnation = :incarnation",),
    e.VersionPublished: (
        "INSERT INTO version VALUES (:seq, :version, :step, :incarnation, :parent, :digest, :num_bytes,"
        " :stall_s, 0)",
    ),
    e.Stepped: (
        "INSERT INTO step VALUES (:seq, :step, :incarnation, :num_trajectories, :num_tokens, :loss, :grad_norm,"
        " :reward, :elapsed_s, :waited_s, :reference_s, 0)",
    ),
    e.Replayed: ("INSERT INTO replay VALUES (:seq, :trajectory_id, :step, :version, :staleness, :weight, 0)",),
    e.Checkpointed: ("INSERT INTO checkpoint VALUES (:seq, :step, :version, :path, 0)",),
    e.RolledBack: (
        "UPDATE step SET undone = 1 WHERE step > :step",
        "UPDATE replay SET undone = 1 WHERE step > :step",
        "UPDATE checkpoint SET undone = 1 WHERE step > :step",
        "UPDATE version SET undone = 1 WHERE step > :step",
    ),
    e.Evaluated: (
        "INSERT INTO evaluation VALUES (:seq, :pass_id, :set_name, :version, :step, :rl_s, :problems, :samples,"
        " :mean)",
    ),
}
DURABLE = (e.Stepped, e.Consumed, e.Replayed, e.Checkpointed, e.SealBroken, e.RunEnded)
"""Events whose batch is synced: weights are trained and files are deleted because of them."""
SIDE_TABLES = ("incarnation", "version", "step", "replay", "checkpoint", "evaluation")


class Stamped(msgspec.Struct, frozen=True, gc=False):
    """An event with its number and the wall and monotonic time of its append."""

    seq: int
    wall: float
    mono: float
    event: e.AnyEvent


@dataclass(slots=True, kw_only=True)
class Unwritten:
    """Everything appended between two flushes, as plain values, since rows may change meanwhile."""

    events: list[Stamped] = field(default_factory=list)
    rows: list[tuple[object, ...]] = field(default_factory=list)  # trajectory rows as columns
    prompts: list[Prompt] = field(default_factory=list)
    pieces: list[PieceRow] = field(default_factory=list)


class Writer:
    """The only connection that writes; `seq` and `hash` are the end of the hash chain on disk."""

    def __init__(self, connection: sqlite3.Connection, *, host: str) -> None:
        self._connection = connection
        self._host = host
        self.seq, self.hash = connection.execute("SELECT seq, hash FROM head").fetchone()

    def write(self, batch: Unwritten) -> None:
        """Write a batch in one transaction.

        Raises `sqlite3.Error`, or `AssertionError` if two prompts have one id; then nothing of the batch is
        written.
        """
        connection = self._connection
        durable = any(isinstance(stamped.event, DURABLE) for stamped in batch.events)
        connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            rows, head = self._chain(batch.events)
            connection.executemany("INSERT INTO event VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
            connection.executemany(_UPSERT_TRAJECTORY, batch.rows)
            self._store_prompts(batch.prompts)
            connection.executemany(INSERT, map(msgspec.structs.astuple, batch.pieces))
            for stamped in batch.events:
                apply_to_tables(connection, stamped.seq, stamped.event)
            connection.execute("UPDATE head SET seq = ?, hash = ?", head)
        self.seq, self.hash = head

    def close(self) -> None:
        """Close the connection, which makes SQLite fold its log into the file."""
        self._connection.close()

    def _store_prompts(self, prompts: list[Prompt]) -> None:
        """Store new prompts. Raises `AssertionError` if another prompt is stored under the same id."""
        for prompt in prompts:
            id, ids = prompt.id, prompt.ids.tobytes()
            digest = prompt_digest(id, prompt.text, ids, prompt.answer, prompt.task, prompt.fields_json)
            stored = self._connection.execute("SELECT digest FROM prompt WHERE id = ?", (id,)).fetchone()
            if stored is None:
                row = id, prompt.index, ids, prompt.text, prompt.answer, prompt.task, prompt.fields_json, digest
                self._connection.execute("INSERT INTO prompt VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            else:
                assert stored[0] == digest, f"prompt {id}: another prompt has this id; each needs its own"

    def _chain(self, events: list[Stamped]) -> tuple[list[tuple[object, ...]], tuple[int, bytes]]:
        """Return rows of events, each with a hash over all events before it, and the new head (number, hash)."""
        seq, previous, host = self.seq, self.hash, self._host
        encode = _encoder.encode
        rows: list[tuple[object, ...]] = []
        for stamped in events:
            seq, wall, mono, event = stamped.seq, stamped.wall, stamped.mono, stamped.event
            kind, subject = _kinds[type(event)], _subject(event)
            body = encode(event)
            previous = event_hash(
                previous, seq=seq, wall=wall, mono=mono, host=host, kind=kind, subject=subject, body=body
            )
            rows.append((seq, wall, mono, host, kind, subject, body.decode(), previous))
        return rows, (seq, previous)


_encoder = msgspec.json.Encoder()
_kinds = {kind: str(kind.__struct_config__.tag) for kind in get_args(e.AnyEvent)}


def apply_to_tables(connection: sqlite3.Connection, seq: int, event: e.AnyEvent) -> None:
    """Update `SIDE_TABLES` by event number `seq`; most events change none."""
    for statement in _STATEMENTS.get(type(event), ()):
        connection.execute(statement, {**_values(event), "seq": seq})


def _values(event: e.AnyEvent) -> dict[str, object]:
    """Return an event's fields as SQL parameters; an evaluation's parameters are the figures with a column."""
    values = msgspec.structs.asdict(event)
    if isinstance(event, e.Evaluated):
        figures = event.figures
        values |= {"problems": figures.problems, "samples": figures.samples, "mean": figures.mean.value}
        del values["figures"]
    return values


def _subject(event: e.AnyEvent) -> str:
    """Return the column `subject` of an event: a trajectory, replica, relay node, part, version or step."""
    trajectory_id = getattr(event, "trajectory_id", None)
    if trajectory_id is not None:
        return str(trajectory_id)
    match event:
        case e.VersionLoaded():
            return f"replica-{event.replica}"
        case e.Relayed() | e.Pulled() | e.RelayGaveUp() | e.Reattached():
            return event.node
        case e.FrozenLoaded():
            return event.source
        case e.PartStarted() | e.PartCrashed():
            return event.part
        case e.VersionPublished() | e.Evaluated():
            return f"version-{event.version}"
        case e.Alarmed():
            return event.part
        case e.SettingChanged():
            return event.name
        case (
            e.Unquantized() | e.Stepped() | e.StepSkipped() | e.RefillStopped() | e.Checkpointed() | e.RolledBack()
        ):
            return f"step-{event.step}"
        case _:
            return ""
