"""Events of the parts of a run, with their times: all but those of single trajectories. Reads the ledger only.

Times are on the clock of `columns.Trajectories`: within an incarnation none goes back.
"""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, get_args

from laminar_py.ledger.evaluations import in_order
from laminar_py.ledger.rows import decode_event
from laminar_py.observe.analytics.read.columns import Times
from laminar_py.observe.analytics.read.stays import RunTimes
from laminar_py.records.evaluations import pass_number
from laminar_py.records.events import AnyEvent, Evaluated, RolledBack, RunEnded, RunStarted, Stepped, StepSkipped

_OF_ONE_TRAJECTORY = [
    kind.__struct_config__.tag for kind in get_args(AnyEvent) if "trajectory_id" in kind.__struct_fields__
]
EventKind = TypeVar("EventKind")


@dataclass(frozen=True, slots=True)
class Happened:
    """An event, `at_s` seconds after the first trajectory of the run was issued, e.g. -3.2 for a part's start."""

    at_s: float
    event: AnyEvent


@dataclass(frozen=True)
class History:
    """Events of parts, in the order of the log."""

    happened: tuple[Happened, ...]
    starts_s: Times  # when each incarnation began

    def of(self, kind: type[EventKind]) -> Iterator[tuple[float, EventKind]]:
        """Events of one kind, with their times."""
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

    @cached_property
    def skipped(self) -> tuple[int, ...]:
        """Steps whose loss or gradient was not finite, the last time that they were done."""
        found: set[int] = set()
        for one in self.happened:
            if isinstance(one.event, Stepped):
                found.discard(one.event.step)  # its own word that it was skipped follows
            elif isinstance(one.event, StepSkipped):
                found.add(one.event.step)
        return tuple(sorted(found))

    @property
    def undone_tokens(self) -> int:
        """Tokens of steps that were rolled back."""
        done, kept = (step.num_tokens for _, step in self.of(Stepped)), (step.num_tokens for _, step in self.steps)
        return sum(done) - sum(kept)

    @property
    def evaluations(self) -> list[Evaluated]:
        """Evaluations of all sets in the order of seconds of RL."""
        return in_order(event for _, event in self.of(Evaluated))

    @property
    def of_sets(self) -> dict[str, list[Evaluated]]:
        """Evaluations of each set, in the order of seconds of RL; the first set is that of the config."""
        sets: dict[str, list[Evaluated]] = {}
        for one in sorted(self.evaluations, key=lambda one: pass_number(one.pass_id)):
            sets.setdefault(one.set_name, [])
        for one in self.evaluations:
            sets[one.set_name].append(one)
        return sets

    @property
    def live(self) -> bool:
        """True until the run has ended by its own word, so also after it was killed."""
        last = [one.event for one in self.happened if isinstance(one.event, RunStarted | RunEnded)]
        return bool(last) and isinstance(last[-1], RunStarted)


def read_history(connection: sqlite3.Connection, times: RunTimes) -> History:
    """Events of a whole run; costs one look at each row of the log."""
    left_out = ", ".join(f"'{kind}'" for kind in _OF_ONE_TRAJECTORY)
    rows = connection.execute(
        f"SELECT seq, mono, body FROM event WHERE kind NOT IN ({left_out}) ORDER BY seq"
    ).fetchall()
    seq, mono, bodies = zip(*rows, strict=True) if rows else ((), (), ())
    at = times.at(seq, mono).tolist() if rows else []
    events = tuple(Happened(at_s, decode_event(body)) for at_s, body in zip(at, bodies, strict=True))
    return History(events, times.starts_s)
