"""Servers of a reward on this host, one of each pool, for `laminar reward try` and `laminar rescore`."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from laminar_py.cli.lines import say
from laminar_py.config.reward import RewardConfig, server_name
from laminar_py.config.section import ConfigError
from laminar_py.engines.sglang.pools import PoolServerSpec, check_pool
from laminar_py.engines.sglang.server import SGLangServer
from laminar_py.records.protocols import EngineLostError
from laminar_py.records.servers import PoolAddresses, ServerAddress
from laminar_py.reward.scorer import LaunchedServers


@asynccontextmanager
async def open_pools(reward: RewardConfig, logs: Path) -> AsyncIterator[LaunchedServers]:
    """A server of each pool, ready, on GPUs of its own. Raises `ConfigError` if one does not start."""
    up: dict[str, list[ServerAddress]] = {}
    first_gpu = 0
    async with AsyncExitStack() as stack:
        for pool, settings in reward.servers.items():
            check_pool(reward, pool)
            say(f"starting reward.servers.{pool}")
            log = logs / f"sglang-{server_name(pool, 0)}.log"
            spec = PoolServerSpec(pool=pool, settings=settings, log=log, first_gpu=first_gpu)
            try:
                server = await stack.enter_async_context(SGLangServer(spec))
            except EngineLostError as error:
                raise ConfigError(f"reward.servers.{pool}: {error}") from None
            up[pool] = [ServerAddress(server.url, server.api_key)]
            first_gpu += settings.gpus
        launched = LaunchedServers()
        launched.update(PoolAddresses(1, up))
        yield launched
