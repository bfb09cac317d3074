"""Which trajectory was on which replica, from hand-over to the end of its stream there. Reads the ledger only.

Invariant: a stay ends by the next event of its trajectory that says so, or is open; stays of one trajectory do not
overlap.
"""

import sqlite3
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from laminar_py.analytics.columns import Ints, Times

_KINDS = ("assigned", "finished", "interrupted", "dropped")
_BLOCK = 100_000


class StayEnd(IntEnum):
    """How a stay ended."""

    OPEN = 0  # it goes on
    FINISHED = 1
    INTERRUPTED = 2  # it goes on elsewhere, or here under newer weights
    DROPPED = 3


@dataclass(frozen=True, slots=True)
class Stays:
    """Columns [M] by trajectory and time, e.g. trajectory 17 on replica 1 from 3.2 s to 4.1 s, FINISHED.

    Seconds are by the run's clock, since the `origin_s` that was asked for; an open stay ends at infinity.
    """

    trajectory: Ints  # its number in the ledger
    replica: Ints
    start_s: Times
    end_s: Times
    end: npt.NDArray[np.int8]

    def __len__(self) -> int:
        return len(self.trajectory)


class RunTimes:
    """Turns the stamps of events into seconds of the run's clock, see `store.machine.RunClock`."""

    def __init__(self, connection: sqlite3.Connection, origin_s: float) -> None:
        rows = connection.execute(
            "SELECT seq, wall, mono FROM event WHERE seq = 1 OR seq IN (SELECT seq FROM incarnation) ORDER BY seq"
        ).fetchall()
        self._since, self._wall, self._mono = (np.array(column) for column in zip(*rows, strict=True))
        self._origin_s = origin_s

    def at(self, seq: npt.ArrayLike, mono: npt.ArrayLike) -> Times:
        """Seconds since the origin of events with these numbers and monotonic stamps [n]."""
        place = np.searchsorted(self._since, np.asarray(seq), side="right") - 1
        times: Times = self._wall[place] - self._origin_s + (np.asarray(mono, np.float64) - self._mono[place])
        return times

    @property
    def starts_s(self) -> Times:
        """When each incarnation began."""
        return self.at(self._since, self._mono)


def read_stays(connection: sqlite3.Connection, times: RunTimes) -> Stays:
    """Of all trajectories, evaluations too."""
    number_of: dict[str, int] = dict(connection.execute("SELECT id, number FROM trajectory"))
    cursor = connection.execute(
        "SELECT seq, mono, kind, subject, CASE kind WHEN 'assigned' THEN json_extract(body, '$.replica') END"
        f" FROM event WHERE kind IN {_KINDS} ORDER BY seq"
    )
    blocks = []
    while rows := cursor.fetchmany(_BLOCK):
        seq, mono, kind, subject, replica = zip(*rows, strict=True)
        blocks.append(
            (
                np.array(seq, np.int64),
                np.array(mono, np.float64),
                np.array([_KINDS.index(name) for name in kind], np.int8),
                np.array([number_of[id] for id in subject], np.int32),
                np.array([-1 if index is None else index for index in replica], np.int32),
            )
        )
    if not blocks:
        nothing = np.empty(0, np.int32)
        return Stays(nothing, nothing, np.empty(0), np.empty(0), np.empty(0, np.int8))
    seq_, mono_, kind_, number, replica_ = (np.concatenate(column) for column in zip(*blocks, strict=True))
    return _pair(number, times.at(seq_, mono_), kind_, replica_)


def _pair(number: Ints, at: Times, kind: npt.NDArray[np.int8], replica: Ints) -> Stays:
    """Each hand-over with the next event of its trajectory."""
    order = np.argsort(number, kind="stable")
    number, at, kind, replica = number[order], at[order], kind[order], replica[order]
    begins = np.flatnonzero(kind == 0)
    after = np.minimum(begins + 1, len(number) - 1)
    ended = (after > begins) & (number[after] == number[begins]) & (kind[after] != 0)
    return Stays(
        number[begins],
        replica[begins],
        at[begins],
        np.where(ended, at[after], np.inf),
        np.where(ended, kind[after], 0).astype(np.int8),
    )
