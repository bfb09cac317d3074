"""Stores of a run's hosts, which give pieces of segments to readers on other hosts: placed, and kept alive.

Owned by the controller. If a run spans several hosts, each host on which replicas, scorers or the reference write
segments has a store, and so has each host with segments of an earlier incarnation (`require`). A task for each
store starts and restarts it as long as the host lives, since the segments stay. Readers know a store by its name;
the store leaves its address under that name in the run's folder when it starts. A host has at most one store
(`tests/workers/test_stores.py`).
"""

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Sequence

from laminar_py.ledger.segments.wire import ADDRESSES
from laminar_py.runtime.cluster.errors import PartCrashedError
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.cluster.placement import Place
from laminar_py.runtime.workers.incarnation import Incarnation
from laminar_py.runtime.workers.keeper import Keeper
from laminar_py.runtime.workers.specs import StoreSpec

log = logging.getLogger(__name__)

FOLLOW_S = 1.0  # between two looks for hosts that the plan has added


class StoreKeeper(Keeper):
    """Keeps the store of one host alive."""

    actor_class = "laminar_py.runtime.workers.processes.services:StoreActor"

    def __init__(self, incarnation: Incarnation, name: str, node: str, key: str) -> None:
        super().__init__(incarnation, name)
        self.timeout_s = incarnation.config.supervisor.heartbeat_timeout_s
        self.name = name
        self._node = node
        self._key = key

    def places(self) -> Sequence[Place | None]:
        """Return the host, which a store never leaves."""
        return [Place(self._node)]

    async def start_parts(self, parts: Sequence[Part]) -> None:
        """Start the store, which leaves its address in the run's folder."""
        spec = StoreSpec(
            config=self._config.model_dump_json(),
            run_dir=str(self._incarnation.run.path),
            name=self.name,
            host=self._placement.ip(self._node),
            key=self._key,
        )
        await parts[0].call("start", spec)

    async def keep_while_alive(self) -> None:
        """Keep the store alive until its host is gone."""
        while self._placement.is_alive(self._node):
            try:
                await self.watch(await self.begin())
            except PartCrashedError as error:
                await self.replace(error)
        log.warning("%s: host %s is gone", self.name, self._placement.ip(self._node))


class Stores:
    """Keeps one store on each cluster node that needs one.

    E.g. `Stores(incarnation, key=secrets.token_hex(32))`.
    """

    def __init__(self, incarnation: Incarnation, *, key: str) -> None:
        self._incarnation = incarnation
        self._placement = incarnation.placement
        self._key = key
        self._names: dict[str, str] = {}  # by node, also of hosts that are gone
        self._keepers: dict[str, StoreKeeper] = {}  # by node
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by node: keeps the store alive until the host is gone

    def name_of(self, node: str) -> str:
        """Return the name of a host's store, by which readers find it; "" if it has none."""
        return self._names.get(node, "")

    async def bring_up(self, node: str) -> str:
        """Start a host's store if there is none, and return its name once it is up.

        Raises PartCrashedError if the host is gone, or is the only one of the run; RunFailedError if the store
        crashes too often.
        """
        self.require(node)
        if node in self._keepers:
            task, up = self._tasks[node], asyncio.create_task(self._keepers[node].up.wait())
            await asyncio.wait([task, up], return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
            if not task.done():
                return self._names[node]
            task.result()
        raise PartCrashedError(self._names.get(node, "store"), f"host {self._placement.ip(node)} has none")

    def require(self, node: str) -> None:
        """Keep a store on a host from now on, unless the host is gone, or the only one of the run."""
        if node not in self._keepers and self._placement.spread and self._placement.is_alive(node):
            name = self._names.setdefault(node, f"store-{len(self._names)}")
            keeper = self._keepers[node] = StoreKeeper(self._incarnation, name, node, self._key)
            self._tasks[node] = asyncio.create_task(keeper.keep_while_alive(), name=f"keep-{name}")

    def spawn(self) -> None:
        """Start the stores on all hosts of the plan."""
        shutil.rmtree(self._incarnation.run.path / ADDRESSES, ignore_errors=True)  # of stores that have ended
        self._follow_plan()

    async def start(self) -> None:
        """Wait until all stores are up. Raises RunFailedError if one crashes too often."""
        for node in list(self._keepers):
            with contextlib.suppress(PartCrashedError):  # the host is gone
                await self.bring_up(node)

    async def keep(self) -> None:
        """Start stores on hosts that the plan adds, until cancelled. Raises RunFailedError as `start`."""
        try:
            while True:
                self._follow_plan()
                for node in [node for node, task in self._tasks.items() if task.done()]:
                    self._tasks.pop(node).result()
                    del self._keepers[node]  # its host is gone
                await asyncio.sleep(FOLLOW_S)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _follow_plan(self) -> None:
        """Require a store on each host on which the plan has parts that write segments."""
        plan, workers = self._placement.plan, self._incarnation.config.reward.workers
        scorers = [self._placement.scorer_place(index) for index in range(workers)]
        for place in (*plan.replicas, *scorers, plan.reference):
            if place is not None and place.node is not None:
                self.require(place.node)
