"""What the arrays lack, from one pass over the event log: probes, skipped steps, prefixes computed again."""

import sqlite3
from dataclasses import dataclass

import numpy as np

from laminar_py.analytics.read.columns import Floats, Ints
from laminar_py.records.trajectory import Kind

_LENGTH = "json_extract(body, '$.length')"
_WANTED = f"kind IN ('probed', 'stepskipped') OR kind = 'assigned' AND {_LENGTH} > 0"


@dataclass(frozen=True, slots=True)
class Probes:
    """[P] dropped trajectories that were generated to their end, in the order of their numbers."""

    number: Ints
    length: Ints  # in the end
    reward: Floats  # NaN where its scoring failed


@dataclass(frozen=True, slots=True)
class Scan:
    """What one pass found."""

    probes: Probes
    skipped_steps: Ints  # steps that stand, and whose gradient was not finite
    recomputed: int  # tokens of prompt and response that whoever took up a begun trajectory computed again


def scan_events(connection: sqlite3.Connection) -> Scan:
    """Of training trajectories."""
    connection.execute("DROP TABLE IF EXISTS temp.wanted")
    connection.execute(
        f"CREATE TEMP TABLE wanted AS SELECT seq, kind, subject, {_LENGTH} AS length,"
        f" json_extract(body, '$.reward') AS reward FROM event WHERE {_WANTED}"
    )
    probes = connection.execute(
        "SELECT number, wanted.length, wanted.reward FROM wanted JOIN trajectory ON id = subject"
        " WHERE wanted.kind = 'probed' ORDER BY number"
    ).fetchall()
    # the event of a skipped step follows the step's own
    skipped = connection.execute(
        "SELECT step FROM wanted JOIN step ON step.seq = (SELECT max(seq) FROM step WHERE seq < wanted.seq)"
        " WHERE kind = 'stepskipped' AND NOT undone"
    ).fetchall()
    recomputed = connection.execute(
        "SELECT sum(wanted.length + length(ids) / 4) FROM wanted JOIN trajectory ON trajectory.id = subject"
        " JOIN prompt ON prompt.id = prompt_id WHERE wanted.kind = 'assigned' AND trajectory.kind = ?",
        (Kind.TRAIN,),
    ).fetchone()
    columns = np.array(probes, np.float64).reshape(-1, 3).T
    return Scan(
        Probes(columns[0].astype(np.int32), columns[1].astype(np.int32), columns[2].astype(np.float32)),
        np.array([step for (step,) in skipped], np.int32),
        recomputed[0] or 0,
    )
