"""The emulated engine as a backend. The section `emulation` of a config chooses and describes it."""

from collections.abc import Callable
from pathlib import Path

from laminar_py.config.engine import Backend, EngineConfig, EngineLaunch
from laminar_py.config.loading import read_profile
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.model_sizes import read_sizes
from laminar_py.records.engine import InferenceEngine
from laminar_py.records.pieces import Recording


class EmulatedEngineConfig(EngineConfig):
    """The section `rollout.engine` of an emulated engine, which has no settings; its times are in `emulation`."""

    @property
    def yields_cpus(self) -> bool:
        """False, since its timers must fire on time."""
        return False


def check(config: RunConfig) -> None:
    """Raise `ConfigError` without the section `emulation`, or if the run records experts."""
    if config.emulation is None:
        raise ConfigError("rollout.engine.kind=emulated: the section emulation is missing; add it")
    if Recording.ROUTED_EXPERTS in config.rollout.record:
        raise ConfigError("rollout.record=routed_experts: emulated engines have no experts; leave it out")


def check_start(config: RunConfig) -> None:
    """Raise `ConfigError` if the profile of times cannot be read."""
    assert config.emulation is not None, "it chose this backend"
    read_profile(config.emulation.profile)


async def open_engine(
    config: RunConfig,
    launch: EngineLaunch,
    *,
    delta_interval_s: float = 0.5,
    checksum: Callable[[Path], str] | None = None,
) -> InferenceEngine:
    """Start an `EmulatedEngine`. Its first load takes longer by its share of `emulation.start_spread_s`."""
    from laminar_py.engines.emulated.engine import EmulatedEngine, hash_weights
    from laminar_py.engines.emulated.responses import Responses

    rollout, emulation = config.rollout, config.emulation
    assert emulation is not None, "it chose this backend"
    vocab = read_sizes(launch.model_dir).vocab_size
    engine = EmulatedEngine(
        read_profile(emulation.profile).engine,
        Responses.from_config(emulation, vocab, max_len=rollout.max_len, seed=config.seed),
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


EMULATED = Backend(settings=EmulatedEngineConfig, open=open_engine, check=check, check_start=check_start)
