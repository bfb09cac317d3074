"""The process of a relay node."""

import asyncio
import os
from pathlib import Path

from laminar_py.config.loading import read_config
from laminar_py.records.codec import decode, encode
from laminar_py.relay.wire.messages import RelayEvent
from laminar_py.workers.processes.setup import log_to
from laminar_py.workers.specs import RelayNews, RelaySpec


class RelayActor:
    """Shell of a relay node."""

    async def start(self, data: bytes) -> str:
        """Bind and run; the node's endpoint."""
        from laminar_py.relay.node.relay_node import RelayNode
        from laminar_py.relay.store.pages import allow_many_files
        from laminar_py.relay.wire.transport import RelayKeys

        allow_many_files()
        spec = decode(RelaySpec, data)
        log_to(spec.run_dir, f"relay-{spec.node}")
        relay = read_config(spec.config).relay
        self._news: list[RelayEvent] = []
        self._node = RelayNode(
            f"relay-{spec.node}",
            store=Path(spec.store),
            keys=RelayKeys(spec.public_key, spec.secret_key),
            host=relay.host,
            port=spec.port,
            parents=list(spec.parents),
            chunk_bytes=spec.chunk_bytes,
            keep_versions=relay.keep_versions,
            max_bytes_per_s=relay.max_bytes_per_s,
            emit=self._news.append,
        )
        await self._node.start()
        self._task = asyncio.create_task(self._node.run(), name="relay")
        return self._node.endpoint

    async def ping(self) -> bytes:
        """`RelayNews` since the last one; raises what ended the node, if anything did."""
        if self._task.done():
            self._task.result()
        news = RelayNews(os.getpid(), list(self._news))
        self._news.clear()
        return encode(news)
