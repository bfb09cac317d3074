"""The pool of consumed groups from which steps draw replays. Pure.

`control.consumption` feeds it at each commit and draws from it for each batch. The pool follows from the ledger:
what steps consumed and replayed, without undone steps. So a resume rebuilds it, and a draw depends on it, the
run's seed and the step alone. A group that cannot be replayed keeps its place, and draws pass over it. So a
resumed run, which may find a loss of tokens later, draws the same groups.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from laminar_py.config.replay import ReplayBy, ReplayConfig
from laminar_py.ledger.trajectory import LiveTrajectory
from laminar_py.records.trajectory import TrajectoryRef


@dataclass(slots=True, kw_only=True)
class PooledGroup:
    """A consumed group, e.g. "g3", which step 9 consumed and steps 10 and 12 replayed."""

    id: str
    step: int
    members: list[TrajectoryRef]  # as they were consumed, without the weight of their staleness
    replays: list[int] = field(default_factory=list)  # steps, ascending
    rows: list[LiveTrajectory] = field(default_factory=list)  # held, so that the ledger need not read them again
    usable: bool = True  # False: its tokens are lost, or the config of a resume cannot train on it

    def age(self, age_of: Callable[[int], int]) -> int:
        """Return the staleness of its most stale member; a later version is older if a rollback undid it."""
        return max(age_of(member.oldest_version) for member in self.members)

    @property
    def reward(self) -> float:
        """Mean reward of its members."""
        return sum(member.reward or 0.0 for member in self.members) / len(self.members)


class ReplayPool:
    """The last groups that steps consumed, in order; `wanted` of them are drawn for each step.

    Holds `replay.capacity` groups, and besides the groups that steps since the last checkpoint have added or
    pushed out, since a rollback to that checkpoint brings the earlier pool back.
    """

    def __init__(self, replay: ReplayConfig, *, wanted: int, seed: int) -> None:
        self._replay = replay
        self._wanted = wanted
        self._seed = seed
        self._groups: list[PooledGroup] = []

    @property
    def groups(self) -> list[PooledGroup]:
        """The groups that a step may draw, if they are young enough, in order of consumption."""
        return [group for group in self._last if group.usable]

    def add(self, group: PooledGroup) -> None:
        """Take a group that a step consumed; one without members has nothing to replay."""
        if self._wanted and group.members:
            self._groups.append(group)

    def draw(self, step: int, *, age_of: Callable[[int], int]) -> list[PooledGroup]:
        """Return the groups that `step` replays, at most `wanted`; `age_of` gives a version's age.

        The draw changes nothing: `record` does, once the step is committed.
        """
        young = [group for group in self._last if group.age(age_of) <= self._replay.max_age]
        waits = np.random.default_rng([self._seed, step]).exponential(size=len(young)) / self._weights(young)
        order = [place for place in np.argsort(waits).tolist() if young[place].usable]
        return [young[place] for place in sorted(order[: self._wanted])]

    def record(self, groups: Collection[PooledGroup], step: int) -> None:
        """Note that a committed step replayed these groups."""
        for group in groups:
            group.replays.append(step)

    def checkpointed(self, step: int) -> None:
        """Forget the groups that no step needs that follows the checkpoint of `step`."""
        held = sum(group.step <= step for group in self._groups)
        del self._groups[: max(0, held - self._replay.capacity)]

    def roll_back(self, step: int) -> None:
        """Return to the pool after `step`: later consumptions and replays are undone."""
        self._groups = [group for group in self._groups if group.step <= step]
        for group in self._groups:
            group.replays = [at for at in group.replays if at <= step]

    def drop(self, trajectory_ids: Collection[str]) -> list[str]:
        """Let no step draw the groups of these trajectories; return the ids of the usable ones among them."""
        lost = [group for group in self._groups if any(member.id in trajectory_ids for member in group.members)]
        gone = [group.id for group in lost if group.usable]
        for group in lost:
            group.usable = False
        return gone

    @property
    def _last(self) -> list[PooledGroup]:
        """The last `replay.capacity` groups, usable or not, without the groups that were replayed often enough."""
        last = self._groups[-self._replay.capacity :]
        return [group for group in last if len(group.replays) < self._replay.most]

    def _weights(self, young: list[PooledGroup]) -> npt.NDArray[np.float64]:
        """[N] weights by `buffer.replay.by`: each next group is drawn in proportion to them."""
        keys = [group.reward if self._replay.by is ReplayBy.REWARD else 0.0 for group in young]
        best_first = sorted(range(len(young)), key=lambda place: (-keys[place], -place))
        weights = np.ones(len(young))
        if self._replay.by is not ReplayBy.UNIFORM:
            weights[best_first] = 1.0 / np.arange(1, len(young) + 1)
        return weights
