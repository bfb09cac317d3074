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
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by node: keeps the store alive until the host is gone
        self._changed = asyncio.Event()  # set, and replaced, when a store comes up or a task ends

    def name_of(self, node: str) -> str:
        """Return the name of a host's store, by which readers find it; "" if it has none."""
        return self._names.get(node, "")

    async def bring_up(self, node: str) -> str:
        """Start a host's store if there is none, and return its name once it is up.

        Raises PartCrashedError if the host is gone, or is the only one of the run; RunFailedError if the store
        crashes too often.
        """
        self.require(node)
        while (keeper := self._keepers.get(node)) is not None:
            if keeper.is_up:
                return self._names[node]
            if self._tasks[node].done():
                self._tasks[node].result()
            await self._changed.wait()
        raise PartCrashedError(self._names.get(node, "store"), f"host {self._placement.ip(node)} has none")

    def require(self, node: str) -> None:
        """Keep a store on a host from now on, unless the host is gone, or the only one of the run."""
        if node not in self._keepers and self._placement.spread and self._placement.is_alive(node):
            name = self._names.setdefault(node, f"store-{len(self._names)}")
            self._keepers[node] = Keeper(self._spec(name, node), self._incarnation)
            self._tasks[node] = asyncio.create_task(self._keep(node), name=f"keep-{name}")
            self._tasks[node].add_done_callback(lambda _: self._notify())

    def spawn(self) -> None:
        """Start the stores on all hosts of the plan."""
        shutil.rmtree(self._incarnation.run.path / ADDRESSES, ignore_errors=True)  # of stores that have ended
        self._follow()

    async def start(self) -> None:
        """Wait until all stores are up. Raises RunFailedError if one crashes too often."""
        for node in list(self._keepers):
            with contextlib.suppress(PartCrashedError):  # the host is gone
                await self.bring_up(node)

    async def keep(self) -> None:
        """Start stores on hosts that the plan adds, until cancelled. Raises RunFailedError as `start`."""
        try:
            while True:
                self._follow()
                for task in [task for task in self._tasks.values() if task.done()]:
                    task.result()
                await asyncio.sleep(PING_S)
        finally:
            for task in self._tasks.values():
                task.cancel()

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
            actor_class="laminar_py.runtime.workers.processes.services:StoreActor",
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

    async def _keep(self, node: str) -> None:
        """Keep a host's store alive until the host is gone."""
        keeper = self._keepers[node]
        while self._placement.is_alive(node):
            try:
                await self._watch(await keeper.begin())
            except PartCrashedError as error:
                await keeper.replace(error)
        log.warning("%s: host %s is gone", self._names[node], self._placement.ip(node))
        del self._keepers[node]

    async def _watch(self, parts: Sequence[Part]) -> None:
        self._notify()
        while True:
            await parts[0].call("ping")
            await asyncio.sleep(PING_S)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
