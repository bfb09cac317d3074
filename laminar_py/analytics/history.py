"""What the parts of a run did and when: all events but those of single trajectories. Reads the ledger only.

Called for the pictures. Times are on the clock of `columns.Trajectories`: within an incarnation none goes back.
"""

import sqlite3
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from laminar_py.events import AnyEvent, RolledBack, Stepped
from laminar_py.store.rows import decode_event

_OF_ONKindTRAJECTORY = (
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
)
Kind = TypeVar("Kind")


@dataclass(frozen=True, slots=True)
class Happened:
    """An event, `at_s` seconds after the first trajectory of the run was issued, e.g. -3.2 for a part's start."""

    at_s: float
    event: AnyEvent


class EventClock:
    """When events happened: the stamps of an incarnation's start, and monotonic seconds since."""

    def __init__(self, connection: sqlite3.Connection, origin_s: float) -> None:
        rows = connection.execute("SELECT seq, wall, mono FROM event WHERE seq IN (SELECT seq FROM incarnation)")
        self._starts: list[tuple[int, float, float]] = sorted(rows)
        self._origin_s = origin_s

    def at(self, seq: int, wall: float, mono: float) -> float:
        """Seconds since the origin."""
        place = bisect_right(self._starts, (seq, float("inf"), 0.0)) - 1
        if place < 0:
            return wall - self._origin_s
        _, wall_then, mono_then = self._starts[place]
        return wall_then + (mono - mono_then) - self._origin_s


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


def read_history(connection: sqlite3.Connection, *, origin_s: float) -> History:
    """All of a run; evaluations and the like are few, so this costs one look at each row of the log."""
    clock = EventClock(connection, origin_s)
    left_out = ", ".join(f"'{kind}'" for kind in _OF_ONKindTRAJECTORY)
    rows = connection.execute(
        f"SELECT seq, wall, mono, body FROM event WHERE kind NOT IN ({left_out}) ORDER BY seq"
    )
    return History(tuple(_timed(clock, rows)))


def _timed(clock: EventClock, rows: Iterable[tuple[int, float, float, str]]) -> Iterator[Happened]:
    for seq, wall, mono, body in rows:
        yield Happened(clock.at(seq, wall, mono), decode_event(body))
