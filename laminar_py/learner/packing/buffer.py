"""Ready groups between scoring and the learner, in the order in which steps take them.

`control/consumption.py` owns the `Buffer`. Steps take groups by their oldest version, and groups of one version in
the order in which they became ready. So long responses get into steps as often as short ones, only later.
`PackQueue` is the queue of a frozen model's stage.
"""

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from laminar_py.records.trajectory import TrajectoryRef


@dataclass(order=True, slots=True, kw_only=True)
class ReadyGroup:
    """A complete group. A group without members had no signal; it still counts as one of a step's groups."""

    oldest_version: int  # of all members; then `arrival` decides the order of groups
    arrival: int  # counts the groups that became ready
    group_id: str = field(compare=False)
    members: list[TrajectoryRef] = field(compare=False, default_factory=list)
    # trained tokens of each member that was dropped for lack of signal
    tokens_without_signal: tuple[int, ...] = field(compare=False, default=())


class Buffer:
    """Ready groups in order, oldest version first; one Condition guards them.

    Admission (`control.settings.Admission`) bounds the number of groups: a group counts as live from its issue to
    the commit of its step. So adding a group never waits, and can neither drop a group nor deadlock.
    """

    def __init__(self) -> None:
        self._groups: list[ReadyGroup] = []
        self._changed = asyncio.Condition()
        self._num_arrivals = 0

    def __len__(self) -> int:
        return len(self._groups)

    def __getitem__(self, place: int) -> ReadyGroup:
        return self._groups[place]

    async def add_group(
        self,
        group_id: str,
        members: list[TrajectoryRef],
        *,
        oldest_version: int,
        tokens_without_signal: tuple[int, ...] = (),
    ) -> None:
        """Add a complete group behind other groups of its `oldest_version`, and wake waiters."""
        self._num_arrivals += 1
        await self.put_back(
            ReadyGroup(
                oldest_version=oldest_version,
                arrival=self._num_arrivals,
                group_id=group_id,
                members=members,
                tokens_without_signal=tokens_without_signal,
            )
        )

    async def put_back(self, group: ReadyGroup) -> None:
        """Insert a group at its place in the order, e.g. when its step failed, and wake waiters."""
        async with self._changed:
            insort(self._groups, group)
            self._changed.notify_all()

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds. It is checked now, when a group is added, and at each `wake`."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def wake(self) -> None:
        """Let all calls of `wait_until` check their conditions again."""
        async with self._changed:
            self._changed.notify_all()

    def first(self, count: int) -> list[ReadyGroup]:
        """Return the first groups in order, at most `count`, without removing them."""
        return self._groups[:count]

    def remove_groups(self, groups: Collection[ReadyGroup]) -> None:
        """Remove these groups."""
        removed = {group.group_id for group in groups}
        self._groups = [group for group in self._groups if group.group_id not in removed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How steps are packed: microbatches of `max_tokens`. Longer trees are cut if `cuts`.

    With `by_id` a step is packed in the order of its groups' ids, so that its bins do not depend on the order in
    which groups became ready.
    """

    max_tokens: int
    by_id: bool = False
    cuts: bool = True


# ---- the queue of a stage


class PackQueue:
    """Finished trajectories that wait for a frozen model, first come, first served.

    `workers.learner` adds trajectories one by one, and takes a batch that fits into one forward pass.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        # Bounded by the trajectories that finish during one forward pass, so adding never waits.
        self._waiting: deque[TrajectoryRef] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add_trajectory(self, trajectory: TrajectoryRef) -> None:
        """Queue a trajectory."""
        self._waiting.append(trajectory)
        self._filled.set()

    async def next_batch(self, *, wanted: Callable[[str], bool]) -> list[TrajectoryRef]:
        """Wait for trajectories whose ids are `wanted`; remove and return the first, and more up to `max_tokens`.

        The first may exceed `max_tokens` alone; the model cuts it if it is a tree. Trajectories that are no longer
        wanted are discarded.
        """
        while True:
            await self._filled.wait()
            batch: list[TrajectoryRef] = []
            room = self._max_tokens
            while self._waiting and (not batch or self._waiting[0].num_tokens <= room):
                trajectory = self._waiting.popleft()
                if wanted(trajectory.id):
                    batch.append(trajectory)
                    room -= trajectory.num_tokens
            if not self._waiting:
                self._filled.clear()
            if batch:
                return batch
