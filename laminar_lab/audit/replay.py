"""Replay of the event log: its chain of hashes, its events in order, and the tables that follow from them.

`audit.verify` calls it. A log may hold events of a later release. Their hashes are checked like all others, and
the replay skips the events.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from laminar_lab.audit.checks import Rule, Violation
from laminar_py.ledger import (
    EVENT_KINDS,
    SIDE_TABLES,
    TRAJECTORY_COLUMNS,
    IllegalEventError,
    LiveTrajectory,
    Machine,
    Stamped,
    apply_to_tables,
    create_tables,
    decode_event,
    decode_events,
    live_rows,
    read_accounting,
    row_values,
)
from laminar_py.records.codec import CHAIN_START, event_hash
from laminar_py.records.events import (
    AnyEvent,
    Consumed,
    Event,
    Finished,
    Interrupted,
    Replayed,
    Restamped,
    StreamLost,
)
from laminar_py.records.trajectory import Status

_BLOCK = 4096  # events that are decoded at once
_AT_ONCE = 256  # rows
_RECALLED = 4096  # rows of replayed trajectories that are kept, since the next steps may replay them again
_FROM_PIECES = frozenset({"length", "oldest_version", "newest_version"})  # known from events once finished
_WITH_LENGTH: frozenset[type[Event]] = frozenset({Interrupted, StreamLost, Finished, Restamped})


def check_hashes(connection: sqlite3.Connection, first: int, last: int | None) -> Iterator[Violation]:
    """Iterate over violations by the hashes of events `first` to `last`; None: to the end of the log.

    The hash before the first event counts as right, since the check of the range before verifies it.
    """
    stored = connection.execute("SELECT hash FROM event WHERE seq = ?", (first - 1,)).fetchone()
    previous = CHAIN_START if first == 1 else stored[0] if stored else None
    before = first - 1
    # body as bytes: a changed byte need not be valid text
    cursor = connection.execute(
        "SELECT seq, wall, mono, host, kind, subject, CAST(body AS BLOB), hash FROM event"
        " WHERE seq BETWEEN ? AND ? ORDER BY seq",
        (first, last or 2**62),
    )
    for seq, wall, mono, host, kind, subject, body, noted in cursor:
        columns = {"wall": wall, "mono": mono, "host": host, "kind": kind, "subject": subject, "body": body}
        if seq != before + 1:
            yield Violation(Rule.LOG, f"event {before + 1}", f"is missing; the next one is {seq}")
        elif previous is not None and event_hash(previous, seq=seq, **columns) != noted:
            yield Violation(Rule.LOG, f"event {seq}", f"({kind} {subject}) was changed or inserted")
        before, previous = seq, noted
    if last is None:
        head = connection.execute("SELECT seq, hash FROM head").fetchone()
        if head != (before, previous):
            written = "its end is not on record" if head is None else f"{head[0]} were written"
            yield Violation(Rule.LOG, "end", f"the log ends with event {before}, but {written}")
    elif before != last:
        yield Violation(Rule.LOG, f"event {before + 1}", f"is missing, and so are all up to {last}")


class Replay:
    """Applies the events of a log again and compares the outcome with the stored tables.

    A row is compared when its trajectory has ended, and then forgotten. Only trajectories with an undone
    consumption, and trajectories that are live at the end of the log, wait. Stored rows are read once, in order of
    issue.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.violations: list[Violation] = []
        self.unknown: Counter[str] = Counter()  # events of a later release, by kind
        self._connection = connection
        self._again = sqlite3.connect(":memory:", isolation_level=None)
        create_tables(self._again)
        undone = connection.execute("SELECT DISTINCT subject FROM event WHERE kind = 'undone'")
        self._undone = {subject for (subject,) in undone}
        self._waiting: dict[str, LiveTrajectory] = {}  # ended, but one of their steps is undone
        self._stored = connection.execute(
            f"SELECT {', '.join(TRAJECTORY_COLUMNS)} FROM trajectory ORDER BY number"
        )
        self._read = 0  # the last number that was read
        self._ahead: dict[int, tuple[object, ...]] = {}  # stored rows of trajectories that have not ended
        self._machine = Machine(recall=lru_cache(_RECALLED)(self._stored_row))

    def read_events(self) -> Iterator[Stamped]:
        """Iterate over the events of the log in order; note unreadable and unknown ones."""
        cursor = self._connection.execute(
            "SELECT seq, wall, mono, kind, CAST(body AS BLOB) FROM event ORDER BY seq"
        )
        while block := cursor.fetchmany(_BLOCK):
            try:
                events = decode_events([row[4] for row in block])
            except (msgspec.DecodeError, UnicodeDecodeError):
                yield from self._one_by_one(block)
                continue
            for (seq, wall, mono, _, _), event in zip(block, events, strict=True):
                yield Stamped(seq, wall, mono, event)

    def row_before(self, event: AnyEvent) -> LiveTrajectory | None:
        """Return the row of an event's trajectory, None if it is not live, or of a replay not consumed."""
        if isinstance(event, Replayed):
            return self._machine.find_consumed(event.trajectory_id)
        return self._machine.live.get(getattr(event, "trajectory_id", ""))

    def apply_event(self, stamped: Stamped) -> LiveTrajectory | None:
        """Apply an event, and return the row that it changed. An illegal event is a violation."""
        event = stamped.event
        if type(event) in _WITH_LENGTH:
            self._grow(event)
        try:
            row = self._machine.apply(stamped.seq, event, wall=stamped.wall, mono=stamped.mono)
        except IllegalEventError as error:
            rule = Rule.CONSUMPTION if isinstance(event, Consumed | Replayed) else Rule.ORDER
            self.violations.append(Violation(rule, f"event {stamped.seq}", str(error)))
            return None
        if row is None:
            apply_to_tables(self._again, stamped.seq, event)
        elif row.status is Status.CONSUMED or row.status is Status.DROPPED:
            if row.id in self._undone:
                self._waiting[row.id] = row
            else:
                self._compare(row)
        return row

    def end(self) -> None:
        """Compare all rows that still wait, then the other tables and the accounting."""
        live = self._machine.live
        for row in live.values():
            self._compare(row)
        for row in self._waiting.values():
            if row.id not in live:
                self._compare(row)
        highest = self._machine.marks.number
        query = "SELECT id FROM trajectory WHERE number > ? OR number < 1"
        for (id,) in self._connection.execute(query, (highest,)):
            self.violations.append(Violation(Rule.ROWS, id, "has a row, but was never issued"))
        self.violations += self._compare_tables()
        self.violations += self._compare_accounting()
        self._again.close()

    def _one_by_one(self, block: list[tuple[int, float, float, str, bytes]]) -> Iterator[Stamped]:
        """Yield the readable events of a block; note a violation for each unreadable event."""
        for seq, wall, mono, kind, body in block:
            if kind not in EVENT_KINDS:
                self.unknown[kind] += 1
                continue
            try:
                event = decode_event(body)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.violations.append(Violation(Rule.LOG, f"event {seq}", f"({kind}) cannot be read: {error}"))
            else:
                yield Stamped(seq, wall, mono, event)

    def _stored_row(self, trajectory_id: str) -> LiveTrajectory | None:
        """Return the stored row of an ended trajectory; the replay holds those with an undone consumption."""
        try:
            return next(live_rows(self._connection, "id = ?", (trajectory_id,)), None)
        except msgspec.ValidationError:
            return None  # `_compare` tells how the row was changed

    def _grow(self, event: AnyEvent) -> None:
        """Give a row the length that an event states, since `audit.responses` compares the pieces."""
        row = self.row_before(event)
        if row is None:
            return
        if isinstance(event, Interrupted | StreamLost | Finished):
            row.length = event.length
        elif isinstance(event, Restamped) and event.spans:
            row.length = event.spans[-1].end

    def _compare(self, row: LiveTrajectory) -> None:
        """Compare a replayed trajectory with its stored row, and note each difference as a violation."""
        while self._read < row.number:
            block = self._stored.fetchmany(_AT_ONCE)
            self._ahead.update((stored[0], stored) for stored in block)
            self._read = block[-1][0] if block else row.number
        stored_row, replayed = self._ahead.pop(row.number, None), row_values(row)
        if stored_row is None:
            self.violations.append(Violation(Rule.ROWS, row.id, "has no row"))
        elif stored_row != replayed:
            self.violations += self._differences(row, replayed, stored_row)

    def _differences(
        self, row: LiveTrajectory, replayed: Sequence[object], stored: Sequence[object]
    ) -> Iterator[Violation]:
        for place, column in enumerate(TRAJECTORY_COLUMNS):
            value, expected = stored[place], msgspec.to_builtins(replayed[place])
            if value != expected and not (column in _FROM_PIECES and row.finish_reason is None):
                yield Violation(Rule.ROWS, row.id, f"{column} is {value!r}, the events say {expected!r}")

    def _compare_tables(self) -> Iterator[Violation]:
        """Yield a violation for each row of a side table that the replay does not give."""
        for table in SIDE_TABLES:
            query = f"SELECT * FROM {table}"
            stored = {row[0]: row for row in self._connection.execute(query)}
            replayed = {row[0]: row for row in self._again.execute(query)}
            for seq in sorted(stored.keys() | replayed.keys()):
                value, expected = stored.get(seq), replayed.get(seq)
                if value != expected:
                    yield Violation(Rule.ROWS, f"{table} of event {seq}", f"is {value}, the events say {expected}")

    def _compare_accounting(self) -> Iterator[Violation]:
        """Yield violations if the counts of the rows differ from the replay, or do not add up."""
        events = self._machine.accounting()
        try:
            rows = read_accounting(self._connection)
        except ValueError as error:
            yield Violation(Rule.DROPS, "trajectory", str(error))
            return
        for name, counted, stored in (("train", events.train, rows.train), ("eval", events.eval, rows.eval)):
            if not counted.balanced:
                yield Violation(Rule.ACCOUNTING, name, f"issued is not consumed + dropped + live: {counted}")
            if counted != stored:
                yield Violation(Rule.ACCOUNTING, name, f"rows count {stored}, the events {counted}")
