"""What a run learned against what it took: accuracy and reward over time, tokens and device-hours.

A device is a GPU where the run has GPUs and a process where it has none; replicas, the learner's ranks and a
reference stage count, and all of them from the first second of RL to the last.
"""

import sqlite3
from dataclasses import dataclass

import numpy as np

from laminar_py.analytics.read.columns import Times
from laminar_py.analytics.read.samples import StepLine, running_mean
from laminar_py.config.cluster import Device
from laminar_py.config.engine import EngineKind
from laminar_py.config.run import RunConfig

REWARD_STEPS = 10  # that a point of the reward's curve is a mean of


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value, and what the run had taken by then, e.g. `Point(30, 29.0, 240_000, 0.024, 0.91)`."""

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


def read_quality(connection: sqlite3.Connection, config: RunConfig, steps: list[StepLine]) -> Quality:
    """From the ledger and what lies beside it."""
    devices, device = count_devices(config)
    at = np.array([0.0, *(line.rl_s for line in steps)])
    tokens = np.array([0.0, *(line.trained_tokens for line in steps)])

    def point(step: int, rl_s: float, value: float) -> Point:
        trained = int(np.interp(rl_s, at, tokens))
        return Point(step=step, rl_s=rl_s, tokens=trained, device_hours=rl_s * devices / 3600, value=value)

    evaluations = connection.execute("SELECT step, rl_s, accuracy FROM evaluation ORDER BY rl_s, seq").fetchall()
    rewards: Times = running_mean(np.array([line.reward for line in steps], np.float64), REWARD_STEPS)
    return Quality(
        devices,
        device,
        tuple(point(*row) for row in evaluations),
        tuple(point(line.step, line.rl_s, value) for line, value in zip(steps, rewards.tolist(), strict=True)),
    )


def count_devices(config: RunConfig) -> tuple[int, str]:
    """How many, and what they are."""
    rollout, learner = config.rollout, config.learner
    if config.emulation is not None:
        return rollout.replicas + config.emulation.learner_devices, "emulated GPU"
    on_gpus = rollout.engine.kind is EngineKind.SGLANG and rollout.engine.device is Device.CUDA
    replicas = rollout.replicas * rollout.engine.tensor_parallel
    reference = int(config.algorithm.refers_in_stage)
    return replicas + learner.world_size + reference, "GPU" if on_gpus else "process"
