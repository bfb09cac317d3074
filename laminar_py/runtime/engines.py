"""The engine of one replica, as the config says: embedded, an SGLang server of its own, or one that runs already.

Called by the replica's actor, whose process a launched server never outlives.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec

from laminar_py.config import ConfigError, Device, EngineKind, OnNewWeights, RunConfig
from laminar_py.engines.sglang import SGLangEngine
from laminar_py.engines.sglang_attach import MIN_VERSION, check_server, version_numbers
from laminar_py.engines.sglang_server import ServerSpec, SGLangServer
from laminar_py.engines.sglang_stream import Served
from laminar_py.interfaces import InferenceEngine


class _ModelSizes(msgspec.Struct, frozen=True):
    """What a client needs of a model's config.json."""

    vocab_size: int
    num_experts_per_tok: int | None = None
    max_position_embeddings: int | None = None


_VERSION = "from importlib.metadata import version; print(version('sglang'))"


def check_engine(config: RunConfig) -> None:
    """Before anything starts: the servers in `urls`, or what is to launch them. Raises ConfigError."""
    rollout, settings = config.rollout, config.rollout.engine
    if settings.kind is EngineKind.LOCAL:
        return
    positions = _sizes(config.model.path).max_position_embeddings
    if positions is not None and rollout.max_len > positions:
        raise ConfigError(
            f"rollout.max_len={rollout.max_len}: the model in model.path has {positions} positions; lower max_len"
        )
    if settings.urls:
        asyncio.run(_check_servers(config))
    else:
        _check_environment(settings.python or Path(sys.executable))


async def _check_servers(config: RunConfig) -> None:
    settings = config.rollout.engine
    key = os.environ.get(settings.api_key_env)
    for url in settings.urls:
        await check_server(url, key, model_dir=config.model.path, rollout=config.rollout)


def _check_environment(python: Path) -> None:
    remedy = "name the interpreter of an environment with SGLang (for a CPU `make test-sglang` makes .venv-sglang)"
    try:
        asked = subprocess.run(
            [str(python), "-c", _VERSION], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"rollout.engine.python={python}: does not run ({error}); {remedy}") from None
    if asked.returncode:
        raise ConfigError(f"rollout.engine.python={python}: has no SGLang; {remedy}")
    version = asked.stdout.strip()
    if version_numbers(version) < MIN_VERSION:
        oldest = ".".join(map(str, MIN_VERSION))
        raise ConfigError(f"rollout.engine.python={python}: has SGLang {version}; install {oldest} or newer")


def _sizes(model_dir: Path) -> _ModelSizes:
    return msgspec.json.decode((model_dir / "config.json").read_bytes(), type=_ModelSizes)


async def open_engine(config: RunConfig, *, model_dir: Path, logs: Path, index: int) -> InferenceEngine:
    """A started engine without weights. Raises `EngineLostError` or `ConfigError` if it cannot start."""
    if config.rollout.engine.kind is EngineKind.LOCAL:
        return await _open_local(config, model_dir)
    return await _open_sglang(config, model_dir, logs, index)


def server_spec(config: RunConfig, *, model_dir: Path, log: Path) -> ServerSpec:
    """The server that a run launches for one replica."""
    rollout, settings = config.rollout, config.rollout.engine
    chosen = rollout.kv_capacity or settings.device is Device.CPU
    # weights that change in place find a token in the overlapped step, and the server would call it theirs
    exact = {"disable-overlap-schedule": True} if rollout.on_new_weights is OnNewWeights.IN_PLACE else {}
    return ServerSpec(
        python=settings.python or Path(sys.executable),
        model_dir=model_dir,
        log=log,
        max_batch=rollout.max_batch,
        max_len=rollout.max_len,
        kv_capacity=config.kv_capacity if chosen else None,
        device=settings.device,
        dtype=settings.dtype,
        tensor_parallel=settings.tensor_parallel,
        stream_interval=settings.stream_interval,
        record=rollout.record,
        flags=exact | settings.flags,
        start_timeout_s=settings.start_timeout_s,
    )


async def _open_local(config: RunConfig, model_dir: Path) -> InferenceEngine:
    from laminar_py.engines.local import LocalEngine

    rollout = config.rollout
    engine = LocalEngine(
        model_dir, max_batch=rollout.max_batch, max_len=rollout.max_len, kv_capacity=config.kv_capacity
    )
    await engine.start()
    return engine


async def _open_sglang(config: RunConfig, model_dir: Path, logs: Path, index: int) -> InferenceEngine:
    rollout, settings = config.rollout, config.rollout.engine
    watch = None
    if settings.urls:
        url, api_key = settings.urls[index], os.environ.get(settings.api_key_env)
        await check_server(url, api_key, model_dir=model_dir, rollout=rollout)
    else:
        server = SGLangServer(server_spec(config, model_dir=model_dir, log=logs / f"sglang-{index}.log"))
        await server.start()
        url, api_key, watch = server.url, server.api_key, server.watch
    sizes = _sizes(model_dir)
    engine = SGLangEngine(
        url,
        api_key=api_key,
        served=Served(sizes.vocab_size, rollout.max_len, sizes.num_experts_per_tok, rollout.record),
        stall_timeout_s=settings.stall_timeout_s,
        watch_server=watch,
    )
    await engine.start()
    return engine
