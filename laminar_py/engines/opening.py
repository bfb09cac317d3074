"""The engine of one replica, as the config says: embedded, an SGLang server of its own, or one that runs already.

Called by the replica's actor, whose process a launched server never outlives. With `emulation` it is an emulated
one, in a process without torch.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from laminar_py.config.cluster import Device
from laminar_py.config.emulated_profile import read_profile
from laminar_py.config.emulation import EmulationConfig
from laminar_py.config.engine import EngineKind
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.emulated.engine import EmulatedEngine
from laminar_py.engines.emulated.responses import Responses
from laminar_py.engines.model_sizes import read_sizes
from laminar_py.engines.sglang.attach import MIN_VERSION, check_server, version_numbers
from laminar_py.engines.sglang.engine import SGLangEngine
from laminar_py.engines.sglang.server import Flag, ServerSpec, SGLangServer
from laminar_py.engines.sglang.stream import Served
from laminar_py.records.protocols import EngineLostError, InferenceEngine
from laminar_py.records.recordings import Recording

DTYPES = ("float32", "bfloat16", "float16")
_VERSION = "from importlib.metadata import version; print(version('sglang'))"


def check_engine(config: RunConfig) -> None:
    """Before anything starts: the profile, the servers in `urls`, or what launches them. Raises ConfigError."""
    rollout, settings = config.rollout, config.rollout.engine
    if config.emulation is not None:
        read_profile(config.emulation.profile)
    sizes = read_sizes(config.model.path)
    if Recording.ROUTED_EXPERTS in rollout.record and sizes.num_experts_per_tok is None:
        raise ConfigError("rollout.record=routed_experts: the model in model.path has no experts; leave it out")
    if settings.kind is EngineKind.LOCAL:
        return
    positions = sizes.max_position_embeddings
    if positions is not None and rollout.max_len > positions:
        raise ConfigError(
            f"rollout.max_len={rollout.max_len}: the model in model.path has {positions} positions; lower max_len"
        )
    if settings.urls:
        asyncio.run(_check_servers(config))
    else:
        check_environment(interpreter(config))


def interpreter(config: RunConfig) -> Path:
    """What launches servers, on every host that has replicas."""
    return config.rollout.engine.python or Path(sys.executable)


async def _check_servers(config: RunConfig) -> None:
    key = api_key(config)
    for url in config.rollout.engine.urls:
        if config.cluster.address is None and not _is_here(urlsplit(url).hostname or ""):
            raise ConfigError(
                f"rollout.engine.urls={url}: is on another host, and a server reads weights from its own host's"
                " memory; join the Ray cluster that has it (cluster.address)"
            )
        await check_server(url, key, model_dir=config.model.path, rollout=config.rollout)


def _is_here(host: str) -> bool:
    """Whether a host is this one; a name that nobody knows is found out when it is called."""
    try:
        found = {address[4][0] for address in socket.getaddrinfo(host, None)}
    except OSError:
        return True
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return bool(found & own) or any(str(address).startswith("127.") for address in found)


def check_environment(python: Path) -> None:
    """Whether this interpreter of this host has an SGLang that will do. Raises ConfigError."""
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


def served_dtype(model_dir: Path) -> str:
    """What weights are published and served in: the model's own dtype, float32 where it names none."""
    config = json.loads((model_dir / "config.json").read_text())
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ConfigError(
            f"model.path={model_dir}: config.json has dtype {name!r}; name one of {', '.join(DTYPES)}"
        )
    return str(name)


def api_key(config: RunConfig) -> str | None:
    """Of the servers in `urls`, from the environment of the controller alone."""
    return os.environ.get(config.rollout.engine.api_key_env) or None


async def open_engine(
    config: RunConfig, *, model_dir: Path, logs: Path, index: int, api_key: str | None
) -> InferenceEngine:
    """A started engine without weights. Raises `EngineLostError` if it cannot start."""
    if config.emulation is not None:
        return await _open_emulated(config, config.emulation, model_dir, index)
    if config.rollout.engine.kind is EngineKind.LOCAL:
        return await _open_local(config, model_dir)
    if config.rollout.engine.urls:
        return await _attach(config, model_dir, index, api_key)
    server = SGLangServer(server_spec(config, model_dir=model_dir, log=logs / f"sglang-{index}.log"))
    await server.start()
    return await _connect(config, model_dir, server.url, server.api_key, server.watch)


def server_spec(config: RunConfig, *, model_dir: Path, log: Path) -> ServerSpec:
    """The server that a run launches for one replica."""
    rollout, settings = config.rollout, config.rollout.engine
    chosen = rollout.kv_capacity or settings.device is Device.CPU
    # weights that change in place find a token in the overlapped step, and the server would call it theirs
    exact: dict[str, Flag] = {}
    if rollout.on_new_weights is OnNewWeights.IN_PLACE:
        exact = {"disable-overlap-schedule": True}
    return ServerSpec(
        python=interpreter(config),
        model_dir=model_dir,
        log=log,
        max_batch=rollout.max_batch,
        max_len=rollout.max_len,
        kv_capacity=config.kv_capacity if chosen else None,
        device=settings.device,
        dtype=served_dtype(model_dir),
        tensor_parallel=settings.tensor_parallel,
        stream_interval=settings.stream_interval,
        record=rollout.record,
        lora=config.learner.lora,
        mask_tokens=rollout.sampling.top_k,
        flags={**exact, **settings.flags},
        start_timeout_s=settings.start_timeout_s,
    )


async def _open_local(config: RunConfig, model_dir: Path) -> InferenceEngine:
    from laminar_py.engines.local.engine import LocalEngine

    rollout = config.rollout
    engine = LocalEngine(
        model_dir,
        max_batch=rollout.max_batch,
        max_len=rollout.max_len,
        kv_capacity=config.kv_capacity,
        record=rollout.record,
    )
    await engine.start()
    return engine


async def _open_emulated(
    config: RunConfig, emulation: EmulationConfig, model_dir: Path, index: int
) -> InferenceEngine:
    rollout, vocab = config.rollout, read_sizes(model_dir).vocab_size
    engine = EmulatedEngine(
        read_profile(emulation.profile).engine,
        Responses(vocab, max_len=rollout.max_len, median=emulation.median_tokens, sigma=emulation.sigma),
        vocab=vocab,
        max_batch=rollout.max_batch,
        max_len=rollout.max_len,
        kv_capacity=config.kv_capacity,
        compression=emulation.compression,
        late_s=emulation.start_spread_s * index / rollout.replicas,
    )
    await engine.start()
    return engine


async def _attach(config: RunConfig, model_dir: Path, index: int, api_key: str | None) -> InferenceEngine:
    url = config.rollout.engine.urls[index]
    try:
        await check_server(url, api_key, model_dir=model_dir, rollout=config.rollout)
    except ConfigError as error:  # it was fine before the run began
        raise EngineLostError(str(error)) from None
    return await _connect(config, model_dir, url, api_key, None)


async def _connect(
    config: RunConfig,
    model_dir: Path,
    url: str,
    api_key: str | None,
    watch: Callable[[], Awaitable[object]] | None,
) -> InferenceEngine:
    sizes, rollout = read_sizes(model_dir), config.rollout
    engine = SGLangEngine(
        url,
        api_key=api_key,
        served=Served(
            vocab=sizes.vocab_size,
            max_len=rollout.max_len,
            experts_top_k=sizes.num_experts_per_tok,
            record=rollout.record,
            base=model_dir,
        ),
        stall_timeout_s=rollout.engine.stall_timeout_s,
        watch_server=watch,
    )
    await engine.start()
    return engine
