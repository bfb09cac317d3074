"""The groups of the next step, packed as they become ready and before the learner asks.

Owned by `control.consumption`, which tells it every change of the buffer. Invariant: the packer holds exactly the
trajectories of the first `num_staged` groups of the buffer, so staging never changes what the learner gets: an
older group that comes in while others wait takes the place of the youngest, which is ready as before.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from laminar_py.learner.packing.balance import Bin
from laminar_py.learner.packing.buffer import Buffer, ReadyGroup
from laminar_py.learner.packing.stream import StreamPacker
from laminar_py.records.finished import FinishedTrajectory

CATCH_UP = 4  # groups staged with one that comes in, while fewer than a step are: no call takes long


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How steps are packed: `groups` groups each, microbatches of `max_tokens` on each of `ranks`.

    Later ones of the next `groups + look_ahead` may be taken if they fit better, past the same group at most
    `max_passes` times. `by_id`: a step is packed in the order of its groups' ids and only when it is whole, so its
    bins do not depend on which group was ready first.
    """

    groups: int
    max_tokens: int
    ranks: int = 1
    look_ahead: int = 0
    max_passes: int = 2
    by_id: bool = False


class StagedGroups:
    """The first groups of the buffer, in a packer."""

    def __init__(self, buffer: Buffer, packing: Packing) -> None:
        self.num_staged = 0
        self._buffer = buffer
        self._size = 0 if packing.by_id else packing.groups
        self._packer = StreamPacker(max_tokens=packing.max_tokens)

    def arrived(self, place: int) -> None:
        """A group has come in at this place of the buffer."""
        if place < self.num_staged:
            self._add(self._buffer[place])
            self.num_staged += 1
            if self.num_staged > self._size:
                self.num_staged -= 1
                self._remove(self._buffer[self.num_staged].members)
        for _ in range(CATCH_UP):
            if self.num_staged == min(self._size, len(self._buffer)):
                break
            self._add(self._buffer[self.num_staged])
            self.num_staged += 1

    def shrunk(self, place: int, dropped: Iterable[FinishedTrajectory], *, gone: bool) -> None:
        """The group at this place has lost these members, and with them its place if it is `gone`."""
        if place < self.num_staged:
            self._remove(dropped)
            self.num_staged -= gone

    def settle(self, chosen: Collection[ReadyGroup]) -> list[Bin[FinishedTrajectory]]:
        """Bins of exactly these groups, which leave the buffer after this; then nothing is staged."""
        staged = self._buffer.first(self.num_staged)
        wanted, here = ({group.group_id for group in groups} for groups in (chosen, staged))
        for group in staged:
            if group.group_id not in wanted:
                self._remove(group.members)
        for group in chosen:
            if group.group_id not in here:
                self._add(group)
        bins = self._packer.bins()
        self._packer.clear()
        self.num_staged = 0
        return bins

    def _add(self, group: ReadyGroup) -> None:
        for trajectory in group.members:
            self._packer.add(trajectory)

    def _remove(self, members: Iterable[FinishedTrajectory]) -> None:
        for trajectory in members:
            self._packer.remove(trajectory.id)
