"""Learning against its costs: evaluations and reward over time, tokens and device-hours; and means over seeds.

A device is a GPU where the run has any, those of its reward's servers and of engines that it attaches to included;
where it has none, a process: replicas, the learner's ranks and a reference stage count. All do so from the first
second of RL to the last, but for replicas, which count while they are there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from laminar_py.config.loading import load_config
from laminar_py.config.run import RunConfig
from laminar_py.ledger.evaluations import in_order, of_first_set, read_evaluations
from laminar_py.observe.record import NOT_KNOWN, FleetSizes, read_costs, read_steps
from laminar_py.observe.trajectories import Times
from laminar_py.records.evaluations import SetFigures
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import StepRow

# 0.975 quantiles of Student's t by degrees of freedom, from 1; beyond the table within 0.001
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
Z_975 = 1.96  # of the normal distribution


def half_width(values: Sequence[float]) -> float | None:
    """Half of the 95 % t-interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    degrees = len(values) - 1
    quantile = T_975[degrees - 1] if degrees <= len(T_975) else Z_975 + 2.372 / (degrees - 1.2)
    return quantile * stdev(values) / sqrt(len(values))


def tell_mean(values: Sequence[float], *, digits: int = 3) -> str:
    """Mean and half of its 95 % t-interval, e.g. "0.412 ± 0.031"; the mean alone for one value, "–" for none."""
    if not values:
        return "–"
    half = half_width(values)
    return f"{fmean(values):,.{digits}f}" + ("" if half is None else f" ± {half:,.{digits}f}")


REWARD_STEPS = 10  # that a point of the reward's curve is a mean of


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value, and what the run had taken by then, e.g. a reward:

    `Point(step=30, rl_s=29.0, tokens=240_000, device_hours=0.024, value=0.91)`.
    """

    step: int
    rl_s: float
    tokens: int  # trained
    device_hours: float
    value: float  # of an evaluation its mean reward
    figures: SetFigures | None = None  # of an evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Curves of a run, in the order of time."""

    devices: int
    device: str  # "GPU", "emulated GPU" or "process"
    measure: str  # "accuracy" where every reward of the first set is 0 or 1, else "mean reward"
    evaluated: tuple[Point, ...]  # mean of each evaluation of the first set
    by_set: dict[str, tuple[Point, ...]]  # of every set, the first one included
    reward: tuple[Point, ...]  # of each step, mean of the last `REWARD_STEPS`


def measure_quality(
    config: RunConfig,
    steps: Sequence[StepRow],
    evaluations: Sequence[Evaluated],
    *,
    sizes: FleetSizes = NOT_KNOWN,
) -> Quality:
    """Curves over these steps and evaluations."""
    devices, device = count_devices(config)
    point = _pointer(config, steps, sizes)

    def curve(found: Sequence[Evaluated]) -> tuple[Point, ...]:
        return tuple(point(one.step, one.rl_s, one.figures) for one in in_order(found))

    rewards = _running_mean(np.array([row.reward for row in steps], np.float64), REWARD_STEPS).tolist()
    of_first = of_first_set(evaluations, config.eval.sets)
    return Quality(
        devices=devices,
        device=device,
        measure="accuracy" if all(one.figures.is_accuracy for one in of_first) else "mean reward",
        evaluated=curve(of_first),
        by_set={
            name: curve([one for one in evaluations if one.set_name == name])
            for name in dict.fromkeys(one.set_name for one in (*of_first, *in_order(evaluations)))
        },
        reward=tuple(point(row.step, row.rl_s, value) for row, value in zip(steps, rewards, strict=True)),
    )


def _running_mean(values: Times, width: int) -> Times:
    """Means of each value and the `width` - 1 before it."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    end = np.arange(1, len(total))
    start = np.maximum(end - width, 0)
    means: Times = (total[end] - total[start]) / (end - start)
    return means


def device_seconds(config: RunConfig, sizes: FleetSizes, rl_s: float) -> float:
    """Seconds of all devices of a run until then; `config` has the replicas of any moment."""
    devices, kind = count_devices(config)
    if not sizes.replicas:
        return devices * rl_s
    rollout = config.rollout
    each = rollout.engine.gpus if kind == "GPU" else 1
    return (devices - each * rollout.replicas) * rl_s + each * sizes.replica_seconds(rl_s)


def count_devices(config: RunConfig) -> tuple[int, str]:
    """Number and kind of the devices of a run."""
    rollout, learner = config.rollout, config.learner
    if config.emulation is not None:
        return rollout.replicas + config.emulation.learner_devices, "emulated GPU"
    attached = rollout.replicas * rollout.engine.gpus if rollout.engine.hosts else 0
    if gpus := config.gpus + attached:
        return gpus, "GPU"
    return rollout.replicas + learner.world_size + config.algorithm.refers_in_stage, "process"


def read_curves(run: Path) -> dict[str, list[Point]]:
    """Evaluations of each set, in the order of time; the sets are in the order of the config.

    Raises `ConfigError` where `run` is no run folder.
    """
    config = load_config(run / "config.yaml", [])
    point = _pointer(config, read_steps(run), read_costs(run).sizes)
    curves: dict[str, list[Point]] = {name: [] for name in config.eval.sets}
    for event in read_evaluations(run):
        curves.setdefault(event.set_name, []).append(point(event.step, event.rl_s, event.figures))
    return {name: points for name, points in curves.items() if points}


def _pointer(
    config: RunConfig, steps: Sequence[StepRow], sizes: FleetSizes
) -> Callable[[int, float, SetFigures | float], Point]:
    """Make points of a step, seconds of RL, and a value, or the figures of an evaluation."""
    at = np.array([0.0, *(row.rl_s for row in steps)])
    tokens = np.array([0.0, *(row.trained_tokens for row in steps)])

    def point(step: int, rl_s: float, found: SetFigures | float) -> Point:
        return Point(
            step=step,
            rl_s=rl_s,
            tokens=int(np.interp(rl_s, at, tokens)),
            device_hours=device_seconds(config, sizes, rl_s) / 3600,
            value=found.mean.value if isinstance(found, SetFigures) else found,
            figures=found if isinstance(found, SetFigures) else None,
        )

    return point
