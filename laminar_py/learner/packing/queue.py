"""Finished trajectories that wait for a forward pass of their own. Owned by `workers.learner`.

Invariant: what is taken together is at most `max_tokens` long, or one trajectory; first come, first served.
"""

import asyncio
from collections import deque
from collections.abc import Callable

from laminar_py.records.finished import FinishedTrajectory


class PackQueue:
    """Takes trajectories one by one and gives as many as wait and fit: one alone, where nothing has gathered."""

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        # At most what is generated during one pass of the model, live or dropped meanwhile, so `put` never waits.
        self._waiting: deque[FinishedTrajectory] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, trajectory: FinishedTrajectory) -> None:
        """Have a trajectory wait."""
        self._waiting.append(trajectory)
        self._filled.set()

    async def take(self, *, wanted: Callable[[str], bool]) -> list[FinishedTrajectory]:
        """The next ones, one at least; of those that nobody has dropped meanwhile."""
        while True:
            await self._filled.wait()
            taken: list[FinishedTrajectory] = []
            room = self._max_tokens
            while self._waiting and (not taken or self._waiting[0].num_tokens <= room):
                trajectory = self._waiting.popleft()
                if wanted(trajectory.id):
                    taken.append(trajectory)
                    room -= trajectory.num_tokens
            if not self._waiting:
                self._filled.clear()
            if taken:
                return taken
