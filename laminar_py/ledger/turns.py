"""Turns of finished trajectories, and the time that their environments worked, from the record. Reads only.

Called by analytics and summary for runs with an environment alone: events have no index, so this is one look at
all of them.
"""

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

from laminar_py.records.events import Finished
from laminar_py.records.spans import decode_spans, num_turns
from laminar_py.records.trajectory import Kind


class FinishedTurns(NamedTuple):
    """A finished trajectory, e.g. `FinishedTurns(17, Kind.TRAIN, 3, 0.42)`."""

    number: int
    kind: Kind
    turns: int  # of the model
    environment_s: float  # that its environment worked, on whatever replica it was


def read_turns(connection: sqlite3.Connection) -> Iterator[FinishedTurns]:
    """Turns of all that finished, in no order; `msgspec.DecodeError` for spans that are none."""
    rows = connection.execute(
        "SELECT number, trajectory.kind, spans, coalesce(json_extract(body, '$.environment_s'), 0.0) FROM event"
        " CROSS JOIN trajectory ON id = subject WHERE event.kind = ? AND spans IS NOT NULL",
        (Finished.__struct_config__.tag,),
    )
    for number, kind, spans, environment_s in rows:
        yield FinishedTurns(number, Kind(kind), num_turns(decode_spans(spans)), environment_s)
