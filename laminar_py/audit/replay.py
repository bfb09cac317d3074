"""The tables against a replay of the events. Driven by `audit.verify`.

A row is compared when its trajectory is done with, and then forgotten; only those whose consumption is undone
somewhere in the log, and those that are live at its end, wait.
"""

import sqlite3
from collections.abc import Iterator

import msgspec

from laminar_py.audit.findings import Finding, Law
from laminar_py.events import AnyEvent, Consumed, Finished, Interrupted, Restamped, StreamCut
from laminar_py.store.database import create
from laminar_py.store.machine import IllegalEventError, Machine
from laminar_py.store.rows import COLUMNS, TrajectoryRow, read_accounting
from laminar_py.store.writer import SIDE_TABLES, apply_to_tables
from laminar_py.types import Status

_FROM_PIECES = frozenset({"length", "oldest_version", "newest_version"})  # known from events once finished


class Replay:
    """Applies the events a second time and compares what comes of it."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._again = sqlite3.connect(":memory:", isolation_level=None)
        create(self._again)
        undone = connection.execute("SELECT DISTINCT subject FROM event WHERE kind = 'undone'")
        self._undone = {subject for (subject,) in undone}
        self._waiting: dict[str, TrajectoryRow] = {}  # done with, but for an undone step
        self._machine = Machine(recall=self._waiting.get)

    def row_before(self, event: AnyEvent) -> TrajectoryRow | None:
        """The row of the event's trajectory, if that is live."""
        return self._machine.live.get(getattr(event, "trajectory_id", ""))

    def see(self, seq: int, event: AnyEvent, *, wall: float, mono: float) -> Iterator[Finding]:
        """Apply event number `seq`, stamped by the two clocks; say so if that cannot be."""
        before = self.row_before(event)
        if before is not None:  # the pieces are compared elsewhere
            if isinstance(event, Interrupted | StreamCut | Finished):
                before.length = event.length
            elif isinstance(event, Restamped) and event.spans:
                before.length = event.spans[-1].end
        try:
            row = self._machine.apply(seq, event, wall=wall, mono=mono)
        except IllegalEventError as error:
            law = Law.CONSUMPTION if isinstance(event, Consumed) else Law.ORDER
            yield Finding(law, f"event {seq}", str(error))
            return
        apply_to_tables(self._again, seq, event)
        if row is None or row.id in self._machine.live:
            return
        if row.id in self._undone:
            self._waiting[row.id] = row
        else:
            yield from self._compare(row)

    def end(self) -> Iterator[Finding]:
        """Compare everything that could not be compared before."""
        live = self._machine.live
        for row in live.values():
            yield from self._compare(row)
        for row in self._waiting.values():
            if row.id not in live:
                yield from self._compare(row)
        highest = self._machine.marks.number
        query = "SELECT id FROM trajectory WHERE number > ? OR number < 1"
        for (id,) in self._connection.execute(query, (highest,)):
            yield Finding(Law.ROWS, id, "has a row, but was never issued")
        yield from self._compare_tables()
        yield from self._compare_accounting()
        self._again.close()

    def _compare(self, row: TrajectoryRow) -> Iterator[Finding]:
        if row.status is Status.DROPPED and row.drop_reason is None:
            yield Finding(Law.DROPS, row.id, "was dropped without a reason")
        columns = ", ".join(COLUMNS)
        query = f"SELECT {columns} FROM trajectory WHERE number = ?"
        stored = self._connection.execute(query, (row.number,)).fetchone()
        if stored is None:
            yield Finding(Law.ROWS, row.id, "has no row")
            return
        for column, replayed, found in zip(COLUMNS, msgspec.to_builtins(row), stored, strict=True):
            if found != replayed and not (column in _FROM_PIECES and row.finish_reason is None):
                yield Finding(Law.ROWS, row.id, f"{column} is {found!r}, the events say {replayed!r}")

    def _compare_tables(self) -> Iterator[Finding]:
        for table in SIDE_TABLES:
            stored, replayed = (
                {row[0]: row for row in connection.execute(f"SELECT * FROM {table}")}
                for connection in (self._connection, self._again)
            )
            for seq in sorted(stored.keys() | replayed.keys()):
                found, expected = stored.get(seq), replayed.get(seq)
                if found != expected:
                    yield Finding(Law.ROWS, f"{table} of event {seq}", f"is {found}, the events say {expected}")

    def _compare_accounting(self) -> Iterator[Finding]:
        events = self._machine.accounting()
        try:
            rows = read_accounting(self._connection)
        except ValueError as error:
            yield Finding(Law.DROPS, "trajectory", str(error))
            return
        for name, counted, stored in (("train", events.train, rows.train), ("eval", events.eval, rows.eval)):
            if not counted.balanced:
                yield Finding(Law.ACCOUNTING, name, f"issued is not consumed + dropped + live: {counted}")
            if counted != stored:
                yield Finding(Law.ACCOUNTING, name, f"rows count {stored}, the events {counted}")
