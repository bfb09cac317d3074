"""The relay tree's processes: started root first, kept alive on the ports they had. Owned by the controller."""

import asyncio
from pathlib import Path

from laminar_py.codec import encode
from laminar_py.config import RunConfig
from laminar_py.relay import topology
from laminar_py.relay.transport import RelayKeys
from laminar_py.runtime.actors import RelayActor
from laminar_py.runtime.cluster import Part, PartDiedError
from laminar_py.runtime.specs import RelaySpec
from laminar_py.runtime.supervisor import Supervisor

PING_S = 1.0


class Relays:
    """All nodes of one host's tree; node 0 is the root beside the learner."""

    def __init__(self, config: RunConfig, *, run_dir: Path, shm: Path, supervisor: Supervisor) -> None:
        self.keys = RelayKeys.generate()
        relay = config.relay
        self.topology = topology.build(relay.topology, num_nodes=relay.nodes, fanout=relay.fanout)
        self._config = config
        self._run_dir = run_dir
        self._shm = shm
        self._supervisor = supervisor
        self._parts: dict[int, Part] = {}
        self._endpoints: dict[int, str] = {}

    def store(self, node: int) -> Path:
        """Where a node keeps version folders."""
        return self._shm / f"node-{node}"

    @property
    def root(self) -> str:
        """Endpoint of the root."""
        return self._endpoints[0]

    def serving(self, replica: int) -> str:
        """Endpoint of the relay that replica `replica` pulls from."""
        return self._endpoints[self.topology.node_of_replica(replica)]

    async def start(self) -> None:
        """Start all nodes; parents before children, since children need their endpoints."""
        for node in range(self._config.relay.nodes):
            self._parts[node] = self._spawn(node)
        for node in range(self._config.relay.nodes):
            await self._bring_up(node)

    async def keep(self) -> None:
        """Watch every node until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for node in self._parts:
                tasks.create_task(self._keep(node), name=f"keep-relay-{node}")

    async def _keep(self, node: int) -> None:
        while True:
            try:
                await self._parts[node].call("ping")
                await asyncio.sleep(PING_S)
            except PartDiedError as error:
                self._replace(node, error)
                await self._bring_up(node)

    async def _bring_up(self, node: int) -> None:
        """Start it, and another in its place as often as it dies over that."""
        while True:
            try:
                return await self._start_node(node)
            except PartDiedError as error:
                self._replace(node, error)

    def _replace(self, node: int, error: PartDiedError) -> None:
        self._supervisor.died(error)
        self._parts[node] = self._spawn(node)

    def _spawn(self, node: int) -> Part:
        timeout_s = self._config.supervisor.heartbeat_timeout_s
        return Part(f"relay-{node}", RelayActor, concurrency=4, timeout_s=timeout_s)

    async def _start_node(self, node: int) -> None:
        """Start it on the port it had before, if it had one."""
        spec = RelaySpec(
            self._config.model_dump_json(),
            str(self._run_dir),
            node,
            str(self.store(node)),
            self._port(node),
            tuple(self._endpoints[parent] for parent in self.topology.ancestors(node)),
            self.keys.public,
            self.keys.secret,
        )
        part = self._parts[node]
        endpoint = await part.call("start", encode(spec))
        assert isinstance(endpoint, str)
        self._endpoints[node] = endpoint
        pid = await part.call("ping")
        assert isinstance(pid, int)
        self._supervisor.started(part.name, pid)

    def _port(self, node: int) -> int:
        if node in self._endpoints:
            return int(self._endpoints[node].rpartition(":")[2])
        base = self._config.relay.base_port
        return 0 if base is None else base + node
