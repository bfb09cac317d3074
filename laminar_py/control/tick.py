"""An act that several ask for within a short time, done once for them all. Owned by who carries assignments out.

IDLE -- `wake` --> DUE -- now, or `every_s` after the last act --> acted, IDLE again. Invariant: an act that begins
at most `every_s` after a `wake` sees what was there when that was called.
"""

import asyncio
import math
from collections.abc import Callable

DISPATCH_S = 0.02  # in which reports are answered together; a fifth of what a replica lets its news gather


class Tick:
    """Does `act` when it is due, e.g. `Tick(dispatch, every_s=0.02)`; `run` is its loop."""

    def __init__(self, act: Callable[[], None], *, every_s: float) -> None:
        self._act = act
        self._every_s = every_s
        self._due = asyncio.Event()
        self._last_s = -math.inf  # when the last act began, on the loop's clock

    def wake(self) -> None:
        """Have it done, together with what others ask for meanwhile."""
        self._due.set()

    def at_once(self) -> None:
        """Do it now, for all who have called `wake` as well."""
        self._due.clear()
        self._last_s = asyncio.get_running_loop().time()
        self._act()

    async def run(self) -> None:
        """Act until cancelled."""
        while True:
            await self._due.wait()
            await asyncio.sleep(self._rest_s)  # others may ask meanwhile, or have it done at once
            if self._due.is_set() and not self._rest_s:
                self.at_once()

    @property
    def _rest_s(self) -> float:
        """Seconds until the next act may begin."""
        return max(0.0, self._last_s + self._every_s - asyncio.get_running_loop().time())
