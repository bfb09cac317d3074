"""Chooses replica and moment for each trajectory. Pure: no clock, no socket; called by `control.flow`.

Invariant: a replica is never given more new samples than it said it admits; a trajectory pinned to a version goes
only to a replica that serves it, or that is idle and can load it, since an engine's versions never go back; and a
group's new samples go to one replica, which prefills their prompt once.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True, kw_only=True)
class ReplicaView:
    """What the controller knows of one replica: its last report, less what was sent since."""

    index: int
    version: int = -1
    admissible: int = 0
    in_flight: set[str] = field(default_factory=set)
    sent: int = 0  # new trajectories in its life
    loading: int | None = None  # version that pinned work made it load, until it reports it

    @property
    def idle(self) -> bool:
        """Serves some version and has nothing to do."""
        return not self.in_flight and self.version >= 0

    @property
    def serving(self) -> int:
        """The version its next assignment runs under."""
        return self.version if self.loading is None else self.loading


class Dispatcher:
    """Views of all replicas and the choice among them."""

    def __init__(self, replicas: int) -> None:
        self.views = {index: ReplicaView(index=index) for index in range(replicas)}

    def reported(self, replica: int, *, version: int, admissible: int, received: int) -> None:
        """Take over a replica's own word on its state; what is still on its way to it counts as taken."""
        view = self.views[replica]
        view.version, view.admissible = version, admissible - (view.sent - received)
        if view.loading == version or not view.in_flight:
            view.loading = None

    def lost(self, replica: int) -> set[str]:
        """Forget a dead replica; the trajectories it had."""
        orphans = self.views[replica].in_flight
        self.views[replica] = ReplicaView(index=replica)
        return orphans

    def send(self, replica: int, trajectory_id: str, *, pin: int | None = None) -> None:
        """Note what is handed over; `pin` is the only version it may run under."""
        view = self.views[replica]
        view.in_flight.add(trajectory_id)
        if pin is None:
            view.sent += 1
            view.admissible -= 1
        elif pin != view.serving:
            view.loading = pin

    def returned(self, replica: int, trajectory_id: str) -> None:
        """It finished, was interrupted or dropped there."""
        self.views[replica].in_flight.discard(trajectory_id)

    def serving(self, replica: int, version: int) -> bool:
        """Whether it can take up work of `version` at once."""
        view = self.views[replica]
        return view.version == version and view.loading is None

    def by_version(self) -> dict[int, list[int]]:
        """Replicas that have work, by the version that they serve."""
        out: dict[int, list[int]] = {}
        for view in self.views.values():
            if view.in_flight and view.version >= 0 and view.loading is None:
                out.setdefault(view.version, []).append(view.index)
        return out

    def for_pinned(
        self, version: int, *, bound: Callable[[int], bool] = lambda replica: False
    ) -> ReplicaView | None:
        """A replica that can continue work of `version`: one that serves it, else an idle one that is older.

        `bound` ones do not leave the version that they serve.
        """
        serving = [view for view in self.views.values() if view.version >= 0 and view.serving == version]
        idle = [
            view for view in self.views.values() if view.idle and view.version < version and not bound(view.index)
        ]
        return min(serving or idle, key=lambda view: len(view.in_flight), default=None)

    def running(self, replica: int | None) -> ReplicaView | None:
        """That replica, if it has reported since it started."""
        view = None if replica is None else self.views[replica]
        return view if view is not None and view.version >= 0 else None

    def retire(self, replica: int) -> None:
        """It is about to be replaced: nothing more goes to it."""
        self.views[replica].version = -1
        self.views[replica].admissible = 0

    def outrun(self, version: int) -> bool:
        """Whether no replica will ever serve `version` again: all are beyond it, and none is starting."""
        return all(min(view.version, view.serving) > version for view in self.views.values())

    def num_starting(self) -> int:
        """Replicas that have not reported since they (re)started and were given nothing."""
        return sum(view.version < 0 and not view.in_flight for view in self.views.values())

    def for_group(self, size: int, *, at_least: int | None = None, share: int | None = None) -> ReplicaView | None:
        """The least loaded replica that admits `size` more, at version `at_least` or newer.

        `share` is the most that one replica may have in flight, so that one that reports early does not take a
        whole batch before the others have the weights for it.
        """
        fitting = [
            view
            for view in self.views.values()
            if view.admissible >= size
            and view.loading is None
            and (at_least is None or view.version >= at_least)
            and (share is None or len(view.in_flight) + size <= share)
        ]
        return min(fitting, key=lambda view: (len(view.in_flight), -view.version), default=None)

    def least_loaded(self, *, at_least: int | None = None) -> ReplicaView | None:
        """The one that serves `at_least` or newer and has the fewest in flight, whatever it admits."""
        serving = [
            view for view in self.views.values() if view.version >= (at_least or 0) and view.loading is None
        ]
        return min(serving, key=lambda view: len(view.in_flight), default=None)

    def idle(self) -> list[ReplicaView]:
        """Replicas with nothing to do: an evaluation starts on them."""
        return [view for view in self.views.values() if view.idle]
