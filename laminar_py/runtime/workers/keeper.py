"""Keeping a part of a run: its processes are spawned, started, called, replaced, counted and ended here.

Every kind of part has an owner beside this module (replicas, relays, scorers, learner, reference, trackers) that
says what is special about it in a `PartSpec`. State of a part, changed by its `Keeper` alone:

    none -> spawned  processes run; there is none while the plan has no room for them
    spawned -> up    what runs in them has started
    any -> none      a process died, hung, or was ended on purpose; the others of the part end with it

Invariant: a death is counted once, before there is a process in the place of the dead one.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from laminar_py.runtime.cluster.calls import Kind
from laminar_py.runtime.cluster.errors import PartDiedError, RunFailedError, for_memory
from laminar_py.runtime.cluster.part import MakePart, Part
from laminar_py.runtime.cluster.placement import Place
from laminar_py.runtime.workers.incarnation import Incarnation

T = TypeVar("T")
RETRY_S = 2.0  # after a start that failed; the longer, the more often it did
MAX_PATIENCE = 15  # times that
STARVED = 2  # deaths for want of memory, which another start does not mend


async def back_off(failures: int) -> None:
    """Wait after so many starts in a row that failed."""
    await asyncio.sleep(RETRY_S * min(failures, MAX_PATIENCE))


async def count_every_death(error: PartDiedError) -> PartDiedError | None:
    """Settle nothing."""
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """Description of a part: what its processes are, and what is done at each turn of their life."""

    names: Sequence[str]  # of its processes, which live and die together, e.g. the ranks of a learner
    actor: Kind  # that each process hosts
    concurrency: int
    timeout_s: float  # of a call
    places: Callable[[], Sequence[Place | None]]  # of each process by the plan in force; None without room
    start: Callable[[Sequence[Part]], Awaitable[None]]  # what runs in them
    settle: Callable[[PartDiedError], Awaitable[PartDiedError | None]] = count_every_death
    """Settles what a dead part had; the death to count, None for one that is no business of the run's."""
    rest: Callable[[int], Awaitable[None]] = back_off  # between a death and the next process
    first_starts: int | None = None  # that may fail before the run does; the supervisor counts later ones
    on_record: bool = True  # True where its starts are events of the run
    make: MakePart | None = None  # in place of a process of its own
    spares_memory: str = ""
    """Settings to change where memory runs out, which ends the run at the second time; empty: as other deaths."""
    forgives_s: float = math.inf  # that it is up, after which an earlier death for want of memory counts no more


class Keeper:
    """Keeps one part, e.g. `await Keeper(spec, incarnation).up()`."""

    def __init__(self, spec: PartSpec, incarnation: Incarnation) -> None:
        self.parts: Sequence[Part] = ()
        self.is_up = False
        self._spec = spec
        self._supervisor = incarnation.supervisor
        self._placement = incarnation.placement
        self._served = False
        self._failures = 0  # starts in a row
        self._starved = 0  # deaths for want of memory that count
        self._up_s = 0.0  # when it came up
        self._kernel_kills = incarnation.kernel_kills

    def spawn(self) -> bool:
        """Start the processes, if there are none and there is room; True if there are some."""
        if not self.parts:
            spec = self._spec
            places = [place for place in spec.places() if place is not None]
            if len(places) == len(spec.names):
                make = spec.make or Part
                self.parts = [
                    make(name, spec.actor, concurrency=spec.concurrency, timeout_s=spec.timeout_s, place=place)
                    for name, place in zip(spec.names, places, strict=True)
                ]
        return bool(self.parts)

    async def begin(self) -> Sequence[Part]:
        """The processes, started, as soon as there is room for them. Raises PartDiedError if one dies over it."""
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
                await self._kernel_kills.meet(part)
        return self.parts

    async def up(self) -> Sequence[Part]:
        """The processes, started; others as often as they die over it. Raises RunFailedError, ConfigError."""

        async def give(parts: Sequence[Part]) -> Sequence[Part]:
            return parts

        return await self.calling(give)

    async def calling(self, call: Callable[[Sequence[Part]], Awaitable[T]]) -> T:
        """The result of a call on the processes, made again on others as often as they die over it or before it.

        Raises RunFailedError if they die too often, ConfigError if the user has to mend something.
        """
        while True:
            try:
                return await call(await self.begin())
            except PartDiedError as error:
                await self.replace(error)

    async def replace(self, error: PartDiedError) -> None:
        """End what is left, count the death, rest. Raises RunFailedError if that was one too many."""
        self.kill()
        node = next((part.place.node for part in self.parts if part.name == error.part), None)
        self._failures += not self.is_up
        if self.is_up and asyncio.get_running_loop().time() - self._up_s >= self._spec.forgives_s:
            self._starved = 0
        self.parts, self.is_up = (), False
        death = await self._spec.settle(error)
        if death is not None:
            if self._spec.spares_memory:
                death = await self._kernel_kills.explain(death, node)
            self._supervisor.died(death)
            self._end_if_starved(death)
            if self._failures == self._spec.first_starts and not self._served:
                raise RunFailedError(f"{death.part} does not start: {death.reason}; see logs/{death.part}.log")
        await self._placement.refresh()
        await self._spec.rest(self._failures)
        await self._placement.refresh()  # a node may have gone meanwhile

    def _end_if_starved(self, death: PartDiedError) -> None:
        if self._spec.spares_memory and for_memory(death.reason):
            self._starved += 1
            if self._starved == STARVED:
                raise RunFailedError(
                    f"{death.part} ran out of memory twice, last: {death.reason}; {self._spec.spares_memory}, and"
                    f" --resume; see logs/{death.part}.log"
                )

    def kill(self) -> None:
        """End all processes; their keeper notices like any other death."""
        for part in self.parts:
            part.kill()
