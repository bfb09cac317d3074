"""The process of a relay node."""

import asyncio
from pathlib import Path

from laminar_py.records.codec import decode, encode
from laminar_py.relay.wire.messages import RelayEvent
from laminar_py.workers.processes.setup import PartActor, open_part
from laminar_py.workers.specs import RelaySpec


class RelayActor(PartActor):
    """Shell of a relay node."""

    async def start(self, data: bytes) -> str:
        """Bind and run; the node's endpoint."""
        from laminar_py.relay.node.relay_node import RelayNode
        from laminar_py.relay.store.pages import allow_many_files
        from laminar_py.relay.wire.transport import RelayKeys

        allow_many_files()
        spec = decode(RelaySpec, data)
        relay = open_part(spec, f"relay-{spec.node}").relay
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
        """List of `RelayEvent` since the last one; raises what ended the node, if anything did."""
        if self._task.done():
            self._task.result()
        news = encode(self._news)
        self._news.clear()
        return news
