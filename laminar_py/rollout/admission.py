"""Admission of trajectories to a replica under the version that it serves. `rollout.replica` owns it; no I/O.

CLOSED -> OPEN                  the newest weights are loaded, and no trajectory of an older version runs
OPEN -> CLOSED                  the replica serves an older version, for trajectories that must continue under it
CLOSED, OPEN -> STOPPED         the replica takes no more training; evaluations still run
CLOSED, OPEN, STOPPED -> LOST   the engine is lost; one last report follows

Under `drain` a version gets at most one batch of new trajectories (law 2).
"""

from enum import Enum

from laminar_py.config.rollout import OnNewWeights
from laminar_py.records.engine import EngineLostError
from laminar_py.records.replica import Assignment
from laminar_py.records.trajectory import Kind


class ReplicaState(Enum):
    """States of a replica; `ReplicaAdmission` makes the transitions."""

    CLOSED = "closed"  # finishes its trajectories and begins no new ones
    OPEN = "open"  # begins new trajectories, until its batch is full
    STOPPED = "stopped"  # ends its training, and runs evaluations
    LOST = "lost"  # has no engine any more


class ReplicaAdmission:
    """The state of a replica, and the numbers of trajectories that it received and admitted."""

    def __init__(self, policy: OnNewWeights, *, batch: int, max_batch: int) -> None:
        self.state = ReplicaState.CLOSED
        self.received = 0  # new training trajectories, since the replica started
        self.lost_error: EngineLostError | None = None  # set once LOST
        self._admitted = 0  # new training trajectories, under the version in use
        self._policy = policy
        self._batch = batch  # new training trajectories under a version, with `drain`
        self._max_batch = max_batch  # sequences that the engine decodes at a time

    @property
    def trains(self) -> bool:
        """Whether the replica takes training trajectories."""
        return self.state in (ReplicaState.CLOSED, ReplicaState.OPEN)

    def begin_batch(self, *, admitted: int) -> None:
        """Open a new batch under a version that was just loaded, unless the replica is STOPPED or LOST.

        `admitted` new trajectories that arrived during the load count towards the batch.
        """
        self._admitted = admitted
        if self.trains:
            self.state = ReplicaState.OPEN

    def continue_batch(self, *, newest: bool) -> None:
        """Open admission if the version loaded for pinned trajectories is the `newest`, else close it."""
        if self.trains:
            self.state = ReplicaState.OPEN if newest else ReplicaState.CLOSED

    def stop(self) -> None:
        """Take no more training trajectories; a LOST replica stays LOST."""
        if self.trains:
            self.state = ReplicaState.STOPPED

    def lose(self, error: EngineLostError) -> None:
        """Note that the engine is lost, and keep the first error."""
        self.lost_error = self.lost_error or error
        self.state = ReplicaState.LOST

    def count(self, assignment: Assignment) -> None:
        """Add a trajectory that starts now to the batch's count, if it is new training."""
        self._admitted += is_new(assignment)

    def count_pinned(self, assignment: Assignment) -> None:
        """Add a pinned trajectory that starts now to the batch's count, if it is training."""
        self._admitted += assignment.kind is Kind.TRAIN

    def admissible(self, *, num_running: int, num_away: int = 0) -> int:
        """Return how many new training trajectories may begin now; 0 unless the replica is OPEN.

        Under `drain` it is the rest of the version's one batch. Otherwise it is the engine's slots and a quarter,
        less the trajectories that run. `num_away` of these wait for environments and hold no slot, so as many more
        may begin, at most one batch.
        """
        if self.state is not ReplicaState.OPEN:
            return 0
        if self._policy is OnNewWeights.DRAIN:
            return self._batch - self._admitted
        return self._max_batch + self._max_batch // 4 - num_running + min(num_away, self._max_batch)


def is_new(assignment: Assignment) -> bool:
    """Whether an assignment is training that no replica has admitted before, so that no version is pinned."""
    return assignment.kind is Kind.TRAIN and assignment.version is None
