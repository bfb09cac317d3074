"""The embedded engine as a backend, with the settings of every backend. It runs on one thread of its process."""

from laminar_py.config.engine import QUANTIZATION, Backend, EngineConfig, EngineLaunch, Quantization, Speculation
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.local.spec import read_config
from laminar_py.records.engine import InferenceEngine


async def open_engine(config: RunConfig, launch: EngineLaunch) -> InferenceEngine:
    """Start a `LocalEngine`, which computes on one core, for the model in `launch.model_dir`."""
    import torch

    from laminar_py.engines.local.engine import LocalEngine

    torch.set_num_threads(1)
    rollout = config.rollout
    engine = LocalEngine(
        launch.model_dir,
        max_batch=rollout.max_batch,
        max_len=rollout.max_len,
        kv_capacity=rollout.kv_tokens,
        record=rollout.record,
        drafts=rollout.engine.speculation is Speculation.NGRAM,
        quantized=rollout.engine.quantizes,
    )
    await engine.start()
    return engine


def check(config: RunConfig) -> None:
    """Raise `ConfigError` for a rounding that the engine does not emulate."""
    kind = config.rollout.engine.quantization
    if kind is Quantization.FP8_KV:
        raise ConfigError(f"{QUANTIZATION}={kind}: the embedded engine rounds weights alone; set it to fp8")


def check_start(config: RunConfig) -> None:
    """Raise `ConfigError` for a model that the engine cannot compute."""
    read_config(config.model.path)


LOCAL = Backend(settings=EngineConfig, open=open_engine, check=check, check_start=check_start)
