"""Trajectories that wait for a replica: interrupted ones, replacements, evaluations. Owned by `control.flow`.

It decides who goes where and when; the flow hands them over. Invariant: a trajectory leaves the line once, either
to a replica or, where no replica will ever serve its version again, as lost.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from laminar_py.control.dispatcher import Dispatcher, ReplicaView
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.lifecycle import Lifecycle
from laminar_py.control.moves import Moves
from laminar_py.records.trajectory import Kind


class Line:
    """First come first served, but for orphans: those of a replica that has just died are the oldest there are."""

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        moves: Moves,
        evaluations: Evaluations,
        one_version: bool,
        may_go: Callable[[Lifecycle], bool],
        place_for_one: Callable[[], ReplicaView | None],
        place_for_orphan: Callable[[], ReplicaView | None],
    ) -> None:
        self._dispatcher = dispatcher
        self._moves = moves
        self._evaluations = evaluations
        self._one_version = one_version
        self._may_go = may_go
        self._place_for_one = place_for_one
        self._place_for_orphan = place_for_orphan
        self._waiting: deque[Lifecycle] = deque()  # at most all live
        self._orphans: list[Lifecycle] = []
        self._lost: list[Lifecycle] = []

    def append(self, lifecycle: Lifecycle) -> None:
        """It waits from now on."""
        self._waiting.append(lifecycle)

    def append_orphan(self, lifecycle: Lifecycle) -> None:
        """It does not wait for a replica that admits more."""
        self._orphans.append(lifecycle)

    def extend(self, lifecycles: Iterable[Lifecycle]) -> None:
        """They wait from now on."""
        self._waiting.extend(lifecycles)

    def drop_group(self, group_id: str) -> None:
        """Its members wait no more."""
        self._waiting = deque(item for item in self._waiting if item.group_id != group_id)
        self._orphans = [item for item in self._orphans if item.group_id != group_id]

    def take_lost(self) -> list[Lifecycle]:
        """Those whose version no replica will serve again; told once."""
        lost, self._lost = self._lost, []
        return lost

    def pin(self, lifecycle: Lifecycle) -> int | None:
        """The only version it may go on under, if there is one."""
        if lifecycle.kind is Kind.EVAL:
            return self._evaluations.version_of(lifecycle)
        return lifecycle.version if self._one_version else None

    def leave(self) -> Iterator[tuple[Lifecycle, int, int | None]]:
        """Who goes to which replica now, and the version that it must have there, if any."""
        orphans, self._orphans = self._orphans, []
        for lifecycle in orphans:
            view = self._place_for_orphan() if self._is_free(lifecycle) else None
            if view is None:
                self._waiting.append(lifecycle)
            else:
                yield lifecycle, view.index, None
        for _ in range(len(self._waiting)):
            lifecycle = self._waiting.popleft()
            view, pin = self._place(lifecycle) if self._may_go(lifecycle) else (None, None)
            if view is not None:
                yield lifecycle, view.index, pin
            elif pin is not None and self._dispatcher.outrun(pin):
                self._lost.append(lifecycle)
            else:
                self._waiting.append(lifecycle)

    def leave_for(self, num_starting: int) -> Iterator[tuple[Lifecycle, int]]:
        """Who goes, and under which version, to one of so many replicas that start: those that nobody else serves.

        Replicas that start together share the versions: of 3, 4, 5 the first of two gets 3 and 5.
        """
        self._waiting.extend(self._orphans)
        self._orphans = []
        going = (lifecycle for lifecycle in self._waiting if self._may_go(lifecycle))
        pinned = sorted({pin for pin in map(self.pin, going) if pin is not None})
        wanted = [version for version in pinned if self._for_pinned(version) is None][:: max(1, num_starting)]
        for _ in range(len(self._waiting)):
            lifecycle = self._waiting.popleft()
            pin = self.pin(lifecycle)
            if pin is not None and pin in wanted and self._may_go(lifecycle):
                yield lifecycle, pin
            else:
                self._waiting.append(lifecycle)

    def _is_free(self, lifecycle: Lifecycle) -> bool:
        """Whether it may go on anywhere."""
        bound = self.pin(lifecycle) is not None or self._moves.destination(lifecycle.id) is not None
        return lifecycle.kind is Kind.TRAIN and not bound and self._may_go(lifecycle)

    def _place(self, lifecycle: Lifecycle) -> tuple[ReplicaView | None, int | None]:
        """Where it goes now, if there is a place; and its version, if only one will do."""
        move, pin = self._moves.destination(lifecycle.id), self.pin(lifecycle)
        if move is not None:
            if self._dispatcher.serving(*move):
                return self._dispatcher.views[move[0]], move[1]
            self._moves.ends(lifecycle.id)
        if pin is not None:
            return self._for_pinned(pin), pin
        if lifecycle.kind is Kind.EVAL:
            return self._dispatcher.running(self._evaluations.replica_of(lifecycle)), None
        return self._place_for_one(), None

    def _for_pinned(self, version: int) -> ReplicaView | None:
        """One that can take up work of `version`; one that is promised to another version stays with that."""
        return self._dispatcher.for_pinned(version, bound=self._moves.expected)
