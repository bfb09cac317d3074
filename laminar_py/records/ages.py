"""Staleness: the age of a weight version in learner steps. Pure.

`control` feeds `WeightAges` with the events of a running learner, recovery and the audit with the events of a log.
A step counts if it had trajectories, since an empty step leaves the weights as they are. Weights equal to the
learner's have age 0, however often the learner publishes and whatever numbers its versions have (law 12,
`tests/records/test_ages.py`).
"""

from bisect import bisect_right

from laminar_py.records.events import AnyEvent, RolledBack, Stepped, VersionPublished


class WeightAges:
    """Ages of versions, e.g. 3 for a version that was published three steps ago.

    A learner that rolls back to a checkpoint undoes steps. Weights that were made by undone steps have an age of
    the number of these steps plus the number of learner steps since the checkpoint.
    """

    def __init__(self) -> None:
        self._learned = [0]  # step -> number of steps, up to and including it, that changed the weights
        self._versions: list[int] = []  # ascending
        self._made: dict[int, int] = {}  # version -> number of steps that made it
        self._shared: dict[int, int] = {}  # version -> number of these steps that no rollback has undone

    def record_step(self, *, learned: bool) -> None:
        """Record a learner step; `learned` is False for a step without trajectories."""
        self._learned.append(self._learned[-1] + learned)

    def record_rollback(self, step: int) -> None:
        """Record that the learner rolled back to `step` and undid later steps."""
        del self._learned[step + 1 :]
        kept = self._learned[-1]
        self._shared = {version: min(shared, kept) for version, shared in self._shared.items()}

    def record_version(self, version: int, *, step: int | None = None) -> None:
        """Record that the learner published `version` after `step`, by default after the last one."""
        made = self._learned_by(step)
        if not self.knows_version(version):
            self._versions.insert(bisect_right(self._versions, version), version)
        self._made[version] = self._shared[version] = made

    def record_event(self, event: AnyEvent) -> None:
        """Record an event, in the order of the log; only steps, rollbacks and publications change anything."""
        match event:
            case Stepped():
                self.record_step(learned=event.num_trajectories > 0)
            case RolledBack():
                self.record_rollback(event.step)
            case VersionPublished():
                self.record_version(event.version, step=event.step)

    @property
    def last_step(self) -> int:
        """Number of the last step that no rollback undid, 0 before the first."""
        return len(self._learned) - 1

    def knows_version(self, version: int) -> bool:
        """True if the version was published."""
        return version in self._made

    def age_of(self, version: int, *, after: int | None = None) -> int:
        """Age of a version when the learner had made the step `after`, by default the last step.

        A version that was never published is as old as the next lower published version.
        """
        if not self.knows_version(version):
            place = bisect_right(self._versions, version)
            assert place, f"version {version} is older than all published versions"
            version = self._versions[place - 1]
        learned = self._learned_by(after)
        shared = min(self._shared[version], learned)
        return (learned - shared) + (self._made[version] - shared)  # steps since, and undone steps

    def oldest_within(self, bound: int) -> int | None:
        """Return the lowest version whose age, and the age of all later versions, is at most `bound`.

        Returns None if no version is too old, even one before the first, or if the newest version is too old.
        """
        found = None
        for version in reversed(self._versions):
            age = self.age_of(version)
            if age > bound:
                return found
            found = version if age == bound or version != self._versions[0] else None
        return found

    def _learned_by(self, step: int | None) -> int:
        """Number of steps up to `step`, by default the last one, that changed the weights."""
        last = self.last_step
        return self._learned[last if step is None else min(max(step, 0), last)]
