"""Arrays of a handful of trajectories, and real ledgers of some, for tests."""

import numpy as np

from laminar_py.analytics.read.columns import FINISHES, REASONS, STATUSES, Trajectories
from laminar_py.records.trajectory import FinishReason, Status

_TIMES = ("issued_s", "started_s", "finished_s", "scored_s", "ready_s", "ended_s")
_FLOATS = ("reward", "weight", "queue_s", "generate_s", "score_s")


def make_trajectories(count, *, tasks=("",), status=Status.CONSUMED, drop=None, **columns):
    """All consumed one second after the other stages, unless said otherwise; a column may be one value for all."""
    given = {
        "number": np.arange(1, count + 1),
        "group": np.arange(count),
        "length": 10,
        "finish": FINISHES.index(FinishReason.STOP),
        "status": codes(STATUSES, status, count),
        "drop": codes(REASONS, drop, count),
        "task": 0,
        "oldest_version": 0,
        "replica": 0,
        **{name: float(place) for place, name in enumerate(_TIMES)},
        "weight": 1.0,
        "reward": 1.0,
        "score_s": 0.25,
        **columns,
    }
    arrays = {}
    for name in Trajectories.__dataclass_fields__:
        if name in ("origin_s", "tasks"):
            continue
        dtype = np.float64 if name in _TIMES else np.float32 if name in _FLOATS else np.int32
        default = np.nan if dtype != np.int32 else -1
        arrays[name] = np.array(np.broadcast_to(given.get(name, default), count), dtype)
    return Trajectories(**arrays, origin_s=0.0, tasks=tasks)


def codes(names, values, count):
    """Their places; None has none."""
    values = values if isinstance(values, list) else [values] * count
    return [-1 if value is None else names.index(value) for value in values]
