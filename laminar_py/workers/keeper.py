"""Keeping a part of a run: its processes are spawned, started, watched, replaced, counted and ended here.

Every kind of part has an owner beside this module (replicas, relays, scorers, learner, reference, trackers) that
says what is special about it in a `Kept`. State of a part, changed by its `Keeper` alone:

    none -> spawned  processes run; there is none while the plan has no room for them
    spawned -> up    what runs in them has started
    any -> none      a process died, hung, or was ended on purpose; the others of the part end with it

Invariant: a death is counted once, before there is a process in the place of the dead one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from laminar_py.cluster.errors import PartDiedError, RunFailedError
from laminar_py.cluster.part import Part
from laminar_py.cluster.placement import Place
from laminar_py.workers.site import Site
from laminar_py.workers.supervisor import Supervisor

RETRY_S = 2.0  # after a start that failed; the longer, the more often it did
MAX_PATIENCE = 15  # times that


async def back_off(failures: int) -> None:
    """Wait after so many starts in a row that failed."""
    await asyncio.sleep(RETRY_S * min(failures, MAX_PATIENCE))


async def until_cancelled(parts: Sequence[Part]) -> None:
    """Watch of a part whose death shows at its calls."""
    await asyncio.Event().wait()


async def every_death_counts(error: PartDiedError) -> PartDiedError | None:
    """Settle nothing."""
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Description of a part: what its processes are, and what is done at each turn of their life."""

    names: Sequence[str]  # of its processes, which live and die together, e.g. the ranks of a learner
    actor: type
    concurrency: int
    timeout_s: float  # of a call
    places: Callable[[], Sequence[Place] | None]  # of each process by the plan in force; None without room
    start: Callable[[Sequence[Part]], Awaitable[Sequence[int]]]  # what runs in them; their process ids
    watch: Callable[[Sequence[Part]], Awaitable[None]] = until_cancelled  # ends by PartDiedError alone
    lost: Callable[[PartDiedError], Awaitable[PartDiedError | None]] = every_death_counts
    """Settles what it had; the death to count, None where it was ended on purpose."""
    rest: Callable[[int], Awaitable[None]] = back_off  # between a death and the next process
    first_starts: int | None = None  # that may fail before the run does; the supervisor counts later ones


class Keeper:
    """Keeps one part, e.g. `await Keeper(kept, site).keep()`; a `supervisor` of its own counts apart."""

    def __init__(self, kept: Kept, site: Site, *, supervisor: Supervisor | None = None) -> None:
        self.parts: Sequence[Part] = ()
        self.is_up = False
        self._kept = kept
        self._supervisor = supervisor or site.supervisor
        self._placement = site.placement
        self._served = False
        self._failures = 0  # starts in a row

    def spawn(self) -> bool:
        """Start the processes, if there are none and there is room; True if there are some."""
        places = None if self.parts else self._kept.places()
        if places is not None:
            kept = self._kept
            self.parts = [
                Part(name, kept.actor, concurrency=kept.concurrency, timeout_s=kept.timeout_s, place=place)
                for name, place in zip(kept.names, places, strict=True)
            ]
        return bool(self.parts)

    async def begin(self) -> Sequence[Part]:
        """The processes, started, as soon as there is room for them. Raises PartDiedError if one dies over it."""
        while not self.spawn():
            await asyncio.sleep(RETRY_S)
            self._placement.refresh()
        if not self.is_up:
            pids = await self._kept.start(self.parts)
            self.is_up, self._served, self._failures = True, True, 0
            for part, pid in zip(self.parts, pids, strict=True):
                self._supervisor.started(part.name, pid)
        return self.parts

    async def up(self) -> Sequence[Part]:
        """The processes, started; others as often as they die over it. Raises RunFailedError, ConfigError."""
        while True:
            try:
                return await self.begin()
            except PartDiedError as error:
                await self.lost(error)

    async def keep(self) -> None:
        """Have the part up and watched until cancelled. Raises as `up` does."""
        while True:
            parts = await self.up()
            try:
                await self._kept.watch(parts)
            except PartDiedError as error:
                await self.lost(error)

    async def lost(self, error: PartDiedError) -> None:
        """End what is left, count the death, rest. Raises RunFailedError if that was one too many."""
        self.kill()
        self._failures += not self.is_up
        self.parts, self.is_up = (), False
        death = await self._kept.lost(error)
        if death is not None:
            self._supervisor.died(death)
            if self._failures == self._kept.first_starts and not self._served:
                raise RunFailedError(f"{death.part} does not start: {death.reason}; see logs/{death.part}.log")
        self._placement.refresh()
        await self._kept.rest(self._failures)
        self._placement.refresh()  # a node may have gone meanwhile

    def kill(self) -> None:
        """End all processes; their keeper notices like any other death."""
        for part in self.parts:
            part.kill()
