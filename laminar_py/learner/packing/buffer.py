"""Ready groups between scoring and the learner, in the order in which steps take them.

`control/consumption.py` owns the `Buffer`. Groups are read oldest version first, and groups of one version in the
order in which they became ready. That delivers every length that was generated; short responses only come sooner.
`choose_groups` picks the groups of a step that fill its microbatches; `PackQueue` is the queue of the reference
stage.
"""

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from laminar_py.records.trajectory import TrajectoryRef

UNFILLED_SHARE = 0.04  # of ranks * max_tokens, that packing leaves empty in any step
MIN_GAIN = 0.005  # share of a step's microbatches that an exchange of groups must fill


@dataclass(order=True, slots=True, kw_only=True)
class ReadyGroup:
    """A complete group; without members it is a group without signal, which still takes its place in a step."""

    oldest_version: int
    arrival: int
    group_id: str = field(compare=False)
    members: list[TrajectoryRef] = field(compare=False, default_factory=list)
    tokens_without_signal: tuple[int, ...] = field(
        compare=False, default=()
    )  # trained tokens of each dropped member
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
        tokens_without_signal: tuple[int, ...] = (),
    ) -> None:
        """Add a complete group."""
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
        """Return a group whose step failed to the place that it had."""
        async with self._changed:
            insort(self._groups, group)
            self._changed.notify_all()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How steps are packed: microbatches of `max_tokens` on each of `ranks`.

    A step may take groups out of the next `look_ahead` beyond its own if they fit better; it passes over the same
    group at most `max_passes` times. With `by_id` a step is packed in the order of its groups' ids, so that its
    bins do not depend on which group was ready first.
    """

    max_tokens: int
    ranks: int = 1
    look_ahead: int = 0
    max_passes: int = 2
    by_id: bool = False


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
