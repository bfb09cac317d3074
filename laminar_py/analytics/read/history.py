"""What the parts of a run did and when: all events but those of single trajectories. Reads the ledger only.

Called for the pictures. Times are on the clock of `columns.Trajectories`: within an incarnation none goes back.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from laminar_py.analytics.read.stays import RunTimes
from laminar_py.ledger.rows import decode_event
from laminar_py.records.events import AnyEvent, RolledBack, Stepped, StepSkipped

_OF_ONE_TRAJECTORY = (
    "issued",
    "assigned",
    "interrupted",
    "finished",
    "streamcut",
    "restamped",
    "cut",
    "scored",
    "ready",
    "consumed",
    "undone",
    "dropped",
    "probed",
)
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Happened:
    """An event, `at_s` seconds after the first trajectory of the run was issued, e.g. -3.2 for a part's start."""

    at_s: float
    event: AnyEvent


@dataclass(frozen=True)
class History:
    """Events of parts, in the order of the log."""

    happened: tuple[Happened, ...]

    def of(self, kind: type[Kind]) -> Iterator[tuple[float, Kind]]:
        """Those of one kind, with their times."""
        return ((one.at_s, one.event) for one in self.happened if isinstance(one.event, kind))

    @cached_property
    def steps(self) -> tuple[tuple[float, Stepped], ...]:
        """Learner steps that count, with the times at which they ended: none that was undone."""
        kept: list[tuple[float, Stepped]] = []
        for one in self.happened:
            if isinstance(one.event, Stepped):
                kept.append((one.at_s, one.event))
            elif isinstance(one.event, RolledBack):
                last = one.event.step
                kept = [(at_s, step) for at_s, step in kept if step.step <= last]
        return tuple(kept)

    @property
    def skipped(self) -> frozenset[int]:
        """Steps whose gradient was not finite, the last time that they were done."""
        found: set[int] = set()
        for one in self.happened:
            if isinstance(one.event, Stepped):
                found.discard(one.event.step)  # its own word that it was skipped follows
            elif isinstance(one.event, StepSkipped):
                found.add(one.event.step)
        return frozenset(found)


def read_history(connection: sqlite3.Connection, times: RunTimes) -> History:
    """All of a run; this costs one look at each row of the log."""
    left_out = ", ".join(f"'{kind}'" for kind in _OF_ONE_TRAJECTORY)
    rows = connection.execute(
        f"SELECT seq, mono, body FROM event WHERE kind NOT IN ({left_out}) ORDER BY seq"
    ).fetchall()
    if not rows:
        return History(())
    seq, mono, bodies = zip(*rows, strict=True)
    at = times.at(seq, mono).tolist()
    return History(tuple(Happened(at_s, decode_event(body)) for at_s, body in zip(at, bodies, strict=True)))
