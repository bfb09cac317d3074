"""Ready groups between scoring and the learner. Owned by `control.consumption`; one Condition guards it.

Its depth is bounded by admission (`control.settings.Admission`): a group counts as live from its issue to the
commit of its step, so `put` never has to wait and can neither drop nor deadlock. It is read oldest version
first; groups of one version in the order in which they became ready, which delivers every length that was
generated, short ones only sooner.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from laminar_py.records.finished import FinishedTrajectory


@dataclass(order=True, slots=True, kw_only=True)
class ReadyGroup:
    """A complete group; without members it stands for a group without signal, which fills its place in a step."""

    oldest_version: int
    arrival: int
    group_id: str = field(compare=False)
    members: list[FinishedTrajectory] = field(compare=False, default_factory=list)
    silent_tokens: tuple[int, ...] = field(compare=False, default=())  # trained tokens of each, without signal
    passes: int = field(compare=False, default=0)  # later groups were taken in its place so often

    @property
    def num_tokens(self) -> int:
        """Prompts and responses."""
        return sum(trajectory.num_tokens for trajectory in self.members)


class Buffer:
    """Ready groups in order, oldest version first."""

    def __init__(self) -> None:
        self._groups: list[ReadyGroup] = []
        self._changed = asyncio.Condition()
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, place: int) -> ReadyGroup:
        return self._groups[place]

    async def put(
        self,
        group_id: str,
        members: list[FinishedTrajectory],
        *,
        oldest_version: int,
        silent_tokens: tuple[int, ...] = (),
    ) -> int:
        """Add a complete group; its place."""
        self._arrivals += 1
        return await self.put_back(
            ReadyGroup(
                oldest_version=oldest_version,
                arrival=self._arrivals,
                group_id=group_id,
                members=members,
                silent_tokens=silent_tokens,
            )
        )

    async def put_back(self, group: ReadyGroup) -> int:
        """Return a group whose step failed, to its old place; that place."""
        async with self._changed:  # held across no wait, so nothing else runs before the place is used
            place = bisect_left(self._groups, group)
            self._groups.insert(place, group)
            self._changed.notify_all()
        return place

    async def until(self, condition: Callable[[], bool]) -> None:
        """Until something holds that the groups here decide, or what `wake` is called for."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def wake(self) -> None:
        """Have conditions looked at anew."""
        async with self._changed:
            self._changed.notify_all()

    def first(self, count: int) -> list[ReadyGroup]:
        """The oldest ones, at most `count`."""
        return self._groups[:count]

    def take(self, groups: Collection[ReadyGroup]) -> None:
        """Remove these."""
        gone = {group.group_id for group in groups}
        self._groups = [group for group in self._groups if group.group_id not in gone]
