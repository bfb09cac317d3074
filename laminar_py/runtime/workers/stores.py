"""Stores of a run's hosts, which give pieces of segments to readers on other hosts: placed, and kept alive.

Owned by the controller. If a run spans several hosts, each host on which replicas, scorers or the reference write
segments has a store, and so has each host with segments of an earlier incarnation (`require`). A store stays as
long as its host lives, since the segments stay. Readers know a store by its name; the store leaves its address
under that name in the run's folder when it starts. A host has at most one store (`tests/workers/test_stores.py`).
"""

import asyncio
import logging
import shutil
from collections import defaultdict
from collections.abc import Sequence
from functools import partial

from laminar_py.ledger.segments.wire import ADDRESSES
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.cluster.placement import Place
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper, PartSpec
from laminar_py.runtime.workers.specs import StoreSpec

log = logging.getLogger(__name__)

PING_S = 1.0


class Stores:
    """Keeps one store on each cluster node that needs one.

    E.g. `Stores(incarnation, key=secrets.token_hex(32))`.
    """

    def __init__(self, incarnation: Incarnation, *, key: str) -> None:
        self._incarnation = incarnation
        self._placement = incarnation.placement
        self._key = key
        self._timeout_s = incarnation.config.supervisor.heartbeat_timeout_s
        self._keepers: dict[str, Keeper] = {}  # by node, of live hosts
        self._names: dict[str, str] = {}  # by node, also of hosts that are gone
        self._tasks: asyncio.TaskGroup | None = None  # group of the tasks that keep stores alive, after `start`
        self._begins = defaultdict[str, asyncio.Lock](asyncio.Lock)  # by node: one caller starts the store
        self._changed = asyncio.Event()  # set, and replaced, when a store comes up or a host is gone

    def name_of(self, node: str) -> str:
        """Return the name of a host's store, by which readers find it; "" if it has none."""
        return self._names.get(node, "")

    async def bring_up(self, node: str) -> str:
        """Start a host's store if there is none, and return its name once it is up.

        Raises PartCrashedError if the host is gone, or is the only one of the run; RunFailedError as `start`.
        """
        self.require(node)
        while (keeper := self._keepers.get(node)) is not None:
            if keeper.is_up:
                return self._names[node]
            if self._tasks is None:
                await self._bring_up(node)
            else:
                await self._changed.wait()
        raise PartCrashedError(self._names.get(node, "store"), f"host {self._placement.ip(node)} has none")

    def require(self, node: str) -> None:
        """Keep a store on a host from now on, unless the host is gone, or the only one of the run."""
        if node not in self._keepers and self._placement.spread and self._placement.is_alive(node):
            name = self._names.setdefault(node, f"store-{len(self._names)}")
            self._keepers[node] = Keeper(self._spec(name, node), self._incarnation)
            if self._tasks is not None:
                self._tasks.create_task(self._keep(node), name=f"keep-{name}")

    def spawn(self) -> None:
        """Start the processes on all hosts of the plan; `start` starts the stores in them."""
        shutil.rmtree(self._incarnation.run.path / ADDRESSES, ignore_errors=True)  # of stores that have ended
        self._follow()
        for keeper in self._keepers.values():
            keeper.spawn()

    async def start(self) -> None:
        """Start all stores, again if they crash meanwhile. Raises RunFailedError if one crashes too often."""
        self._follow()
        async with asyncio.TaskGroup() as tasks:
            for node in list(self._keepers):
                tasks.create_task(self._bring_up(node), name=f"start-{self._names[node]}")

    async def keep(self) -> None:
        """Keep all stores alive until cancelled, and start stores on hosts that the plan adds."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for node in list(self._keepers):
                tasks.create_task(self._keep(node), name=f"keep-{self._names[node]}")
            while True:
                self._follow()
                await asyncio.sleep(PING_S)

    def _follow(self) -> None:
        """Require a store on each host on which the plan has parts that write segments."""
        plan, workers = self._placement.plan, self._incarnation.config.reward.workers
        scorers = [self._placement.scorer_place(index) for index in range(workers)]
        for place in (*plan.replicas, *scorers, plan.reference):
            if place is not None and place.node is not None:
                self.require(place.node)

    def _spec(self, name: str, node: str) -> PartSpec:
        return PartSpec(
            names=[name],
            actor="laminar_py.runtime.workers.processes.services:StoreActor",
            concurrency=2,
            timeout_s=self._timeout_s,
            places=lambda: [Place(node)],
            start=partial(self._start, name, node),
        )

    async def _start(self, name: str, node: str, parts: Sequence[Part]) -> None:
        spec = StoreSpec(
            config=self._incarnation.config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            name=name,
            host=self._placement.ip(node),
            key=self._key,
        )
        await parts[0].call("start", spec)

    async def _bring_up(self, node: str) -> None:
        """Start a host's store, again if it crashes meanwhile; forget it if its host is gone."""
        keeper = self._keepers[node]
        async with self._begins[node]:
            while not keeper.is_up and self._placement.is_alive(node):
                try:
                    await keeper.begin()
                except PartCrashedError as error:
                    await keeper.replace(error)
            if not keeper.is_up:
                self._keepers.pop(node, None)
        self._notify()

    async def _keep(self, node: str) -> None:
        """Keep a host's store alive until the host is gone."""
        keeper = self._keepers[node]
        while self._placement.is_alive(node):
            try:
                async with self._begins[node]:
                    parts = await keeper.begin()
                await self._watch(parts)
            except PartCrashedError as error:
                await keeper.replace(error)
        log.warning("%s: host %s is gone", self._names[node], self._placement.ip(node))
        self._keepers.pop(node, None)
        self._notify()

    async def _watch(self, parts: Sequence[Part]) -> None:
        self._notify()
        while True:
            await parts[0].call("ping")
            await asyncio.sleep(PING_S)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
