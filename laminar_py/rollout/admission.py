"""Admission of trajectories to a replica under the version that it serves. `rollout.replica` owns it; no I/O.

CLOSED -> OPEN                  the newest weights are loaded, and nothing older runs
OPEN -> CLOSED                  an older version was loaded, for trajectories that must continue under it
CLOSED, OPEN -> STOPPED         the replica takes no more training; evaluations still run
CLOSED, OPEN, STOPPED -> LOST   the engine is gone; one last report follows

Under `drain` a version gets at most one batch of new trajectories (law 2).
"""

from enum import Enum

from laminar_py.config.rollout import OnNewWeights
from laminar_py.records.engine import EngineLostError
from laminar_py.records.replica import Assignment
from laminar_py.records.trajectory import Kind


class ReplicaState(Enum):
    """States of a replica; `ReplicaAdmission` makes the transitions."""

    CLOSED = "closed"  # finishes its trajectories
    OPEN = "open"  # begins new trajectories, until its batch is full
    STOPPED = "stopped"
    LOST = "lost"


class ReplicaAdmission:
    """The state of a replica, and the number of trajectories that it admitted."""

    def __init__(self, policy: OnNewWeights, *, batch: int, max_batch: int) -> None:
        self.state = ReplicaState.CLOSED
        self.received = 0  # new training trajectories, since the replica started
        self.loss: EngineLostError | None = None  # set once LOST
        self._admitted = 0  # training trajectories, under the version in use
        self._policy = policy
        self._batch = batch
        self._max_batch = max_batch

    @property
    def trains(self) -> bool:
        """Whether the replica takes training trajectories."""
        return self.state in (ReplicaState.CLOSED, ReplicaState.OPEN)

    def begin_batch(self, *, admitted: int) -> None:
        """Start admission for a version that was just loaded, unless the replica stops or lost its engine.

        `admitted` is the number of new trajectories that arrived during the load; they count towards the batch.
        """
        self._admitted = admitted
        if self.trains:
            self.state = ReplicaState.OPEN

    def continue_batch(self, *, newest: bool) -> None:
        """Serve a version for trajectories pinned to it; admit new ones only if it is the `newest`."""
        if self.trains:
            self.state = ReplicaState.OPEN if newest else ReplicaState.CLOSED

    def stop(self) -> None:
        """Take no more training."""
        if self.trains:
            self.state = ReplicaState.STOPPED

    def lose(self, error: EngineLostError) -> None:
        """Note that the engine is gone, and keep the first error."""
        self.loss = self.loss or error
        self.state = ReplicaState.LOST

    def count(self, assignment: Assignment) -> None:
        """Count a trajectory that starts now, if it is new."""
        self._admitted += is_new(assignment)

    def count_pinned(self, assignment: Assignment) -> None:
        """Count a training trajectory for which the current version was loaded."""
        self._admitted += assignment.kind is Kind.TRAIN

    def admissible(self, *, num_running: int, num_away: int = 0) -> int:
        """Return how many training trajectories may begin now.

        Under `drain` it is the rest of the version's one batch. Otherwise further trajectories take the places of
        `num_away` trajectories that wait for their environment and hold no slot, one batch at most.
        """
        if self.state is not ReplicaState.OPEN:
            return 0
        if self._policy is OnNewWeights.DRAIN:
            return self._batch - self._admitted
        return self._max_batch + self._max_batch // 4 - num_running + min(num_away, self._max_batch)


def is_new(assignment: Assignment) -> bool:
    """Whether an assignment is new training; another replica admitted a pinned trajectory before."""
    return assignment.kind is Kind.TRAIN and assignment.version is None
