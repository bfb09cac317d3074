"""SGLang as a backend: one server for each replica, launched by the run or already running.

Owns all checks of such a run: of its config, of a host that launches servers, and of running servers.
"""

import asyncio
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from laminar_py.config.engine import Backend, EngineLaunch
from laminar_py.config.learner import LoraConfig, LoraTarget
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.model_sizes import read_sizes
from laminar_py.engines.sglang.settings import SGLangConfig, section_of
from laminar_py.records.engine import EngineLostError, InferenceEngine

_VERSION = "from importlib.metadata import version; print(version('sglang'))"


# ---- limits of SGLang


def check(config: RunConfig) -> None:
    """Raise `ConfigError` for a config that no SGLang server can serve."""
    rollout, sampling, section = config.rollout, config.rollout.sampling, section_of(config)
    if sampling.cuts_vocabulary and not sampling.top_k:
        raise ConfigError(
            f"rollout.sampling.top_k=0 top_p={sampling.top_p} min_p={sampling.min_p}: SGLang records sampling"
            " masks of bounded size alone; set top_k"
        )
    if section.urls and len(section.urls) != rollout.replicas:
        raise ConfigError(
            f"rollout.engine.urls has {len(section.urls)} servers for rollout.replicas={rollout.replicas}; name"
            " one for each"
        )
    if config.learner.lora is not None:
        _check_lora(config, config.learner.lora, section.urls)


def _check_lora(config: RunConfig, lora: LoraConfig, urls: Sequence[str]) -> None:
    rollout = config.rollout
    if config.warm_start is not None:
        raise ConfigError(
            f"warm_start.data={config.warm_start.data.path}: with learner.lora SGLang servers begin with"
            " model.path as it is; name a folder that is warm already and leave warm_start out"
        )
    if urls:
        raise ConfigError(
            f"rollout.engine.urls={','.join(urls)}: servers that run already have a base of their own; leave urls"
            " out or learner.lora"
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


# ---- checks of hosts and servers


def check_start(config: RunConfig) -> None:
    """Check the model's positions, then the servers in `urls` or the SGLang that launches servers on this host."""
    max_len, positions = config.rollout.max_len, read_sizes(config.model.path).max_position_embeddings
    if positions is not None and max_len > positions:
        raise ConfigError(
            f"rollout.max_len={max_len}: the model in model.path has {positions} positions; lower max_len"
        )
    section = section_of(config)
    if section.urls:
        asyncio.run(_check_servers(config, section))
    elif config.cluster.address is None:  # else `preflight.survey` checks the nodes of replicas
        check_node(config)


def check_node(config: RunConfig) -> None:
    """Check the SGLang that launches servers on this host. Does nothing if the run uses running servers."""
    section = section_of(config)
    if section.urls:
        return
    check_interpreter(section.interpreter, field="rollout.engine.python")


def check_interpreter(python: Path, *, field: str) -> None:
    """Raise `ConfigError` if the interpreter `python` of this host has no SGLang or an old version."""
    from laminar_py.engines.sglang.attach import MIN_VERSION, version_numbers

    remedy = "name the interpreter of an environment with SGLang (for a CPU `make test-sglang` makes .venv-sglang)"
    try:
        asked = subprocess.run(
            [str(python), "-c", _VERSION], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{field}={python}: does not run ({error}); {remedy}") from None
    if asked.returncode:
        raise ConfigError(f"{field}={python}: has no SGLang; {remedy}")
    version = asked.stdout.strip()
    if version_numbers(version) < MIN_VERSION:
        oldest = ".".join(map(str, MIN_VERSION))
        raise ConfigError(f"{field}={python}: has SGLang {version}; install {oldest} or newer")


async def _check_servers(config: RunConfig, section: SGLangConfig) -> None:
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
        found = {address[4][0] for address in socket.getaddrinfo(host, None)}
    except OSError:
        return True
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    return bool(found & own) or any(str(address).startswith("127.") for address in found)


# ---- the engine of one replica


async def open_engine(config: RunConfig, launch: EngineLaunch) -> InferenceEngine:
    """Start a client of one server, after it launched the server or checked a running one.

    Raises `EngineLostError` if the server does not start, or a running server no longer passes the check.
    """
    from laminar_py.engines.sglang.attach import check_server
    from laminar_py.engines.sglang.engine import SGLangEngine
    from laminar_py.engines.sglang.server import ServerSpec, SGLangServer
    from laminar_py.engines.sglang.stream import Served

    section, rollout, model_dir = section_of(config), config.rollout, launch.model_dir
    if section.urls:
        url, api_key, watch_server = launch.server, launch.secret, None
        try:
            await check_server(url, api_key, model_dir=model_dir, rollout=rollout)
        except ConfigError as error:  # it passed the check before the run
            raise EngineLostError(str(error)) from None
    else:
        log = launch.logs / f"sglang-{launch.index}.log"
        server = SGLangServer(ServerSpec.for_replica(config, section, model_dir=model_dir, log=log))
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
        watch_server=watch_server,
    )
    await engine.start()
    return engine


SGLANG = Backend(
    settings=SGLangConfig, open=open_engine, check=check, check_node=check_node, check_start=check_start
)
