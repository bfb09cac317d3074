"""Trajectories that were dropped and went on for the record, and prefixes that were computed again.

Both are known from the event log alone: it is the outer loop of each join. Reads the ledger only.
"""

import sqlite3
from dataclasses import dataclass

import numpy as np

from laminar_py.observe.analytics.read.columns import Floats, Ints
from laminar_py.records.events import CounterfactualScored
from laminar_py.records.trajectory import Kind

_LENGTH = "json_extract(body, '$.length')"


@dataclass(frozen=True, slots=True)
class Counterfactuals:
    """Columns [P] of dropped trajectories that were generated to their end, in the order of their numbers."""

    number: Ints
    length: Ints  # in the end
    reward: Floats  # NaN where its scoring failed


def read_counterfactuals(connection: sqlite3.Connection) -> Counterfactuals:
    """Outcomes of counterfactual trajectories."""
    rows = connection.execute(
        f"SELECT number, {_LENGTH}, json_extract(body, '$.reward') FROM event"
        " CROSS JOIN trajectory ON id = subject WHERE event.kind = ? ORDER BY number",
        (CounterfactualScored.__struct_config__.tag,),
    ).fetchall()
    number, length, reward = np.array(rows, np.float64).reshape(-1, 3).T
    return Counterfactuals(number.astype(np.int32), length.astype(np.int32), reward.astype(np.float32))


def read_recomputed(connection: sqlite3.Connection) -> int:
    """Tokens of prompt and response that replicas computed again when they took up a begun training trajectory."""
    (tokens,) = connection.execute(
        f"SELECT coalesce(sum({_LENGTH} + length(ids) / 4), 0) FROM event"
        " CROSS JOIN trajectory ON trajectory.id = subject CROSS JOIN prompt ON prompt.id = prompt_id"
        f" WHERE event.kind = 'assigned' AND {_LENGTH} > 0 AND trajectory.kind = ?",
        (Kind.TRAIN,),
    ).fetchone()
    return int(tokens)
