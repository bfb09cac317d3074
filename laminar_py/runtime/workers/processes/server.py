"""The process beside a server that terms of the reward ask."""

import asyncio
from contextlib import suppress
from pathlib import Path

from laminar_py.config.reward import server_name
from laminar_py.records.codec import decode, encode
from laminar_py.records.scoring import ServerAddress
from laminar_py.runtime.workers.processes.setup import PartActor, open_part
from laminar_py.runtime.workers.specs import ServerStart


class ServerActor(PartActor):
    """Shell of a server of a pool."""

    async def start(self, data: bytes) -> bytes:
        """Launch the server; answers its `ServerAddress` once it is ready."""
        from laminar_py.engines.sglang.pools import PoolServerSpec
        from laminar_py.engines.sglang.server import SGLangServer

        spec = decode(ServerStart, data)
        name = server_name(spec.pool, spec.index)
        settings = open_part(spec, name).reward.servers[spec.pool]
        log = Path(spec.run_dir) / "logs" / f"sglang-{name}.log"
        launch = PoolServerSpec(pool=spec.pool, settings=settings, log=log, host=spec.host)
        self._server = SGLangServer(launch)
        await self._server.start()
        return encode(ServerAddress(self._server.url, self._server.api_key))

    async def watch(self, wait_s: float) -> None:
        """Wait so long; raises `EngineLostError` as soon as the server has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._server.watch()
