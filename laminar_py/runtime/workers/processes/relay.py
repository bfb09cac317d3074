"""The process of a relay node."""

import asyncio
from pathlib import Path

from laminar_py.ledger.run_folder import RunFolder
from laminar_py.relay.mapped_file import allow_many_files
from laminar_py.relay.messages import RelayEvent
from laminar_py.relay.node import RelayNode
from laminar_py.runtime.workers.processes.base import PartActor, read_run_config
from laminar_py.runtime.workers.specs import RelaySpec


class RelayActor(PartActor):
    """Hosts a relay node."""

    async def start(self, spec: RelaySpec) -> str:
        """Bind a port, start the node's task, and note its store in the run's folder; return its endpoint."""
        allow_many_files()
        relay = read_run_config(spec, f"relay-{spec.node}").relay
        self._events: list[RelayEvent] = []
        self._node = RelayNode(
            f"relay-{spec.node}",
            store=Path(spec.store),
            keys=spec.keys,
            host=spec.host,
            parents=spec.parents,
            sources=spec.sources,
            chunk_bytes=spec.chunk_bytes,
            keep_versions=relay.keep_versions,
            seal=relay.seal,
            lanes=relay.lanes,
            emit=self._events.append,
        )
        await self._node.start()
        RunFolder(Path(spec.run_dir)).note_shm(Path(spec.store).parent)
        self._task = asyncio.create_task(self._node.run(), name="relay")
        return self._node.endpoint

    async def ping(self, parents: tuple[str, ...], sources: tuple[str, ...]) -> list[RelayEvent]:
        """Set the endpoints of parents and sources; return the events since the last ping. Raises its error."""
        self._node.set_parents(parents, sources)
        if self._task.done():
            self._task.result()
        events = list(self._events)
        self._events.clear()
        return events
