"""Staleness: learner steps between the learner's weights and those of a version. Pure.

`control` follows the run with it, `ledger.recovery` a log that ends, `audit` a whole one. A step counts if it had
trajectories, since others leave the weights as they are. However often the learner publishes, and whatever numbers
its versions have, weights that are equal have age 0.
"""

from bisect import bisect_right

from laminar_py.records.events import AnyEvent, RolledBack, Stepped, VersionPublished


class WeightAges:
    """Ages of versions, e.g. 3 for one that was published three steps ago.

    A learner that goes back to a checkpoint leaves a branch: weights that were made on it differ from its own by
    the steps that were undone, and by those since.
    """

    def __init__(self) -> None:
        self._learned = [0]  # by step: how many up to it changed the weights
        self._versions: list[int] = []  # ascending
        self._made: dict[int, int] = {}  # by version: how many steps made it
        self._shared: dict[int, int] = {}  # and how many of these are the learner's own

    def stepped(self, *, learned: bool) -> None:
        """Take in a step; `learned` is False for one that had no trajectories."""
        self._learned.append(self._learned[-1] + learned)

    def rolled_back(self, step: int) -> None:
        """Take in that steps after this one are undone."""
        del self._learned[step + 1 :]
        here = self._learned[-1]
        self._shared = {version: min(shared, here) for version, shared in self._shared.items()}

    def published(self, version: int, *, step: int | None = None) -> None:
        """Take in that a version was made after a step, by default the last one."""
        made = self._at(step)
        if not self.knows(version):
            self._versions.insert(bisect_right(self._versions, version), version)
        self._made[version] = self._shared[version] = made

    def see(self, event: AnyEvent) -> None:
        """Take in an event of the log, in its order."""
        match event:
            case Stepped():
                self.stepped(learned=event.num_trajectories > 0)
            case RolledBack():
                self.rolled_back(event.step)
            case VersionPublished():
                self.published(event.version, step=event.step)

    def knows(self, version: int) -> bool:
        """True where it was published."""
        return version in self._made

    def of(self, version: int, *, after: int | None = None) -> int:
        """Age of a version, for the learner as it was after a step, by default the last one.

        A version that was never published is as old as the one before it.
        """
        if not self.knows(version):
            place = bisect_right(self._versions, version)
            assert place, f"version {version} is older than all that were published"
            version = self._versions[place - 1]
        here = self._at(after)
        shared = min(self._shared[version], here)
        return here - shared + self._made[version] - shared

    def oldest_within(self, bound: int) -> int | None:
        """The lowest version down to which none is older than the bound.

        None where even weights from before the first version would be within it, or the newest is not.
        """
        found = None
        for version in reversed(self._versions):
            age = self.of(version)
            if age > bound:
                return found
            found = version if age == bound or version != self._versions[0] else None
        return found

    def _at(self, step: int | None) -> int:
        last = len(self._learned) - 1
        return self._learned[last if step is None else min(max(step, 0), last)]
