"""Ready groups between scoring and the learner: `Buffer` orders them, `StagedGroups` packs the next step early.

`control/consumption.py` owns both. Groups are read oldest version first, and groups of one version in the order in
which they became ready. That delivers every length that was generated; short responses only come sooner.
`choose_groups` picks the groups of a step that fill its microbatches; `PackQueue` is the queue of the reference
stage.
"""

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from laminar_py.learner.packing.balance import Bin, Entry, fit_bins, make_entry
from laminar_py.records.trajectory import TrajectoryRef

CATCH_UP = 4  # groups staged at each arrival, while fewer than a step are: so no call takes long
LOOSE_BINS = 32  # loose sequences are packed when they could fill so many bins: choice enough, and little is left
FULL_SHARE = 512  # a bin is full when it lacks less than 1 / FULL_SHARE of its tokens
UNFILLED_SHARE = 0.04  # of ranks * max_tokens, that packing leaves empty in any step
MIN_GAIN = 0.005  # share of a step's microbatches that an exchange of groups must fill


@dataclass(order=True, slots=True, kw_only=True)
class ReadyGroup:
    """A complete group; without members it is a group without signal, which still takes its place in a step."""

    oldest_version: int
    arrival: int
    group_id: str = field(compare=False)
    members: list[TrajectoryRef] = field(compare=False, default_factory=list)
    silent_tokens: tuple[int, ...] = field(
        compare=False, default=()
    )  # trained tokens of each member without signal
    passes: int = field(compare=False, default=0)  # how often a step took a later group in its place

    @property
    def num_tokens(self) -> int:
        """Tokens of prompts and responses."""
        return sum(trajectory.num_tokens for trajectory in self.members)


class Buffer:
    """Ready groups in order, oldest version first; one Condition guards them.

    Admission (`control.settings.Admission`) bounds its depth: a group counts as live from its issue to the commit
    of its step. So adding a group never waits, and can neither drop nor deadlock.
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
        silent_tokens: tuple[int, ...] = (),
    ) -> int:
        """Add a complete group; returns its place."""
        self._num_arrivals += 1
        return await self.put_back(
            ReadyGroup(
                oldest_version=oldest_version,
                arrival=self._num_arrivals,
                group_id=group_id,
                members=members,
                silent_tokens=silent_tokens,
            )
        )

    async def put_back(self, group: ReadyGroup) -> int:
        """Return a group whose step failed to the buffer; returns its place, which is the one it had."""
        async with self._changed:  # held across no wait, so nothing else runs before the place is used
            place = bisect_left(self._groups, group)
            self._groups.insert(place, group)
            self._changed.notify_all()
        return place

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds; it is checked at each change here and at each `wake`."""
        async with self._changed:
            await self._changed.wait_for(condition)

    async def wake(self) -> None:
        """Have waiting conditions checked again."""
        async with self._changed:
            self._changed.notify_all()

    def first(self, count: int) -> list[ReadyGroup]:
        """The oldest groups, at most `count`."""
        return self._groups[:count]

    def remove_groups(self, groups: Collection[ReadyGroup]) -> None:
        """Remove these groups."""
        gone = {group.group_id for group in groups}
        self._groups = [group for group in self._groups if group.group_id not in gone]


# ---- the next step, packed as its groups become ready


class StreamPacker:
    """Bins of the next learner step, kept while its sequences come and go, microseconds for each.

    Each sequence here is in exactly one full bin, or loose. Whenever enough is loose it is packed, and the bins
    that came out full are kept. So when the learner asks, little is left to pack, however large the step
    (`tests/packing/test_buffer.py`).
    """

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.clear()

    def __len__(self) -> int:
        return len(self._loose) + len(self._bin_of)

    def clear(self) -> None:
        """Remove all sequences."""
        self._full: dict[Bin[TrajectoryRef], None] = {}
        self._bin_of: dict[str, Bin[TrajectoryRef]] = {}  # by id, of sequences in full bins
        self._loose: dict[str, Entry[TrajectoryRef]] = {}  # by id
        self._loose_tokens = 0
        self._pack_at = LOOSE_BINS * self._max_tokens  # loose tokens

    def add(self, trajectory: TrajectoryRef) -> None:
        """Add a sequence. Raises ValueError if it is longer than `max_tokens`."""
        id, entry = trajectory.id, make_entry(trajectory)
        if entry.num_tokens > self._max_tokens:
            raise ValueError(f"{id} has {entry.num_tokens} tokens, packer.max_tokens={self._max_tokens}; raise it")
        assert (self._loose.get(id) or self._bin_of.get(id)) is None, f"{id} is packed twice"
        self._loosen(entry)
        if self._loose_tokens >= self._pack_at:
            self._keep_full_bins()

    def remove(self, id: str) -> None:
        """Remove a sequence; the others of its bin become loose."""
        shared = self._bin_of.get(id)
        if shared is not None:
            del self._full[shared]
            for entry in shared.entries:
                del self._bin_of[entry.trajectory.id]
                self._loosen(entry)
        self._loose_tokens -= self._loose.pop(id).num_tokens

    def bins(self) -> list[Bin[TrajectoryRef]]:
        """Bins of all sequences."""
        return [*self._full, *self._pack_loose()]

    def _loosen(self, entry: Entry[TrajectoryRef]) -> None:
        self._loose[entry.trajectory.id] = entry
        self._loose_tokens += entry.num_tokens

    def _pack_loose(self) -> list[Bin[TrajectoryRef]]:
        return fit_bins(list(self._loose.values()), max_tokens=self._max_tokens)

    def _keep_full_bins(self) -> None:
        """Pack the loose sequences, and keep the bins that are nearly full; other sequences stay loose."""
        for packed in self._pack_loose():
            if (self._max_tokens - packed.num_tokens) * FULL_SHARE < self._max_tokens:
                self._full[packed] = None
                for entry in packed.entries:
                    self._bin_of[entry.trajectory.id] = packed
                    del self._loose[entry.trajectory.id]
                self._loose_tokens -= packed.num_tokens
        # Doubled, so that sequences which fill no bin (all longer than half) are not packed again at each arrival.
        self._pack_at = max(LOOSE_BINS * self._max_tokens, 2 * self._loose_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How steps are packed: `groups` groups each, microbatches of `max_tokens` on each of `ranks`.

    A step may take groups out of the next `groups + look_ahead` if they fit better; it passes over the same group
    at most `max_passes` times. With `by_id` a step is packed in the order of its groups' ids and only when it is
    complete, so that its bins do not depend on which group was ready first.
    """

    groups: int
    max_tokens: int
    ranks: int = 1
    look_ahead: int = 0
    max_passes: int = 2
    by_id: bool = False


class StagedGroups:
    """The first `num_staged` groups of the buffer, in a packer.

    The packer holds exactly their trajectories, so staging never changes what a step gets: an older group takes
    the place of the youngest (`tests/packing/test_buffer.py`). `control/consumption.py` reports each change of the
    buffer.
    """

    def __init__(self, buffer: Buffer, packing: Packing) -> None:
        self.num_staged = 0
        self._buffer = buffer
        self._size = 0 if packing.by_id else packing.groups
        self._packer = StreamPacker(max_tokens=packing.max_tokens)

    def group_arrived(self, place: int) -> None:
        """Stage a group that has come in at this place of the buffer, if it is among the first."""
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

    def group_shrunk(self, place: int, dropped: Iterable[TrajectoryRef], *, gone: bool) -> None:
        """Remove members that the group at this place has lost; `gone` says that the group left the buffer."""
        if place < self.num_staged:
            self._remove(dropped)
            self.num_staged -= gone

    def pack_groups(self, chosen: Collection[ReadyGroup]) -> list[Bin[TrajectoryRef]]:
        """Bins of exactly these groups, which the caller then removes from the buffer; nothing stays staged."""
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

    def _remove(self, members: Iterable[TrajectoryRef]) -> None:
        for trajectory in members:
            self._packer.remove(trajectory.id)


# ---- look-ahead


def choose_groups(tokens: Sequence[int], *, due: Sequence[bool], count: int, unit: int) -> list[int]:
    """Choose the `count` groups of a step from a window, so that it fills its microbatches; indices, ascending.

    All ranks get equally many microbatches, so a step costs whole multiples of `unit`, which is ranks *
    max_tokens. The window holds the tokens of at least `count` groups, in staleness order. No later group takes
    the place of a `due` group. Groups are exchanged for later ones a pair at a time, each time the best pair,
    as long as that wastes less. E.g. `choose_groups([60, 50, 35], due=[False] * 3, count=2, unit=100)` is `[0,
    2]`.
    """
    assert len(tokens) == len(due) >= count, f"{count} groups out of {len(tokens)}, {len(due)}"
    taken = list(range(count))
    # A group behind a due group may not take its place, so the window ends with the first due group beyond the
    # step.
    reach = next((index + 1 for index in range(count, len(due)) if due[index]), len(due))
    left = list(range(count, reach))
    sizes = np.array(tokens, np.int64)
    for _ in range(len(left)):
        leaving = np.array([index for index in taken if not due[index]], np.int64)
        if not leaving.size:
            break
        now = sizes[taken].sum(keepdims=True)
        totals = now - sizes[leaving][:, None] + sizes[left][None, :]
        allowed = leaving[:, None] < np.array(left)[None, :]
        wastes = np.where(allowed, _waste(totals, unit), 1.0)
        out, into = divmod(int(wastes.argmin()), len(left))
        if wastes[out, into] > _waste(now, unit)[0] - MIN_GAIN:
            break
        taken.remove(int(leaving[out]))
        taken.append(left[into])
        left[into] = int(leaving[out])
    return sorted(taken)


def _waste(totals: npt.NDArray[np.int64], unit: int) -> npt.NDArray[np.float64]:
    """Share of a step's microbatches that stays empty, for steps of so many tokens."""
    filled = totals / unit
    wasted: npt.NDArray[np.float64] = 1 - filled / np.ceil(filled + UNFILLED_SHARE)
    return wasted


# ---- the queue of the reference stage


class PackQueue:
    """Finished trajectories that wait for the reference model, first come, first served.

    `workers.reference` adds them one by one and takes as many as wait and fit into one forward pass.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        # Bounded by the trajectories that finish during one pass of the model, so adding never waits.
        self._waiting: deque[TrajectoryRef] = deque()
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def add_trajectory(self, trajectory: TrajectoryRef) -> None:
        """Queue a trajectory."""
        self._waiting.append(trajectory)
        self._filled.set()

    async def next_batch(self, *, wanted: Callable[[str], bool]) -> list[TrajectoryRef]:
        """Wait for trajectories whose ids are still `wanted`; returns one, or more of `max_tokens` together."""
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
