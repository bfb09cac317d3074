"""Keepers: each starts the processes of one part of a run, calls them, and replaces them when they crash.

Each kind of part is a subclass of `Keeper` beside this module: replica, relay, scorer, learner and so on. Only its
keeper changes the state of a part:

    none -> spawned  processes run; there are none while the plan has no room for them
    spawned -> up    `start_parts` has returned
    any -> none      a process crashed, hung, or was ended on purpose; the others of the part end with it

A crash is counted once, before another process starts (`tests/workers/test_keeper.py`).
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeVar

from laminar_py.runtime.cluster.calls import ActorClass
from laminar_py.runtime.cluster.errors import PartCrashedError, RunFailedError, says_out_of_memory
from laminar_py.runtime.cluster.part import Part
from laminar_py.runtime.cluster.placement import NodeSlot
from laminar_py.runtime.workers.incarnation import Incarnation

T = TypeVar("T")
RETRY_S = 2.0  # wait for each failed start in a row, and between looks for room
MAX_PATIENCE = 15  # most failed starts in a row that lengthen the wait
WATCH_S = 5.0  # length of one call that watches a process, or pause between two
STARVED = 2  # crashes for want of memory after which the run ends


class Keeper:
    """Keeps one part alive, whose processes start and end together, e.g. the ranks of a learner.

    A subclass for a kind of part sets the attributes, and overrides the methods of the first section.
    """

    actor_class: ActorClass  # of the object that each process hosts
    timeout_s: float  # of a call
    concurrency = 4  # calls at once in a process
    first_starts: int | None = None  # failed starts at which a part that was never up ends the run, if set
    on_record = True  # the ledger gets an event for each start
    memory_advice = ""
    """Advice for a message: which settings need less memory. A part with advice may run out of memory once."""
    forgives_s = math.inf  # after so long up, earlier crashes for want of memory are forgotten

    def __init__(self, incarnation: Incarnation, *names: str) -> None:
        self.parts: Sequence[Part] = ()
        self.is_up = False  # from the start of the part to its crash
        self._names = names  # of its processes
        self._incarnation = incarnation
        self._config = incarnation.config
        self._supervisor = incarnation.supervisor
        self._placement = incarnation.placement
        self.has_served = False  # it has been up
        self._failures = 0  # failed starts in a row
        self._starved = 0  # crashes for want of memory that count
        self._up_s = 0.0  # when it came up

    # ---- what a kind of part defines

    def places(self) -> Sequence[NodeSlot | None]:
        """Return the place of each process in the present plan; None for a process without room."""
        raise NotImplementedError

    async def start_parts(self, parts: Sequence[Part]) -> None:
        """Load the part in its started processes. Raises PartCrashedError."""
        raise NotImplementedError

    async def watch(self, parts: Sequence[Part]) -> None:
        """Serve until a process crashes or hangs: call its `watch` again and again. Raises PartCrashedError."""
        while True:
            await parts[0].call("watch", WATCH_S)

    async def clean_up(self, error: PartCrashedError) -> PartCrashedError | None:
        """Clean up after a crash; return the crash to count, or None for a crash that does not count."""
        return error

    async def wait_before_restart(self, failures: int) -> None:
        """Wait between a crash and the next process, after `failures` failed starts in a row."""
        await asyncio.sleep(RETRY_S * min(failures, MAX_PATIENCE))

    # ---- the same for every kind

    def spawn(self) -> bool:
        """Start the processes if there are none and the plan has room for all; return True if any run."""
        places = [place for place in self.places() if place is not None] if not self.parts else []
        if len(places) == len(self._names):
            self.parts = [
                Part(name, self.actor_class, concurrency=self.concurrency, timeout_s=self.timeout_s, place=place)
                for name, place in zip(self._names, places, strict=True)
            ]
        return bool(self.parts)

    async def begin(self) -> Sequence[Part]:
        """Wait for room, start the part unless it is up, and return its processes. Raises PartCrashedError."""
        while not self.spawn():
            await asyncio.sleep(RETRY_S)
            await self._placement.refresh(age_s=RETRY_S)
        if not self.is_up:
            await self.start_parts(self.parts)
            pids = await asyncio.gather(*(part.call("pid") for part in self.parts))
            self.has_served, self._failures = True, 0
            self._up_s = asyncio.get_running_loop().time()
            self.is_up = True
            for part, pid in zip(self.parts, pids, strict=True):
                assert isinstance(pid, int)
                if self.on_record:
                    self._supervisor.started(part.name, pid)
        return self.parts

    async def bring_up(self) -> Sequence[Part]:
        """Start the part, again after crashes, until it is up; return its processes. Raises RunFailedError."""
        while not self.is_up:
            try:
                await self.begin()
            except PartCrashedError as error:
                await self.replace(error)
        return self.parts

    async def keep(self) -> None:
        """Start and `watch` the part, again after crashes, until cancelled. Raises RunFailedError, ConfigError."""
        await self.call_with_restarts(self.watch)

    async def call_with_restarts(self, call: Callable[[Sequence[Part]], Awaitable[T]]) -> T:
        """Return the result of `call` on the processes; if they crash, restart them and call again.

        Raises RunFailedError if they crash too often, ConfigError if the user has to change a setting.
        """
        while True:
            try:
                return await call(await self.begin())
            except PartCrashedError as error:
                await self.replace(error)

    async def replace(self, error: PartCrashedError) -> None:
        """End the processes, count the crash, renew the plan, and wait for a restart. Raises RunFailedError."""
        self.kill()
        self._failures += not self.is_up
        if self.is_up and asyncio.get_running_loop().time() - self._up_s >= self.forgives_s:
            self._starved = 0
        self.parts = ()
        self.is_up = False
        crash = await self.clean_up(error)
        if crash is not None:
            self._supervisor.crashed(crash)
            self._end_if_starved(crash)
            if self._failures == self.first_starts and not self.has_served:
                raise RunFailedError(f"{crash.part} does not start: {crash.reason}; see logs/{crash.part}.log")
        await self._placement.refresh()
        await self.wait_before_restart(self._failures)
        await self._placement.refresh()  # a node may have left during the wait

    def _end_if_starved(self, crash: PartCrashedError) -> None:
        """Raise RunFailedError with advice at the second crash of a part for want of memory."""
        if self.memory_advice and says_out_of_memory(crash.reason):
            self._starved += 1
            if self._starved == STARVED:
                raise RunFailedError(
                    f"{crash.part} ran out of memory twice, last: {crash.reason}; {self.memory_advice}, and"
                    f" --resume; see logs/{crash.part}.log"
                )

    def kill(self) -> None:
        """End all processes; a running call on them raises PartCrashedError."""
        for part in self.parts:
            part.kill()


AnyKeeper = TypeVar("AnyKeeper", bound=Keeper)


class KeeperGroup(Generic[AnyKeeper]):
    """Parts of one kind that start and crash independently of each other, e.g. the scorers of a run."""

    def __init__(self, keepers: Iterable[AnyKeeper]) -> None:
        self.keepers = list(keepers)

    def spawn(self) -> None:
        """Start the processes of all parts that have none and that the plan has room for."""
        for keeper in self.keepers:
            keeper.spawn()

    async def keep(self) -> None:
        """Keep all parts alive until cancelled. Raises an ExceptionGroup if one of them crashes too often."""
        async with asyncio.TaskGroup() as tasks:
            for keeper in self.keepers:
                tasks.create_task(keeper.keep(), name="keep")
