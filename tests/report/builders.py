"""Arrays of a handful of trajectories, and real ledgers of some, for tests."""

import numpy as np

from laminar_lab.report.trajectories import FINISHES, KINDS, REASONS, STATUSES, Trajectories
from laminar_py.ledger.row_files import append_row, open_rows
from laminar_py.ledger.run_folder import RunFolder
from laminar_py.observe.stats import Stats, Totals
from laminar_py.observe.summary import summarise
from laminar_py.records.host import SystemClock
from laminar_py.records.metrics import FleetRow, StepRow, TokenFigures
from laminar_py.records.trajectory import FinishReason, Kind, Status

_TIMES = ("issued_s", "started_s", "finished_s", "scored_s", "ready_s", "ended_s")
_FLOATS = ("reward", "weight", "queue_s", "generate_s", "score_s", "environment_s")


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
        "kind": KINDS.index(Kind.TRAIN),
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


def make_fleet_row(rl_s, running, kv_use, *, waiting=None):
    """A sample of these replicas."""
    none = [0] * len(running)
    more = {"versions": none, "waiting": none if waiting is None else waiting, "generated_tokens": 0, "kv_s": 0.0}
    return FleetRow(rl_s=rl_s, running=running, kv_use=kv_use, **more)


def make_step_row(step, rl_s, **given):
    """A row of a step, of which only what is given matters."""
    counts = ("version", "trajectories", "trained_tokens", "generated_tokens", "staleness_max", "versions_alive")
    times = ("reward", "staleness_mean", "learner_s", "learner_waiting_share", "learner_busy_s", "overlap_s")
    learned = ("loss", "grad_norm", "learning_rate", *TokenFigures.__struct_fields__)
    nothing = {**dict.fromkeys((*counts, "length_p50", "length_p95"), 0), **dict.fromkeys((*times, *learned), 0.0)}
    return StepRow(step=step, rl_s=rl_s, **{**nothing, **given})


def write_rows(path, rows):
    """A file of such rows, one a line."""
    path.unlink(missing_ok=True)
    with open_rows(path) as file:
        for row in rows:
            append_row(file, row)


def summary_of(folder, **options):
    """The summary of the run in a folder, whose controller has counted nothing."""
    stats = Stats(SystemClock(), replicas=1, totals=Totals())
    return summarise(RunFolder(folder), stats, finished=True, restarts={}, sets=[], **options)


def shown(table):
    """Second cells of a table, by the first."""
    first, second = table.columns[:2]
    return dict(zip(first.cells, second.cells, strict=True))
