"""Keepers: each starts the processes of one part of a run, calls them, and replaces them when they crash.

Every kind of part has an owner beside this module (replicas, relays, scorers, learner, reference, trackers), which
describes the part in a `PartSpec`. Only its `Keeper` changes the state of a part:

    none -> spawned  processes run; there are none while the plan has no room for them
    spawned -> up    `PartSpec.start` has returned
    any -> none      a process crashed, hung, or was ended on purpose; the others of the part end with it

A crash is counted once, before another process starts (`tests/workers/test_keeper.py`).
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from laminar_py.runtime.cluster.calls import ActorClass
from laminar_py.runtime.cluster.errors import PartCrashedError, RunFailedError, for_memory
from laminar_py.runtime.cluster.part import MakePart, Part
from laminar_py.runtime.cluster.placement import Place
from laminar_py.runtime.workers.incarnation import Incarnation

T = TypeVar("T")
RETRY_S = 2.0  # after a first failed start; it grows with each failure
MAX_PATIENCE = 15  # times `RETRY_S`, at most
STARVED = 2  # crashes for want of memory after which the run ends


async def back_off(failures: int) -> None:
    """Wait after `failures` failed starts in a row."""
    await asyncio.sleep(RETRY_S * min(failures, MAX_PATIENCE))


async def count_every_crash(error: PartCrashedError) -> PartCrashedError | None:
    """Return the crash: it is counted, and there is nothing to clean up."""
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """Describes a part: its processes, and what its owner does when they start and crash."""

    names: Sequence[str]  # of its processes, which start and end together, e.g. the ranks of a learner
    actor_class: ActorClass  # of the object that each process hosts
    concurrency: int
    timeout_s: float  # of a call
    places: Callable[[], Sequence[Place | None]]  # of each process by the plan in force; None without room
    start: Callable[[Sequence[Part]], Awaitable[None]]  # loads the part in its processes
    settle: Callable[[PartCrashedError], Awaitable[PartCrashedError | None]] = count_every_crash
    """Cleans up after a crashed part; returns the crash to count, or None for a crash that does not count."""
    rest: Callable[[int], Awaitable[None]] = back_off  # between a crash and the next process
    first_starts: int | None = None  # that may fail before the run does; the supervisor counts later ones
    on_record: bool = True  # whether its starts are events in the ledger
    make: MakePart | None = None  # makes the processes in place of `Part`
    spares_memory: str = ""
    """Advice for a message: which settings need less memory. A part with advice may run out of memory once."""
    forgives_s: float = math.inf  # after so long up, earlier crashes for want of memory are forgotten


class Keeper:
    """Keeps the processes of one part alive, e.g. `await Keeper(spec, incarnation).bring_up()`."""

    def __init__(self, spec: PartSpec, incarnation: Incarnation) -> None:
        self.parts: Sequence[Part] = ()
        self.is_up = False
        self._spec = spec
        self._supervisor = incarnation.supervisor
        self._placement = incarnation.placement
        self._served = False
        self._failures = 0  # starts in a row
        self._starved = 0  # crashes for want of memory that count
        self._up_s = 0.0  # when it came up

    def spawn(self) -> bool:
        """Start the processes if there are none and the plan has room; return True if there are processes."""
        if not self.parts:
            spec = self._spec
            places = [place for place in spec.places() if place is not None]
            if len(places) == len(spec.names):
                make = spec.make or Part
                self.parts = [
                    make(
                        name, spec.actor_class, concurrency=spec.concurrency, timeout_s=spec.timeout_s, place=place
                    )
                    for name, place in zip(spec.names, places, strict=True)
                ]
        return bool(self.parts)

    async def begin(self) -> Sequence[Part]:
        """Start the part as soon as there is room, and return its processes. Raises PartCrashedError."""
        while not self.spawn():
            await asyncio.sleep(RETRY_S)
            await self._placement.refresh(age_s=RETRY_S)
        if not self.is_up:
            await self._spec.start(self.parts)
            pids = await asyncio.gather(*(part.call("pid") for part in self.parts))
            self.is_up, self._served, self._failures = True, True, 0
            self._up_s = asyncio.get_running_loop().time()
            for part, pid in zip(self.parts, pids, strict=True):
                assert isinstance(pid, int)
                if self._spec.on_record:
                    self._supervisor.started(part.name, pid)
        return self.parts

    async def bring_up(self) -> Sequence[Part]:
        """Start the part, again if processes crash meanwhile; return them. Raises RunFailedError, ConfigError."""

        async def give(parts: Sequence[Part]) -> Sequence[Part]:
            return parts

        return await self.call_with_restarts(give)

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
        """End the processes, clean up, count the crash, and wait. Raises RunFailedError if there were too many."""
        self.kill()
        self._failures += not self.is_up
        if self.is_up and asyncio.get_running_loop().time() - self._up_s >= self._spec.forgives_s:
            self._starved = 0
        self.parts, self.is_up = (), False
        crash = await self._spec.settle(error)
        if crash is not None:
            self._supervisor.crashed(crash)
            self._end_if_starved(crash)
            if self._failures == self._spec.first_starts and not self._served:
                raise RunFailedError(f"{crash.part} does not start: {crash.reason}; see logs/{crash.part}.log")
        await self._placement.refresh()
        await self._spec.rest(self._failures)
        await self._placement.refresh()  # a node may have gone meanwhile

    def _end_if_starved(self, crash: PartCrashedError) -> None:
        if self._spec.spares_memory and for_memory(crash.reason):
            self._starved += 1
            if self._starved == STARVED:
                raise RunFailedError(
                    f"{crash.part} ran out of memory twice, last: {crash.reason}; {self._spec.spares_memory}, and"
                    f" --resume; see logs/{crash.part}.log"
                )

    def kill(self) -> None:
        """End all processes; `call_with_restarts` notices it like any other crash."""
        for part in self.parts:
            part.kill()
