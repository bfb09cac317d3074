"""Servers that terms of the reward ask, which the run launches: their processes, addresses and revival.

Owned by the controller. Invariant: scorers are told of every server that comes up and of every one that is gone,
so a call goes to one that is up, or waits for one.
"""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from laminar_py.config.reward import server_name
from laminar_py.records.codec import encode
from laminar_py.records.scoring import PoolAddresses, ServerAddress
from laminar_py.runtime.cluster.errors import PartDiedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.processes.server import ServerActor
from laminar_py.runtime.workers.specs import ServerStart

START_S = 120.0  # of the process beside a server
WATCH_S = 10.0  # of one look at a server
PATIENCE_S = 60.0  # of an answer to that
FIRST_STARTS = 2  # that may fail before the run does


class RewardServers:
    """Processes of all pools; `tell` is given what is up whenever that changes."""

    def __init__(self, incarnation: Incarnation, *, tell: Callable[[PoolAddresses], None]) -> None:
        self._incarnation = incarnation
        self._reward = incarnation.config.reward
        self._tell = tell
        self._up = dict[tuple[str, int], ServerAddress]()
        self._told = 0
        launched = enumerate(self._reward.launched)
        self._keepers = [Keeper(self._spec(place, pool, index), incarnation) for place, (pool, index) in launched]

    def spawn(self) -> None:
        """Start all processes; `keep` starts the servers."""
        for keeper in self._keepers:
            keeper.spawn()

    async def keep(self) -> None:
        """Have all servers up until cancelled. Raises RunFailedError if one never starts, or dies too often."""
        async with asyncio.TaskGroup() as tasks:
            for keeper in self._keepers:
                tasks.create_task(keeper.calling(self._watch), name="keep-server")

    async def _watch(self, parts: Sequence[Part]) -> None:
        """Serve until the server dies."""
        (part,) = parts
        while True:
            await part.call("watch", WATCH_S)

    def _spec(self, place: int, pool: str, index: int) -> PartSpec:
        return PartSpec(
            names=[server_name(pool, index)],
            actor=ServerActor,
            concurrency=2,
            timeout_s=PATIENCE_S,
            places=lambda: [self._incarnation.placement.plan.servers[place]],
            start=partial(self._start, pool, index),
            settle=partial(self._settle, pool, index),
            first_starts=FIRST_STARTS,
            spares_memory=f"lower mem-fraction-static or max-total-tokens in reward.servers.{pool}.flags",
        )

    async def _start(self, pool: str, index: int, parts: Sequence[Part]) -> None:
        (part,) = parts
        node = part.place.node
        assert node is not None, "a plan names a node for every part"
        spec = ServerStart(
            config=self._incarnation.config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            pool=pool,
            index=index,
            host=self._incarnation.placement.ip(node),  # loopback where the run is on this machine alone
        )
        limit_s = START_S + self._reward.servers[pool].start_timeout_s
        self._up[pool, index] = await part.ask(ServerAddress, "start", encode(spec), timeout_s=limit_s)
        self._tell_all()

    async def _settle(self, pool: str, index: int, error: PartDiedError) -> PartDiedError:
        if self._up.pop((pool, index), None) is not None:
            self._tell_all()
        return error

    def _tell_all(self) -> None:
        self._told += 1
        pools: dict[str, list[ServerAddress]] = {}
        for (pool, _), address in self._up.items():
            pools.setdefault(pool, []).append(address)
        self._tell(PoolAddresses(self._told, pools))
