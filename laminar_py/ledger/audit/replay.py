"""The tables against a replay of the events. Driven by `audit.verify`.

A row is compared when its trajectory is done with, and then forgotten; only those whose consumption is undone
somewhere in the log, and those that are live at its end, wait. Stored rows are read once, in the order of issue.
"""

import sqlite3
from collections.abc import Iterator, Sequence

import msgspec

from laminar_py.ledger.audit.violations import Rule, Violation
from laminar_py.ledger.database import create
from laminar_py.ledger.machine import IllegalEventError, Machine
from laminar_py.ledger.rows import COLUMNS, column_values, read_accounting
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.ledger.writer import SIDE_TABLES, apply_to_tables
from laminar_py.records.events import AnyEvent, Consumed, Event, Finished, Interrupted, Restamped, StreamCut
from laminar_py.records.trajectory import Status

_AT_ONCE = 256  # rows
_FROM_PIECES = frozenset({"length", "oldest_version", "newest_version"})  # known from events once finished
_OF_LENGTH: frozenset[type[Event]] = frozenset({Interrupted, StreamCut, Finished, Restamped})


class Replay:
    """The events applied again, compared with the stored tables; `violations` has the differences."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.violations: list[Violation] = []
        self._connection = connection
        self._again = sqlite3.connect(":memory:", isolation_level=None)
        create(self._again)
        undone = connection.execute("SELECT DISTINCT subject FROM event WHERE kind = 'undone'")
        self._undone = {subject for (subject,) in undone}
        self._waiting: dict[str, LiveTrajectory] = {}  # done with, but for an undone step
        self._stored = connection.execute(f"SELECT {', '.join(COLUMNS)} FROM trajectory ORDER BY number")
        self._read = 0  # the last number that was read
        self._ahead: dict[int, tuple[object, ...]] = {}  # stored rows whose trajectories are not done with
        self._machine = Machine()

    def row_before(self, event: AnyEvent) -> LiveTrajectory | None:
        """The row of the event's trajectory, if that is live."""
        return self._machine.live.get(getattr(event, "trajectory_id", ""))

    def apply_event(self, seq: int, event: AnyEvent, *, wall: float, mono: float) -> None:
        """Apply event number `seq`, stamped by the two clocks; say so if that cannot be."""
        if type(event) in _OF_LENGTH:
            self._grow(event)
        try:
            row = self._machine.apply(seq, event, wall=wall, mono=mono)
        except IllegalEventError as error:
            rule = Rule.CONSUMPTION if isinstance(event, Consumed) else Rule.ORDER
            self.violations.append(Violation(rule, f"event {seq}", str(error)))
            return
        if row is None:
            apply_to_tables(self._again, seq, event)
        elif row.status is Status.CONSUMED or row.status is Status.DROPPED:
            if row.id in self._undone:
                self._waiting[row.id] = row
            else:
                self._compare(row)

    def end(self) -> None:
        """Compare everything that could not be compared before."""
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

    def _grow(self, event: AnyEvent) -> None:
        """Let the row have the length that the event tells: pieces are compared elsewhere."""
        row = self.row_before(event)
        if row is None:
            return
        if isinstance(event, Interrupted | StreamCut | Finished):
            row.length = event.length
        elif isinstance(event, Restamped) and event.spans:
            row.length = event.spans[-1].end

    def _compare(self, row: LiveTrajectory) -> None:
        while self._read < row.number:
            block = self._stored.fetchmany(_AT_ONCE)
            self._ahead.update((stored[0], stored) for stored in block)
            self._read = block[-1][0] if block else row.number
        found, replayed = self._ahead.pop(row.number, None), column_values(row)
        if found is None:
            self.violations.append(Violation(Rule.ROWS, row.id, "has no row"))
        elif found != replayed:
            self.violations += self._differences(row, replayed, found)

    def _differences(
        self, row: LiveTrajectory, replayed: Sequence[object], stored: Sequence[object]
    ) -> Iterator[Violation]:
        for place, column in enumerate(COLUMNS):
            found, expected = stored[place], msgspec.to_builtins(replayed[place])
            if found != expected and not (column in _FROM_PIECES and row.finish_reason is None):
                yield Violation(Rule.ROWS, row.id, f"{column} is {found!r}, the events say {expected!r}")

    def _compare_tables(self) -> Iterator[Violation]:
        for table in SIDE_TABLES:
            stored, replayed = (
                {row[0]: row for row in connection.execute(f"SELECT * FROM {table}")}
                for connection in (self._connection, self._again)
            )
            for seq in sorted(stored.keys() | replayed.keys()):
                found, expected = stored.get(seq), replayed.get(seq)
                if found != expected:
                    yield Violation(Rule.ROWS, f"{table} of event {seq}", f"is {found}, the events say {expected}")

    def _compare_accounting(self) -> Iterator[Violation]:
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
