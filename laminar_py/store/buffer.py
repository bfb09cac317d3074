"""Ready groups between scoring and the learner. Owned by `control.flow`; one Condition guards it.

Its depth is bounded by admission (`control.staleness.Admission`): a group counts as live from its issue to the
commit of its step, so `put` never has to wait and can neither drop nor deadlock. It is read oldest version
first; groups of one version in the order in which they became ready, which delivers every length that was
generated, short ones only sooner.
"""

import asyncio
import heapq
from dataclasses import dataclass, field

from laminar_py.types import Trajectory


@dataclass(order=True, slots=True)
class ReadyGroup:
    """A complete group; without members it stands for a group without signal that fills its place in a step."""

    oldest_version: int
    arrival: int
    group_id: str = field(compare=False)
    members: list[Trajectory] = field(compare=False, default_factory=list)


class Buffer:
    """Heap of ready groups, oldest version first."""

    def __init__(self) -> None:
        self._heap: list[ReadyGroup] = []
        self._changed = asyncio.Condition()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._heap)

    async def put(self, group_id: str, members: list[Trajectory], *, oldest_version: int) -> None:
        """Add a complete group."""
        self._arrivals += 1
        await self.put_back(ReadyGroup(oldest_version, self._arrivals, group_id, members))

    async def put_back(self, group: ReadyGroup) -> None:
        """Return a group whose step failed, to its old place."""
        async with self._changed:
            heapq.heappush(self._heap, group)
            self._changed.notify_all()

    async def take(self, count: int) -> list[ReadyGroup]:
        """The `count` oldest groups, once there are so many."""
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._heap) >= count)
            return [heapq.heappop(self._heap) for _ in range(count)]
