"""The backend `emulated`: engines, learner and environments that only take the time of GPUs.

`pyproject.toml` announces it in the group `laminar_py.backends`, as any other package would.
"""

from collections.abc import Callable
from pathlib import Path

from laminar_lab.emulation.settings import SHORTEST, EmulationConfig, emulation_of, read_profile
from laminar_py.config import ConfigError, RunConfig
from laminar_py.config.cluster import Device
from laminar_py.config.engine import QUANTIZATION, Backend, EngineLaunch, LearnerStandIn, Speculation
from laminar_py.engines import read_sizes
from laminar_py.records import InferenceEngine, Recording
from laminar_py.records.environment import Environments
from laminar_py.records.metrics import LearnerStarted
from laminar_py.repack import EngineSpeed


def check(config: RunConfig) -> None:
    """Raise `ConfigError` for settings that need engines or a learner with a model."""
    algorithm, learner = config.algorithm, config.learner
    if Recording.ROUTED_EXPERTS in config.rollout.record:
        raise ConfigError("rollout.record=routed_experts: emulated engines have no experts; leave it out")
    if config.environment is not None:
        raise ConfigError(
            f"environment.kind={config.environment.kind}: emulated engines generate no text; leave it out, or"
            " emulate turns by rollout.engine.turns"
        )
    if config.warm_start is not None:
        raise ConfigError(
            f"warm_start.kind={config.warm_start.kind}: an emulated learner has no model to warm up;"
            " leave warm_start out"
        )
    if learner.lora is not None:
        raise ConfigError("learner.lora: an emulated learner has no weights to adapt; leave learner.lora out")
    if algorithm.reference_in_own_process:
        raise ConfigError(
            "algorithm.reference_pass=stage: an emulated learner has no reference model; leave it out"
        )
    if config.rollout.engine.speculation is not Speculation.NONE:
        raise ConfigError(
            f"rollout.engine.speculation={config.rollout.engine.speculation}: an emulated engine has no texts to"
            " draft from; leave it out"
        )
    if config.rollout.engine.quantizes:
        raise ConfigError(
            f"{QUANTIZATION}={config.rollout.engine.quantization}: an emulated engine has no weights to round;"
            " leave it out"
        )
    if algorithm.teacher is not None:
        raise ConfigError(
            f"algorithm.teacher={algorithm.teacher}: an emulated engine has no tokens to judge; leave it out"
        )
    if learner.world_size > 1 or config.cluster.learner_device is Device.CUDA:
        raise ConfigError(
            f"learner.world_size={learner.world_size} cluster.learner_device={config.cluster.learner_device}: an"
            " emulated learner is one process without a GPU; set rollout.engine.learner_devices instead"
        )
    _check_turns(config)


def _check_turns(config: RunConfig) -> None:
    """Raise `ConfigError` if environments would fill a capped response, and leave the model no tokens."""
    emulation, sampling = emulation_of(config), config.rollout.sampling.params()
    sets = (settings.sampling(sampling) for settings in config.eval.sets.values())
    for cap in (sampling.max_new_tokens, *(one.max_new_tokens for one in sets)):
        if emulation.turns is not None and emulation.most_sampled(cap) < SHORTEST:
            raise ConfigError(
                f"rollout.engine.turns.observation_tokens={emulation.turns.observation_tokens}: leaves the model"
                f" fewer than {SHORTEST} tokens of max_new_tokens={cap}; lower it or count, or raise the cap"
            )


def check_start(config: RunConfig) -> None:
    """Raise `ConfigError` if the profile of times cannot be read."""
    read_profile(emulation_of(config).profile)


async def open_engine(
    config: RunConfig,
    launch: EngineLaunch,
    *,
    delta_interval_s: float = 0.5,
    checksum: Callable[[Path], str] | None = None,
) -> InferenceEngine:
    """Start an `EmulatedEngine`. Its first load takes longer by its share of `rollout.engine.start_spread_s`."""
    from laminar_lab.emulation.engine import EmulatedEngine, hash_weights
    from laminar_lab.emulation.responses import Responses

    rollout, emulation = config.rollout, emulation_of(config)
    vocab = read_sizes(launch.model_dir).vocab_size
    engine = EmulatedEngine(
        read_profile(emulation.profile).engine,
        Responses.from_config(config, vocab),
        vocab=vocab,
        max_batch=rollout.max_batch,
        max_len=rollout.max_len,
        kv_capacity=rollout.kv_tokens,
        compression=emulation.compression,
        late_s=emulation.start_spread_s * launch.index / rollout.replicas,
        delta_interval_s=delta_interval_s,
        checksum=checksum or hash_weights,
    )
    await engine.start()
    return engine


def open_learner(config: RunConfig) -> tuple[LearnerStandIn, LearnerStarted]:
    """Make the learner that takes the place of the run's own."""
    from laminar_lab.emulation.learner import EmulatedLearner

    emulation = emulation_of(config)
    times = read_profile(emulation.profile).learner
    learner = EmulatedLearner(times, devices=emulation.learner_devices, compression=emulation.compression)
    return learner, LearnerStarted(
        num_parameters=times.num_parameters,
        attention="emulated",
        attention_share=times.attention_share,
    )


def open_environments(config: RunConfig) -> Environments | None:
    """Make the environments of a replica; None if trajectories have one turn."""
    from laminar_lab.emulation.responses import environments_of

    return environments_of(config)


def known_speed(config: RunConfig) -> EngineSpeed:
    """The speed of the engines by their profile."""
    emulation = emulation_of(config)
    times, fast = read_profile(emulation.profile).engine, emulation.compression
    return EngineSpeed(
        step_s=times.step_s / fast,
        step_s_per_sequence=0.0,
        step_s_per_token=times.kv_token_s / fast,
        prefill_tokens_per_s=times.prefill_tokens_per_s * fast,
    )


EMULATED = Backend(
    settings=EmulationConfig,
    open=open_engine,
    check=check,
    check_start=check_start,
    open_learner=open_learner,
    open_environments=open_environments,
    known_speed=known_speed,
)
