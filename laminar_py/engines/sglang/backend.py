"""SGLang as a backend: one server for each replica, launched by the run or already running.

Owns all checks of such a run: of its config, of a host that launches servers, and of running servers.
"""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from laminar_py.config.cluster import Device, LeaseCache
from laminar_py.config.engine import QUANTIZATION, Backend, EngineLaunch, Speculation
from laminar_py.config.learner import LoraConfig, LoraTarget
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.model_sizes import read_sizes, served_dtype
from laminar_py.engines.sglang.launch import (
    ServerSpec,
    check_flags,
    check_interpreter,
    replica_server,
    sharing_flags,
)
from laminar_py.engines.sglang.settings import Flag, SGLangConfig, section_of, speculation_fault
from laminar_py.records.engine import EngineLostError, InferenceEngine

# ---- limits of SGLang

ROUNDED = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")  # models that its loader for RL reloads


def check(config: RunConfig) -> None:
    """Raise `ConfigError` for a config that no SGLang server can serve."""
    rollout, sampling, section = config.rollout, config.rollout.sampling, section_of(config)
    if sampling.cuts_vocabulary and not sampling.top_k:
        raise ConfigError(
            f"rollout.sampling.top_k=0 top_p={sampling.top_p} min_p={sampling.min_p}: SGLang records sampling"
            " masks of bounded size only; set top_k"
        )
    if section.urls and len(section.urls) != rollout.replicas:
        raise ConfigError(
            f"rollout.engine.urls has {len(section.urls)} servers for rollout.replicas={rollout.replicas}; name"
            " one server for each replica"
        )
    check_flags(section.flags, section.device)
    on_cuda, named = section.device is Device.CUDA, section.speculation
    if (fault := speculation_fault(named.upper(), on_cuda=on_cuda, record=rollout.record)) is not None:
        raise ConfigError(f"rollout.engine.speculation={named}: {fault}")
    if config.learner.lora is not None:
        _check_lora(config, config.learner.lora, section.urls)


def _check_lora(config: RunConfig, lora: LoraConfig, urls: Sequence[str]) -> None:
    """Raise `ConfigError` for settings that SGLang cannot combine with LoRA adapters."""
    rollout = config.rollout
    if config.warm_start is not None:
        raise ConfigError(
            f"warm_start.kind={config.warm_start.kind}: with learner.lora SGLang servers begin with"
            " model.path as it is; make a warm folder by `laminar warm CONFIG OUT`, set model.path to it and leave"
            " warm_start out"
        )
    if urls:
        raise ConfigError(
            f"rollout.engine.urls={','.join(urls)}: running servers have a base of their own; leave out urls or"
            " learner.lora"
        )
    if rollout.on_new_weights in (OnNewWeights.RETRACT, OnNewWeights.IN_PLACE):
        raise ConfigError(
            f"rollout.on_new_weights={rollout.on_new_weights}: a request on SGLang keeps the adapter that it"
            " began with; set it to drain or resume"
        )
    targets = set(lora.targets)
    attention = {LoraTarget.Q_PROJ, LoraTarget.K_PROJ, LoraTarget.V_PROJ} & targets
    lone_up = LoraTarget.UP_PROJ in targets and LoraTarget.GATE_PROJ not in targets
    if (attention and not attention >= {LoraTarget.Q_PROJ, LoraTarget.V_PROJ}) or lone_up:
        raise ConfigError(
            f"learner.lora.targets={','.join(lora.targets)}: SGLang has q_proj, k_proj and v_proj in one matrix"
            " and gate_proj and up_proj in another; name q_proj and v_proj together, k_proj only with both, and"
            " up_proj only with gate_proj"
        )


def _check_rounding(folder: Path) -> None:
    """Raise `ConfigError` for a model that SGLang's loader for RL cannot round, or not as it is published."""
    name, fault = (read_sizes(folder).architectures or ["a model"])[0], ""
    if name not in ROUNDED:
        fault = (
            f"SGLang reloads rounded weights of {', '.join(ROUNDED)} alone, not of {name}; leave quantization out"
        )
    elif served_dtype(folder) != "bfloat16":
        fault = "config.json has another dtype than bfloat16, whose values SGLang rounds; set it to bfloat16"
    elif not any(folder.glob("*.safetensors")):
        fault = "a server that rounds begins with the weights in this folder; name a folder with weights"
    if fault:
        raise ConfigError(f"model.path={folder}: with {QUANTIZATION} {fault}")


# ---- checks of hosts and servers


def check_start(config: RunConfig) -> None:
    """Raise `ConfigError` if a running server or this host's SGLang does not suffice."""
    section = section_of(config)
    if section.quantizes:
        _check_rounding(config.model.path)
    if section.urls:
        asyncio.run(_check_servers(config, section))
    elif config.cluster.address is None:  # else `preflight.node_checks` checks the nodes of replicas
        check_node(config)


def check_node(config: RunConfig) -> None:
    """Raise `ConfigError` if this host must launch servers and its interpreter has no usable SGLang."""
    section = section_of(config)
    if not section.urls:
        compiles = section.device is Device.CUDA
        check_interpreter(section.interpreter, field="rollout.engine.python", compiles=compiles)


async def _check_servers(config: RunConfig, section: SGLangConfig) -> None:
    """Raise `ConfigError` if a running server is on another host, or unfit for this config."""
    from laminar_py.engines.sglang.attach import check_server

    for url in section.urls:
        if config.cluster.address is None and not _is_here(urlsplit(url).hostname or ""):
            raise ConfigError(
                f"rollout.engine.urls={url}: is on another host, and a server reads weights from its own host's"
                " memory; join the Ray cluster that has it (cluster.address)"
            )
        await check_server(url, section.secret(), model_dir=config.model.path, rollout=config.rollout)


def _is_here(host: str) -> bool:
    """True for a name of this host. Also True for an unknown name, whose first connection fails later."""
    try:
        addresses = {address[4][0] for address in socket.getaddrinfo(host, None)}
    except OSError:
        return True
    local = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return bool(addresses & local) or any(str(address).startswith("127.") for address in addresses)


# ---- the engine of one replica


async def open_engine(config: RunConfig, launch: EngineLaunch) -> InferenceEngine:
    """Launch a server or check the running server of a replica, and return a started `SGLangEngine` of it.

    Raises `EngineLostError` if the server does not start, or a running server no longer passes the check.
    """
    from laminar_py.engines.sglang.attach import check_server
    from laminar_py.engines.sglang.engine import SGLangEngine
    from laminar_py.engines.sglang.server import SGLangServer
    from laminar_py.engines.sglang.stream import Served

    section, rollout, model_dir = section_of(config), config.rollout, launch.model_dir
    if section.urls:
        url, api_key, watch_server = launch.server, launch.secret, None
        try:
            await check_server(url, api_key, model_dir=model_dir, rollout=rollout)
        except ConfigError as error:  # it passed the check before the run
            raise EngineLostError(str(error)) from None
    else:
        server = SGLangServer(_server_of(config, launch))
        await server.start()
        url, api_key, watch_server = server.url, server.api_key, server.watch
    sizes = read_sizes(model_dir)
    served = Served(
        vocab=sizes.vocab_size,
        max_len=rollout.max_len,
        experts_top_k=sizes.num_experts_per_tok,
        record=rollout.record,
        base=model_dir,
    )
    engine = SGLangEngine(
        url,
        api_key=api_key,
        served=served,
        stall_timeout_s=section.stall_timeout_s,
        load_timeout_s=section.load_timeout_s,
        start_timeout_s=section.start_timeout_s,
        watch_server=watch_server,
    )
    await engine.start()
    return engine


def _server_of(config: RunConfig, launch: EngineLaunch) -> ServerSpec:
    """Describe the server that a run launches for one replica."""
    section, rollout = section_of(config), config.rollout
    chosen = rollout.kv_capacity or section.device is Device.CPU
    # with overlap a token is in the pipeline during an in-place load, and gets the new version
    in_place = rollout.on_new_weights is OnNewWeights.IN_PLACE
    exact: dict[str, Flag] = {"disable-overlap-schedule": True} if in_place else {}
    if launch.shared:
        releases = section.device is Device.CUDA and config.lease_cache is LeaseCache.RELEASE
        exact |= sharing_flags(releases=releases)
    return replica_server(
        section.interpreter,
        launch.model_dir,
        launch.logs / f"sglang-{launch.index}.log",
        max_batch=rollout.max_batch,
        max_len=rollout.max_len,
        kv_capacity=rollout.kv_tokens if chosen else None,
        device=section.device,
        dtype=served_dtype(launch.model_dir),
        tensor_parallel=section.tensor_parallel,
        stream_interval=section.stream_interval,
        record=rollout.record,
        lora=config.learner.lora,
        mask_tokens=rollout.sampling.top_k,
        flags={**exact, **section.flags},
        start_timeout_s=section.start_timeout_s,
        shared_gpus=launch.shared_gpus,
        speculates=section.speculation is Speculation.NGRAM,
        quantization=section.quantization,
    )


SGLANG = Backend(
    settings=SGLangConfig, open=open_engine, check=check, check_node=check_node, check_start=check_start
)
