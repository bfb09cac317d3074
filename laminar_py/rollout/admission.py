"""Admission of trajectories to a replica under the version that it serves. Owned by `replica`; no I/O.

CLOSED -> OPEN                  the newest weights are loaded and nothing older runs
OPEN -> CLOSED                  an older version was loaded, for trajectories that must continue under it
CLOSED, OPEN -> STOPPED         no training any more; evaluations still run
CLOSED, OPEN, STOPPED -> LOST   the engine is gone: one last report, and nothing more

Invariant: under `drain` a version gets at most one batch of new trajectories.
"""

from enum import Enum

from laminar_py.config.rollout import OnNewWeights
from laminar_py.records.protocols import EngineLostError
from laminar_py.records.replica import Assignment
from laminar_py.records.trajectory import Kind


class ReplicaState(Enum):
    """Stages in the life of a replica; `ReplicaAdmission` makes the transitions."""

    CLOSED = "closed"  # finishes what it has
    OPEN = "open"  # begins new trajectories, until its batch is full
    STOPPED = "stopped"
    LOST = "lost"


class ReplicaAdmission:
    """State of a replica, and what it has admitted so far."""

    def __init__(self, policy: OnNewWeights, *, batch: int, max_batch: int) -> None:
        self.state = ReplicaState.CLOSED
        self.received = 0  # new training trajectories, in the life of the replica
        self.loss: EngineLostError | None = None  # set once LOST
        self._admitted = 0  # training trajectories, under the version in use
        self._policy = policy
        self._batch = batch
        self._max_batch = max_batch

    @property
    def trains(self) -> bool:
        """True while training is taken up at all."""
        return self.state in (ReplicaState.CLOSED, ReplicaState.OPEN)

    def begin_batch(self, *, admitted: int) -> None:
        """Open for the newest version, to which `admitted` trajectories that came meanwhile belong already."""
        self._admitted = admitted
        if self.trains:
            self.state = ReplicaState.OPEN

    def continue_batch(self, *, newest: bool) -> None:
        """Serve a version for those pinned to it; new ones may join only if no newer is known."""
        if self.trains:
            self.state = ReplicaState.OPEN if newest else ReplicaState.CLOSED

    def stop(self) -> None:
        """Take up no training from here on."""
        if self.trains:
            self.state = ReplicaState.STOPPED

    def lose(self, error: EngineLostError) -> None:
        """Note that the engine is gone; the first error counts."""
        self.loss = self.loss or error
        self.state = ReplicaState.LOST

    def count(self, assignment: Assignment) -> None:
        """Note one that starts, whichever version admitted it."""
        self._admitted += is_new(assignment)

    def count_pinned(self, assignment: Assignment) -> None:
        """Note one for whose sake the version in use was loaded."""
        self._admitted += assignment.kind is Kind.TRAIN

    def admissible(self, *, num_running: int, num_away: int = 0) -> int:
        """Training trajectories that may begin now.

        But under `drain`, where a version gets one batch, others take the places of `num_away` that hold no slot,
        one batch of them at most.
        """
        if self.state is not ReplicaState.OPEN:
            return 0
        if self._policy is OnNewWeights.DRAIN:
            return self._batch - self._admitted
        return self._max_batch + self._max_batch // 4 - num_running + min(num_away, self._max_batch)


def is_new(assignment: Assignment) -> bool:
    """True for training that begins under the version in use; a pinned trajectory was admitted elsewhere."""
    return assignment.kind is Kind.TRAIN and assignment.version is None
