"""Settings of emulated engines and learner."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.cluster import ClusterConfig, Device
from laminar_py.config.learner import LearnerConfig
from laminar_py.config.model import WarmStartConfig
from laminar_py.config.section import ConfigError, Count, Section

EMULATED = "emulated"  # the backend


class EmulationConfig(Section):
    """Engines and a learner that take the time which GPUs would take, and compute nothing: for measuring
    schedules, with the real controller, processes, relays and ledger."""

    profile: Path
    """YAML with the times of a GPU and a model, e.g. `configs/emulation/h100_7b.yaml`; `rollout.kv_capacity` and
    `rollout.max_batch` bound the engine as ever."""
    compression: Annotated[float, Field(ge=1, le=20)] = 1.0
    """Emulated seconds in one second; all other settings are in real seconds."""
    start_spread_s: Annotated[float, Field(ge=0)] = 0.0
    """Emulated seconds over which the replicas begin, one after another; 0: all at once, in step at first."""
    learner_devices: Count = 1
    """GPUs that share a learner step."""
    median_tokens: Count = 1500
    """Median of the response lengths, which are log-normal and cut at `rollout.sampling.max_new_tokens`."""
    sigma: Annotated[float, Field(ge=0)] = 0.99
    """Standard deviation of their logarithm; 0.99 makes p99 10 times the median."""
    prompt_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the variance of the logarithm of lengths that is between prompts; 0: responses to a prompt differ
    as those to any."""


def choose_engine(tree: object) -> object:
    """Raw settings of a run, whose engine is the emulated one where they have the section `emulation`."""
    if not isinstance(tree, dict) or tree.get("emulation") is None:
        return tree
    rollout = tree.get("rollout", {})
    engine = rollout.get("engine", {}) if isinstance(rollout, dict) else None
    if not isinstance(engine, dict) or engine.get("kind", "local") != "local":
        return tree
    return {**tree, "rollout": {**rollout, "engine": {**engine, "kind": EMULATED}}}


def check_emulation(
    kind: str,
    algorithm: AlgorithmConfig,
    learner: LearnerConfig,
    cluster: ClusterConfig,
    warm_start: WarmStartConfig | None,
) -> None:
    """Refuse engines that compute, and what only a learner with a model can do."""
    if kind != EMULATED:
        raise ConfigError(
            f"rollout.engine.kind={kind}: emulation replaces the engines; leave it out, or the section emulation"
        )
    if warm_start is not None:
        raise ConfigError(
            f"warm_start.data={warm_start.data.path}: an emulated learner has no model to warm up;"
            " leave warm_start out"
        )
    if algorithm.refers_in_stage:
        raise ConfigError(
            "algorithm.reference_pass=stage: an emulated learner has no reference model; leave it out"
        )
    if learner.world_size > 1 or cluster.learner_device is Device.CUDA:
        raise ConfigError(
            f"learner.world_size={learner.world_size} cluster.learner_device={cluster.learner_device}: an emulated"
            " learner is one process without a GPU; set emulation.learner_devices instead"
        )
