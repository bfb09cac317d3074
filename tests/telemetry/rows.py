"""Rows of `metrics.jsonl` as a run makes them."""

from laminar_py.observe.stats import Stats, Totals
from laminar_py.records.host import SystemClock
from laminar_py.records.metrics import Mismatch, StepMetrics, TokenFigures, TokenMetrics, Work


def make_row(step, *, entropy=1.0):
    """A row of a run's first step that this process sees."""
    return _row(Stats(SystemClock(), replicas=1, totals=Totals()), step, entropy)


def make_rows(*entropies):
    """Rows of the steps 1, 2, ... of one run."""
    stats = Stats(SystemClock(), replicas=1, totals=Totals())
    return [_row(stats, step, entropy) for step, entropy in enumerate(entropies, 1)]


def _row(stats, step, entropy):
    figures = dict.fromkeys(TokenFigures.__struct_fields__, 0.5)
    tokens = TokenMetrics(
        num_tokens=10, **figures | {"entropy": entropy, "ratio": 1.01, "ratio_max": 3.0, "advantage_max": 2.0}
    )
    metrics = StepMetrics(
        loss=0.5,
        grad_norm=0.1,
        elapsed_s=2.0,
        tokens=tokens,
        by_staleness={"3-4": tokens, "9+": tokens},
        mismatch=Mismatch(0.1, 0.2, 0.3),
        work=Work(1000, 4e12, 8e12),
    )
    facts = {
        "version": step,
        "batch": [],
        "staleness": [3, 9],
        "generated_tokens": 0,
        "versions_alive": 1,
        "stall_s": 0.0,
    }
    return stats.step_row(step=step, metrics=metrics, **facts)
