"""Cores that the processes of a simulated run share, where engines and learner compute on CPUs.

Owned by `simulate.run`; a model of Linux's scheduler on one host. A busy process gets at most one core, and what
is there is divided by weight: replicas are niced below the learner and all else that a run has. Invariant: what
busy processes get adds up to the cores, or to one for each of them.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from laminar_py.engines.emulated import EmulatedEngine

FIRST, NICED = 1024.0, 110.0  # weights of niceness 0 and 10
ROUNDING_S = 1e-9


def shares(weights: Sequence[float], cores: float) -> list[float]:
    """Cores of each busy process, at most one; those that are heavier have theirs first."""
    given, left, total = [0.0] * len(weights), cores, sum(weights)
    for index in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        given[index] = min(1.0, left * weights[index] / total)
        left, total = left - given[index], total - weights[index]
    return given


@dataclass(slots=True, eq=False)
class CpuWork:
    """Work of a process of full weight, and what is left of it."""

    left_s: float


class SharedCores:
    """Cores for engines, the learner and the rest, e.g. `SharedCores(2)`; `SharedCores(None)` has one for each."""

    def __init__(self, cores: float | None) -> None:
        self._cores = cores
        self._loop = asyncio.get_running_loop()
        self._engines: list[EmulatedEngine] = []
        self._works: list[CpuWork] = []
        self._share, self._since_s = 1.0, self._loop.time()  # of each piece of work
        self._shared = asyncio.Event()  # set when shares change, and then another
        self._owed_s = 0.0
        self._owes = asyncio.Event()

    def add(self, engine: EmulatedEngine) -> None:
        """Let an engine have its share from now on."""
        if self._cores is not None:
            self._engines.append(engine)

    def remove(self, engine: EmulatedEngine) -> None:
        """Let the others have the share of an engine that has died."""
        if engine in self._engines:
            self._engines.remove(engine)
            self.share_out()

    async def run(self) -> None:
        """Do what `spend` asks, in one process, until cancelled."""
        while True:
            await self._owes.wait()
            seconds, self._owed_s = self._owed_s, 0.0
            self._owes.clear()
            await self.compute(seconds)

    def spend(self, seconds: float) -> None:
        """Have the rest of the run, which is neither engine nor learner, compute for so long."""
        if self._cores is not None and seconds > 0:
            self._owed_s += seconds
            self._owes.set()

    async def compute(self, seconds: float) -> None:
        """Return once a process of full weight has had so many CPU seconds."""
        if self._cores is None:
            await asyncio.sleep(seconds)
            return
        self._account()  # of the others; it begins now
        work = CpuWork(seconds)
        self._works.append(work)
        self.share_out()
        while work.left_s > ROUNDING_S:
            try:
                async with asyncio.timeout(work.left_s / self._share):
                    await self._shared.wait()
            except TimeoutError:
                self._account()
        self._works.remove(work)
        self.share_out()

    def share_out(self) -> None:
        """Divide the cores anew among all that are busy now."""
        if self._cores is None:
            return
        self._account()
        busy = [engine for engine in self._engines if engine.busy]
        given = shares([FIRST] * len(self._works) + [NICED] * len(busy), self._cores)
        self._share = given[0] if self._works else 1.0
        for engine, share in zip(busy, given[len(self._works) :], strict=True):
            engine.pace(share)
        self._shared.set()
        self._shared = asyncio.Event()

    def _account(self) -> None:
        """Count what was done at the present shares."""
        now = self._loop.time()
        for work in self._works:
            work.left_s -= (now - self._since_s) * self._share
        self._since_s = now
