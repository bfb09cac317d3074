"""Views of the replicas and the choice among them. Pure: no clock, no socket; shared by the parts of `control`.

Invariant: a replica is never given more new samples than it said it admits; a trajectory pinned to a version goes
only to a replica that serves it, or that is idle and can load it, since an engine's versions never go back; and a
group's new samples go to one replica, which prefills their prompt once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class ReplicaView:
    """State of one replica as far as the controller knows: the last report, less what was sent since."""

    index: int
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

    # ---- questions

    @property
    def in_flight(self) -> int:
        """Number of trajectories at replicas."""
        return sum(len(view.in_flight) for view in self.by_index.values())

    def serves(self, replica: int, version: int) -> bool:
        """True where it can take up work of `version` at once."""
        view = self.by_index[replica]
        return view.version == version and view.loading is None

    def is_unreachable(self, version: int) -> bool:
        """True where no replica will ever serve `version` again: all are beyond it, and none is starting."""
        return all(min(view.version, view.serving) > version for view in self.by_index.values())

    def num_starting(self) -> int:
        """Number of replicas that have not reported since they (re)started and were given nothing."""
        return sum(view.version < 0 and not view.in_flight for view in self.by_index.values())

    def by_version(self) -> dict[int, list[int]]:
        """Replicas that have work, by the version that they serve."""
        out: dict[int, list[int]] = {}
        for view in self.by_index.values():
            if view.in_flight and view.version >= 0 and view.loading is None:
                out.setdefault(view.version, []).append(view.index)
        return out

    def idle(self) -> list[ReplicaView]:
        """Replicas with nothing to do: an evaluation starts on them."""
        return [view for view in self.by_index.values() if view.idle]

    def running(self, replica: int | None) -> ReplicaView | None:
        """View of a replica that has reported since it started, else None."""
        view = None if replica is None else self.by_index[replica]
        return view if view is not None and view.version >= 0 else None

    # ---- choices

    def for_pinned(
        self, version: int, *, bound: Callable[[int], bool] = lambda replica: False
    ) -> ReplicaView | None:
        """A replica that can continue work of `version`: one that serves it, else an idle one that is older.

        `bound` ones do not leave the version that they serve.
        """
        views = self.by_index.values()
        serving = [view for view in views if view.version >= 0 and view.serving == version]
        idle = [view for view in views if view.idle and view.version < version and not bound(view.index)]
        return min(serving or idle, key=lambda view: len(view.in_flight), default=None)

    def for_group(self, size: int, *, at_least: int | None = None, share: int | None = None) -> ReplicaView | None:
        """The least loaded replica that admits `size` more, at version `at_least` or newer.

        `share` is the most that one replica may have in flight, so that one that reports early does not take a
        whole batch before the others have the weights for it.
        """
        fitting = [
            view
            for view in self.by_index.values()
            if view.admissible >= size
            and view.loading is None
            and (at_least is None or view.version >= at_least)
            and (share is None or len(view.in_flight) + size <= share)
        ]
        return min(fitting, key=lambda view: (len(view.in_flight), -view.version), default=None)

    def least_loaded(self, *, at_least: int | None = None) -> ReplicaView | None:
        """The replica with the fewest in flight at version `at_least` or newer, whatever it admits."""
        serving = [
            view for view in self.by_index.values() if view.version >= (at_least or 0) and view.loading is None
        ]
        return min(serving, key=lambda view: len(view.in_flight), default=None)
