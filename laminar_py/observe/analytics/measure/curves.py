"""Curves of a run's evaluations against what it had taken by then, set by set. For reports and experiments."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laminar_py.config.loading import load_config
from laminar_py.ledger.evaluations import read_evaluations
from laminar_py.observe.analytics.measure.quality import device_seconds
from laminar_py.observe.analytics.read.samples import read_costs, read_steps
from laminar_py.records.events import Evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPoint:
    """An evaluation of one set, and what the run had taken by then; `low` and `high` bound 95 % of `mean`.

    E.g. `EvalPoint(step=30, rl_s=29.0, device_hours=0.024, trained_tokens=240_000, mean=0.41, low=0.36, ...)`.
    """

    step: int
    rl_s: float
    device_hours: float
    trained_tokens: int
    mean: float
    low: float
    high: float
    is_accuracy: bool  # every reward is 0 or 1
    pass_at: dict[int, float]
    majority: float | None
    truncated: float
    length_p50: int
    length_p95: int


def read_curves(run: Path) -> dict[str, list[EvalPoint]]:
    """Points of each set, in the order of time; the sets in the order of the config, which is that of the passes.

    Raises `ConfigError` where `run` is no run folder.
    """
    config = load_config(run / "config.yaml", [])
    sizes = read_costs(run).sizes
    steps = read_steps(run)
    at, tokens = [0.0, *(row.rl_s for row in steps)], [0.0, *(float(row.trained_tokens) for row in steps)]
    curves: dict[str, list[EvalPoint]] = {name: [] for name in config.eval.sets}
    for event in read_evaluations(run):
        trained = int(np.interp(event.rl_s, at, tokens))
        hours = device_seconds(config, sizes, event.rl_s) / 3600
        point = _point(event, device_hours=hours, trained_tokens=trained)
        curves.setdefault(event.set_name, []).append(point)
    return {name: points for name, points in curves.items() if points}


def _point(event: Evaluated, *, device_hours: float, trained_tokens: int) -> EvalPoint:
    figures = event.figures
    return EvalPoint(
        step=event.step,
        rl_s=event.rl_s,
        device_hours=device_hours,
        trained_tokens=trained_tokens,
        mean=figures.mean.value,
        low=figures.mean.low,
        high=figures.mean.high,
        is_accuracy=figures.is_accuracy,
        pass_at={k: one.value for k, one in figures.pass_at.items()},
        majority=None if figures.majority is None else figures.majority.value,
        truncated=figures.truncated.value,
        length_p50=figures.length_p50,
        length_p95=figures.length_p95,
    )
