"""Typed rows of the ledger for its readers; `ledger.trajectory` extends the row of a live trajectory.

The fields of `TrajectoryRow` are the columns of the table `trajectory` in `schema.sql`, in order.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar, get_args

import msgspec
import numpy as np

from laminar_py.records.events import AnyEvent, Event, Finished
from laminar_py.records.spans import decode_spans, num_turns
from laminar_py.records.trajectory import DropReason, FinishReason, Kind, Prompt, Status


class TrajectoryRow(msgspec.Struct, array_like=True, gc=False, kw_only=True):
    """A row of the table `trajectory`, e.g. sample "g3.1" of prompt "p17"."""

    number: int  # 1, 2, 3, ... in order of issue
    id: str
    group_id: str
    prompt_id: str
    prompt_index: int
    sample_index: int
    kind: Kind
    status: Status
    first_seq: int  # number of its first event
    last_seq: int  # number of its last event
    epoch: int = 0
    replica: int | None = None  # the last one
    length: int = 0  # response tokens stored
    oldest_version: int | None = None
    newest_version: int | None = None
    spans: str | None = None  # JSON of all spans once finished; before that, of restamped tokens
    restamped: int | None = None  # leading tokens for which `spans` replaces the stored spans
    finish_reason: FinishReason | None = None
    digest: str | None = None  # hash of the finished response
    queue_s: float | None = None
    generate_s: float | None = None
    cap: str | None = None  # value of the `Cap` that cut it
    reward: float | None = None
    advantage: float | None = None
    advantage_scale: float | None = None
    drop_reason: DropReason | None = None
    drop_detail: str | None = None
    step: int | None = None  # the learner step that consumed it
    version: int | None = None  # the learner's version in that step
    staleness: int | None = None
    weight: float | None = None
    score_s: float | None = None  # duration of its scoring
    scorer_s: float | None = None  # its share of a scorer's time, which scores several at once
    issued_s: float | None = None  # this and the next: times by `machine.RunClock`
    started_s: float | None = None  # first handed to a replica
    finished_s: float | None = None
    scored_s: float | None = None
    ready_s: float | None = None  # its group had its advantages
    ended_s: float | None = None  # consumed or dropped


class KindAccount(msgspec.Struct, kw_only=True):
    """Law 1 for one kind, e.g. `KindAccount(issued=10, consumed=6, dropped={DropReason.STALE: 1}, live=3)`.

    Replays come on top: a trajectory is consumed once and may be replayed many times.
    """

    issued: int = 0
    consumed: int = 0
    dropped: dict[DropReason, int] = {}
    live: int = 0
    replayed: int = 0  # times that a step trained on a consumed trajectory again

    @property
    def balanced(self) -> bool:
        """Whether issued = consumed + dropped + live."""
        return self.issued == self.consumed + sum(self.dropped.values()) + self.live


class Accounting(msgspec.Struct, frozen=True):
    """Counts of issued, consumed, dropped and live trajectories, for training and evaluations."""

    train: KindAccount = msgspec.field(default_factory=KindAccount)
    eval: KindAccount = msgspec.field(default_factory=KindAccount)

    def of_kind(self, kind: Kind) -> KindAccount:
        """Return the counts of one kind."""
        return self.train if kind is Kind.TRAIN else self.eval

    @property
    def balanced(self) -> bool:
        """Whether law 1 holds for both kinds."""
        return self.train.balanced and self.eval.balanced


TRAJECTORY_COLUMNS = TrajectoryRow.__struct_fields__


def row_values(row: TrajectoryRow) -> tuple[object, ...]:
    """Return the values of `TRAJECTORY_COLUMNS`, enums as they are."""
    return msgspec.structs.astuple(row)[: len(TRAJECTORY_COLUMNS)]


# names of event types in the log
EVENT_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyEvent))

_events_decoder: msgspec.json.Decoder[list[AnyEvent]] = msgspec.json.Decoder(list[AnyEvent])
_event_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


def decode_event(body: str | bytes) -> AnyEvent:
    """Decode an event of the log. Raises `msgspec.DecodeError` or `UnicodeDecodeError`."""
    return _event_decoder.decode(body)


def decode_events(bodies: Sequence[bytes]) -> list[AnyEvent]:
    """Decode several events of the log. Raises `msgspec.DecodeError` or `UnicodeDecodeError`."""
    events = _events_decoder.decode(b"[" + b",".join(bodies) + b"]")
    if len(events) != len(bodies):
        raise msgspec.DecodeError(f"{len(events)} events in {len(bodies)} bodies")
    return events


Kinds = TypeVar("Kinds", bound=Event)


def read_events(
    connection: sqlite3.Connection, *kinds: type[Kinds], newest_first: bool = False
) -> Iterator[Kinds]:
    """Iterate over the events of some types in the order of the log, by one scan of it."""
    tags = [kind.__struct_config__.tag for kind in kinds]
    query = f"SELECT body FROM event WHERE kind IN ({', '.join('?' * len(tags))}) ORDER BY seq"
    query += " DESC" if newest_first else ""
    for (body,) in connection.execute(query, tags):
        event = decode_event(body)
        assert isinstance(event, kinds), f"{body} is of another type than its column `kind` says"
        yield event


def trajectory_rows(
    connection: sqlite3.Connection, where: str = "1", values: tuple[object, ...] = (), *, limit: int | None = None
) -> Iterable[TrajectoryRow]:
    """Iterate over rows that meet the SQL condition `where`, in order of issue; `values` fill its parameters."""
    query = f"SELECT {', '.join(TRAJECTORY_COLUMNS)} FROM trajectory WHERE {where} ORDER BY number LIMIT ?"
    cursor = connection.execute(query, (*values, -1 if limit is None else limit))
    return (msgspec.convert(row, TrajectoryRow) for row in cursor)


def unchecked_rows(
    connection: sqlite3.Connection, where: str, values: tuple[object, ...]
) -> Iterator[TrajectoryRow]:
    """Iterate over rows that meet an SQL condition, in order of issue, without type checks of their values."""
    query = f"SELECT {', '.join(TRAJECTORY_COLUMNS)} FROM trajectory WHERE {where} ORDER BY number"
    return (
        TrajectoryRow(**dict(zip(TRAJECTORY_COLUMNS, row, strict=True)))
        for row in connection.execute(query, values)
    )


def read_prompt(connection: sqlite3.Connection, id: str, *, index: int | None = None) -> Prompt | None:
    """Return a prompt, at place `index` of the stream, by default its first place; None if it was not stored."""
    query = "SELECT idx, text, ids, answer, task, fields FROM prompt WHERE id = ?"
    stored = connection.execute(query, (id,)).fetchone()
    if stored is None:
        return None
    first, text, ids, answer, task, fields = stored
    return Prompt(
        id=id,
        index=first if index is None else index,
        text=text,
        ids=np.frombuffer(ids, np.int32),
        answer=answer,
        task=task,
        fields_json=fields,
    )


class FinishedTurns(NamedTuple):
    """Turns of a finished trajectory, e.g. `FinishedTurns(17, Kind.TRAIN, 3, 0.42)`."""

    number: int
    kind: Kind
    turns: int  # of the model
    environment_s: float  # seconds until its environment answered, over all replicas


def read_turns(connection: sqlite3.Connection) -> Iterator[FinishedTurns]:
    """Yield the turns of each finished trajectory, unordered. Raises `msgspec.DecodeError` for bad spans.

    Reports call it only for runs with an environment, since it scans all events, which have no index.
    """
    rows = connection.execute(
        "SELECT number, trajectory.kind, spans, coalesce(json_extract(body, '$.environment_s'), 0.0) FROM event"
        " CROSS JOIN trajectory ON id = subject WHERE event.kind = ? AND spans IS NOT NULL",
        (Finished.__struct_config__.tag,),
    )
    for number, kind, spans, environment_s in rows:
        yield FinishedTurns(number, Kind(kind), num_turns(decode_spans(spans)), environment_s)


def read_accounting(connection: sqlite3.Connection) -> Accounting:
    """Count the trajectories on record by kind, status and drop reason, and the replays."""
    accounting = Accounting()
    for kind, status, reason, count in connection.execute(
        "SELECT kind, status, drop_reason, count(*) FROM trajectory GROUP BY kind, status, drop_reason"
    ):
        account = accounting.of_kind(Kind(kind))
        account.issued += count
        if status == Status.CONSUMED:
            account.consumed += count
        elif reason is not None:
            account.dropped[DropReason(reason)] = count
        else:
            account.live += count
    accounting.train.replayed = sum(read_replays(connection).values())
    return accounting


def read_replays(connection: sqlite3.Connection) -> Counter[int]:
    """Count the replays that no rollback undid, by learner step."""
    counted = connection.execute("SELECT step, count(*) FROM replay WHERE NOT undone GROUP BY step")
    return Counter(dict(counted))
