"""Turns and environment time of finished trajectories, read from the ledger.

Reports call it only for runs with an environment, since it scans all events, which have no index.
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
    environment_s: float  # work of its environment, over all replicas


def read_turns(connection: sqlite3.Connection) -> Iterator[FinishedTurns]:
    """Iterate over the turns of all finished trajectories, unordered.

    Raises `msgspec.DecodeError` for bad spans.
    """
    rows = connection.execute(
        "SELECT number, trajectory.kind, spans, coalesce(json_extract(body, '$.environment_s'), 0.0) FROM event"
        " CROSS JOIN trajectory ON id = subject WHERE event.kind = ? AND spans IS NOT NULL",
        (Finished.__struct_config__.tag,),
    )
    for number, kind, spans, environment_s in rows:
        yield FinishedTurns(number, Kind(kind), num_turns(decode_spans(spans)), environment_s)
