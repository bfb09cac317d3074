"""The event log as the audit reads it: its chain of hashes, and its events in order. Reads only.

Driven by `audit.verify`. A log may hold events that a later release of the software wrote: their hashes are
checked like all others, and what they say is passed over.
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator

import msgspec

from laminar_py.ledger.audit.violations import Rule, Violation
from laminar_py.ledger.rows import KINDS, decode_event, decode_events
from laminar_py.records.codec import CHAIN_START, event_hash
from laminar_py.records.events import AnyEvent

_BLOCK = 4096  # events that are decoded at once

Entry = tuple[int, float, float, AnyEvent]  # number, the two clocks, event


def check_chain(connection: sqlite3.Connection, first: int, last: int | None) -> Iterator[Violation]:
    """Violations by the hashes of events `first` to `last`; None: to the end, which is checked too.

    The event before the first counts as it stands: whoever checks the range that it is in checks it.
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
            yield Violation(Rule.LOG, f"event {seq}", f"({kind} {subject}) was changed or put in")
        before, previous = seq, noted
    if last is None:
        yield from _check_end(connection, before, previous)
    elif before != last:
        yield Violation(Rule.LOG, f"event {before + 1}", f"is missing, and so are all up to {last}")


def _check_end(connection: sqlite3.Connection, last: int, hash: bytes | None) -> Iterator[Violation]:
    head = connection.execute("SELECT seq, hash FROM head").fetchone()
    if head is None:
        yield Violation(Rule.LOG, "end", f"the log ends with event {last}, where it should end is not on record")
    elif head != (last, hash):
        yield Violation(Rule.LOG, "end", f"the log ends with event {last}, written were {head[0]}")


class Log:
    """Events in order; `violations` and `unknown` fill as they are read."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self.violations: list[Violation] = []
        self.unknown: Counter[str] = Counter()  # by kind: events of a later release

    def __iter__(self) -> Iterator[Entry]:
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
                yield seq, wall, mono, event

    def _one_by_one(self, block: list[tuple[int, float, float, str, bytes]]) -> Iterator[Entry]:
        for seq, wall, mono, kind, body in block:
            if kind not in KINDS:
                self.unknown[kind] += 1
                continue
            try:
                event = decode_event(body)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                self.violations.append(Violation(Rule.LOG, f"event {seq}", f"({kind}) cannot be read: {error}"))
            else:
                yield seq, wall, mono, event
