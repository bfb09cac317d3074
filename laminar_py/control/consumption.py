"""The learner's end: batches out of the buffer, commits, and undoing them. Owned by `control.flow`.

Invariant: a trajectory is consumed when its step is committed, not when it is handed out; until a checkpoint
holds that step the consumption can be undone.
"""

import asyncio
from dataclasses import dataclass, field

from laminar_py.control.book import Book
from laminar_py.control.groups import Group
from laminar_py.control.lifecycle import Lifecycle
from laminar_py.control.staleness import StalenessBound
from laminar_py.store.buffer import Buffer, ReadyGroup
from laminar_py.types import DropReason, Status, Trajectory


@dataclass(slots=True)
class Batch:
    """What one learner step consumes: groups taken from the buffer, and their trajectories with weights."""

    version: int  # the learner's when the batch was taken
    groups: list[ReadyGroup] = field(default_factory=list)
    trajectories: list[Trajectory] = field(default_factory=list)


class Consumption:
    """The buffer of ready groups and what was taken out of it since the last checkpoint."""

    def __init__(self, book: Book, bound: StalenessBound) -> None:
        self.buffer = Buffer()
        self._book = book
        self._bound = bound
        self._undoable: list[tuple[int, Lifecycle]] = []  # (step, trajectory); bounded by the checkpoint interval

    async def put(self, group: Group) -> None:
        """A group with its advantages: the learner may have it."""
        members = [m.trajectory() for m in group.members.values() if m.status is Status.READY]
        oldest = min(member.oldest_version for member in members)
        await self.buffer.put(group.id, members, oldest_version=oldest)

    async def put_placeholder(self, group_id: str, *, oldest_version: int) -> None:
        """A group without signal: it fills its place in a step, empty."""
        await self.buffer.put(group_id, [], oldest_version=oldest_version)

    async def next_batch(self, *, groups: int, version: int) -> Batch:
        """The next `groups` groups for a learner at `version`, the staleness bound enforced."""
        batch = Batch(version)
        try:
            while len(batch.groups) < groups:
                for group in await self.buffer.take(groups - len(batch.groups)):
                    self._add(batch, group)
        except asyncio.CancelledError:
            await self.put_back(batch)
            raise
        return batch

    def _add(self, batch: Batch, group: ReadyGroup) -> None:
        if not group.members:
            batch.groups.append(group)
            return
        weights = {t.id: self._bound.weight(t, batch.version) for t in group.members}
        for trajectory in group.members:
            if weights[trajectory.id] is None:
                staleness = trajectory.staleness(batch.version)
                self._book.drop([self._book.live[trajectory.id]], DropReason.STALE, f"staleness {staleness}")
        group.members = [t for t in group.members if weights[t.id] is not None]
        if not group.members:
            del self._book.groups[group.group_id]
            return
        batch.groups.append(group)
        for trajectory in group.members:
            weight = weights[trajectory.id]
            assert weight is not None, f"{trajectory.id} is stale"
            batch.trajectories.append(self._book.live[trajectory.id].trajectory(weight=weight))

    async def put_back(self, batch: Batch) -> None:
        """The batch was not trained on: its groups are ready again."""
        for group in batch.groups:
            await self.buffer.put_back(group)

    def commit(self, batch: Batch, step: int) -> None:
        """The step is done: its trajectories are consumed, its groups no longer live."""
        for trajectory in batch.trajectories:
            lifecycle = self._book.live.pop(trajectory.id)
            event = lifecycle.consume(step=step, version=batch.version, weight=trajectory.weight)
            self._book.record(event)
            self._undoable.append((step, lifecycle))
        for group in batch.groups:
            del self._book.groups[group.group_id]

    def checkpointed(self, step: int) -> None:
        """Steps up to `step` are on disk: they can no longer be undone."""
        self._undoable = [entry for entry in self._undoable if entry[0] > step]

    async def roll_back(self) -> int:
        """Undo every consumption since the last checkpoint; how many trajectories are ready again."""
        undone, self._undoable = self._undoable, []
        groups: dict[str, Group] = {}
        for step, lifecycle in undone:
            self._book.record(lifecycle.undo(step))
            self._book.live[lifecycle.id] = lifecycle
            group = groups.setdefault(lifecycle.group_id, Group(lifecycle.group_id, lifecycle.prompt))
            group.members[lifecycle.id] = lifecycle
        self._book.groups.update(groups)
        for group in groups.values():
            await self.put(group)
        return len(undone)
