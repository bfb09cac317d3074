"""CPU cores that the processes of a simulated run share, for engines and learners on CPUs.

Made by `simulate.run`; a model of Linux's scheduler on one host. Busy processes divide the cores by weight, and
each gets at most one core. Replicas have a lower weight than all other processes of a run, as in a real run. The
shares add up to the cores, or to one core for each busy process (`tests/simulate/test_cores.py`).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from laminar_lab.emulation.engine import EmulatedEngine

FIRST, NICED = 1024.0, 110.0  # Linux's weights of niceness 0 and 10
ROUNDING_S = 1e-9


def divide_cores(weights: Sequence[float], cores: float) -> list[float]:
    """Return the cores of each busy process, at most one; heavier processes get their share first."""
    given, left, total = [0.0] * len(weights), cores, sum(weights)
    for index in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        given[index] = min(1.0, left * weights[index] / total)
        left, total = left - given[index], total - weights[index]
    return given


@dataclass(slots=True, eq=False)
class CpuWork:
    """CPU seconds that a process of full weight still needs."""

    left_s: float


class SharedCores:
    """Cores of a run, e.g. `SharedCores(2)`; with `SharedCores(None)` every process has a core."""

    def __init__(self, cores: float | None) -> None:
        self._cores = cores
        self._loop = asyncio.get_running_loop()
        self._engines: list[EmulatedEngine] = []
        self._works: list[CpuWork] = []
        self._share, self._since_s = 1.0, self._loop.time()  # share of each `CpuWork`, and since when
        self._shared = asyncio.Event()  # set, and replaced, when shares change
        self._owed_s = 0.0
        self._owes = asyncio.Event()

    def add_engine(self, engine: EmulatedEngine) -> None:
        """Give an engine a share from now on."""
        if self._cores is not None:
            self._engines.append(engine)

    def remove_engine(self, engine: EmulatedEngine) -> None:
        """Divide the share of a crashed engine among the others."""
        if engine in self._engines:
            self._engines.remove(engine)
            self.share_out()

    async def run(self) -> None:
        """Compute the seconds of `spend` in one process, until cancelled."""
        while True:
            await self._owes.wait()
            seconds, self._owed_s = self._owed_s, 0.0
            self._owes.clear()
            await self.compute(seconds)

    def spend(self, seconds: float) -> None:
        """Let the processes beside engines and learner compute for so many CPU seconds."""
        if self._cores is not None and seconds > 0:
            self._owed_s += seconds
            self._owes.set()

    async def compute(self, seconds: float) -> None:
        """Wait until a process of full weight has had so many CPU seconds."""
        if self._cores is None:
            await asyncio.sleep(seconds)
            return
        self._subtract_done_work()  # before the new work changes the shares
        work = CpuWork(seconds)
        self._works.append(work)
        self.share_out()
        while work.left_s > ROUNDING_S:
            try:
                async with asyncio.timeout(work.left_s / self._share):
                    await self._shared.wait()
            except TimeoutError:
                self._subtract_done_work()
        self._works.remove(work)
        self.share_out()

    def share_out(self) -> None:
        """Divide the cores among all busy processes again."""
        if self._cores is None:
            return
        self._subtract_done_work()
        busy = [engine for engine in self._engines if engine.busy]
        given = divide_cores([FIRST] * len(self._works) + [NICED] * len(busy), self._cores)
        self._share = given[0] if self._works else 1.0
        for engine, share in zip(busy, given[len(self._works) :], strict=True):
            engine.pace(share)
        self._shared.set()
        self._shared = asyncio.Event()

    def _subtract_done_work(self) -> None:
        """Subtract the work done at the present shares."""
        now = self._loop.time()
        for work in self._works:
            work.left_s -= (now - self._since_s) * self._share
        self._since_s = now
