"""Learning against its costs: accuracy and reward over time, tokens and device-hours. Pure.

A device is a GPU where the run has GPUs and a process where it has none; replicas, the learner's ranks and a
reference stage count, and all of them from the first second of RL to the last.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from laminar_py.analytics.read.columns import Times
from laminar_py.config.run import RunConfig
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import StepRow

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
    value: float


@dataclass(frozen=True, slots=True)
class Quality:
    """Curves of a run, in the order of time."""

    devices: int
    device: str  # "GPU", "emulated GPU" or "process"
    accuracy: tuple[Point, ...]  # of each evaluation
    reward: tuple[Point, ...]  # of each step, mean of the last `REWARD_STEPS`


def measure_quality(config: RunConfig, steps: Sequence[StepRow], evaluations: Sequence[Evaluated]) -> Quality:
    """Curves over these steps and evaluations."""
    devices, device = count_devices(config)
    at = np.array([0.0, *(row.rl_s for row in steps)])
    tokens = np.array([0.0, *(row.trained_tokens for row in steps)])

    def point(step: int, rl_s: float, value: float) -> Point:
        trained = int(np.interp(rl_s, at, tokens))
        return Point(step=step, rl_s=rl_s, tokens=trained, device_hours=rl_s * devices / 3600, value=value)

    rewards = _running_mean(np.array([row.reward for row in steps], np.float64), REWARD_STEPS).tolist()
    return Quality(
        devices,
        device,
        tuple(point(one.step, one.rl_s, one.accuracy) for one in evaluations),
        tuple(point(row.step, row.rl_s, value) for row, value in zip(steps, rewards, strict=True)),
    )


def _running_mean(values: Times, width: int) -> Times:
    """Means of each value and the `width` - 1 before it."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    end = np.arange(1, len(total))
    start = np.maximum(end - width, 0)
    means: Times = (total[end] - total[start]) / (end - start)
    return means


def count_devices(config: RunConfig) -> tuple[int, str]:
    """Number and kind of the devices of a run."""
    rollout, learner = config.rollout, config.learner
    if config.emulation is not None:
        return rollout.replicas + config.emulation.learner_devices, "emulated GPU"
    gpus = rollout.engine.gpus
    reference = int(config.algorithm.refers_in_stage)
    return rollout.replicas * max(1, gpus) + learner.world_size + reference, "GPU" if gpus else "process"
