"""Knowledge of the controller about each replica. Pure: no clock, no socket; shared by the parts of `control`.

Invariant: a view is a replica's last report, less what was sent since.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class ReplicaView:
    """State of one replica as far as the controller knows: the last report, less what was sent since."""

    index: int
    has_place: bool = True  # False where its node has gone and no other has room: it does not come back
    version: int = -1
    admissible: int = 0
    in_flight: set[str] = field(default_factory=set)
    sent: int = 0  # new trajectories in its life
    loading: int | None = None  # version that pinned work made it load, until it reports it

    @property
    def idle(self) -> bool:
        """True where it serves some version and has nothing to do."""
        return not self.in_flight and self.version >= 0

    @property
    def serving(self) -> int:
        """The version its next assignment runs under."""
        return self.version if self.loading is None else self.loading


class ReplicaViews:
    """Views of all replicas, `by_index`."""

    def __init__(self, replicas: int) -> None:
        self.by_index = {index: ReplicaView(index=index) for index in range(replicas)}

    # ---- what happens to a replica

    def reported(self, replica: int, *, version: int, admissible: int, received: int) -> None:
        """Take over a replica's own word on its state; what is still on its way to it counts as taken."""
        view = self.by_index[replica]
        view.version, view.admissible = version, admissible - (view.sent - received)
        if view.loading == version or not view.in_flight:
            view.loading = None

    def send(self, replica: int, trajectory_id: str, *, pin: int | None = None) -> None:
        """Note what is handed over; `pin` is the only version it may run under."""
        view = self.by_index[replica]
        view.in_flight.add(trajectory_id)
        if pin is None:
            view.sent += 1
            view.admissible -= 1
        elif pin != view.serving:
            view.loading = pin

    def returned(self, replica: int, trajectory_id: str) -> None:
        """Note that a trajectory finished, was interrupted or dropped there."""
        self.by_index[replica].in_flight.discard(trajectory_id)

    def retire(self, replica: int) -> None:
        """Give nothing more to a replica that is about to be replaced."""
        self.by_index[replica].version = -1
        self.by_index[replica].admissible = 0

    def forget(self, replica: int) -> set[str]:
        """Start anew with a replica that died; the trajectories it had."""
        in_flight = self.by_index[replica].in_flight
        self.by_index[replica] = ReplicaView(index=replica)
        return in_flight

    def planned(self, has_place: Iterable[bool]) -> None:
        """Note for which replicas, in order, the cluster has room; where there is none, nothing waits for one."""
        for view, has in zip(self.by_index.values(), has_place, strict=True):
            view.has_place = has

    # ---- questions

    @property
    def num_placed(self) -> int:
        """Number of replicas that run or will; one at least."""
        return max(1, sum(view.has_place for view in self.by_index.values()))

    @property
    def in_flight(self) -> int:
        """Number of trajectories at replicas."""
        return sum(len(view.in_flight) for view in self.by_index.values())

    def serves(self, replica: int, version: int) -> bool:
        """True where it can take up work of `version` at once."""
        view = self.by_index[replica]
        return view.version == version and view.loading is None

    def is_unreachable(self, version: int) -> bool:
        """True where no replica will ever serve `version` again: all are beyond it, and none is starting.

        Where none has a place the run ends, and nothing is given up that a resumed one can go on with.
        """
        views = [view for view in self.by_index.values() if view.has_place]
        return bool(views) and all(min(view.version, view.serving) > version for view in views)

    def num_starting(self) -> int:
        """Number of replicas that have not reported since they (re)started and were given nothing."""
        return sum(view.has_place and view.version < 0 and not view.in_flight for view in self.by_index.values())

    def by_version(self) -> dict[int, list[int]]:
        """Replicas that have work, by the version that they serve."""
        out: dict[int, list[int]] = {}
        for view in self.by_index.values():
            if view.in_flight and view.version >= 0 and view.loading is None:
                out.setdefault(view.version, []).append(view.index)
        return out

    def running(self, replica: int | None) -> ReplicaView | None:
        """View of a replica that has reported since it started, else None."""
        view = None if replica is None else self.by_index[replica]
        return view if view is not None and view.version >= 0 else None
