"""The engine of one replica on SGLang: a client of a server that is launched for it, or of one that runs already.

Called in the replica's process, which a launched server never outlives.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from laminar_py.config.cluster import Device
from laminar_py.config.rollout import OnNewWeights
from laminar_py.config.run import RunConfig
from laminar_py.config.section import ConfigError
from laminar_py.engines.model_sizes import read_sizes, served_dtype
from laminar_py.engines.registry import EngineLaunch
from laminar_py.engines.sglang.attach import check_server
from laminar_py.engines.sglang.engine import SGLangEngine
from laminar_py.engines.sglang.server import Flag, ServerSpec, SGLangServer
from laminar_py.engines.sglang.settings import section_of
from laminar_py.engines.sglang.stream import Served
from laminar_py.records.protocols import EngineLostError


async def open_server(config: RunConfig, launch: EngineLaunch) -> SGLangEngine:
    """A started engine without weights. Raises `EngineLostError` if it cannot start."""
    urls, model_dir = section_of(config).urls, launch.model_dir
    if not urls:
        spec = server_spec(config, model_dir=model_dir, log=launch.logs / f"sglang-{launch.index}.log")
        server = SGLangServer(spec)
        await server.start()
        return await _connect(config, model_dir, server.url, api_key=server.api_key, watch=server.watch)
    url, api_key = urls[launch.index], launch.secret
    try:
        await check_server(url, api_key, model_dir=model_dir, rollout=config.rollout)
    except ConfigError as error:  # accepted before the run began
        raise EngineLostError(str(error)) from None
    return await _connect(config, model_dir, url, api_key=api_key)


def server_spec(config: RunConfig, *, model_dir: Path, log: Path) -> ServerSpec:
    """The server that a run launches for one replica."""
    rollout, section = config.rollout, section_of(config)
    chosen = rollout.kv_capacity or section.device is Device.CPU
    # weights that change in place find a token in the overlapped step, and the server would call it theirs
    exact: dict[str, Flag] = {}
    if rollout.on_new_weights is OnNewWeights.IN_PLACE:
        exact = {"disable-overlap-schedule": True}
    return ServerSpec(
        python=section.interpreter,
        model_dir=model_dir,
        log=log,
        max_batch=rollout.max_batch,
        max_len=rollout.max_len,
        kv_capacity=rollout.kv_tokens if chosen else None,
        device=section.device,
        dtype=served_dtype(model_dir),
        tensor_parallel=section.tensor_parallel,
        stream_interval=section.stream_interval,
        record=rollout.record,
        lora=config.learner.lora,
        mask_tokens=rollout.sampling.top_k,
        flags={**exact, **section.flags},
        start_timeout_s=section.start_timeout_s,
    )


async def _connect(
    config: RunConfig,
    model_dir: Path,
    url: str,
    *,
    api_key: str | None,
    watch: Callable[[], Awaitable[object]] | None = None,
) -> SGLangEngine:
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
        stall_timeout_s=section_of(config).stall_timeout_s,
        watch_server=watch,
    )
    await engine.start()
    return engine
