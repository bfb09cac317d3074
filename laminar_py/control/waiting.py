"""Trajectories that wait for a replica: interrupted ones, replacements, evaluations. Owned by `control.scheduler`.

The queue decides which goes where and when; the dispatcher hands them over. Invariant: a trajectory leaves the
queue once, either to a replica or, where no replica will ever serve its version again, as unreachable.
"""

from collections import deque
from collections.abc import Iterable, Iterator

from laminar_py.control.book import Book
from laminar_py.control.evaluation import Evaluations
from laminar_py.control.lifecycle import Lifecycle
from laminar_py.control.routing import Router
from laminar_py.control.views import ReplicaView
from laminar_py.records.trajectory import Kind


class WaitingQueue:
    """First come first served, but for those displaced by a replica's death, which go before all others."""

    def __init__(self, book: Book, *, router: Router, evaluations: Evaluations) -> None:
        self._book = book
        self._router = router
        self._evaluations = evaluations
        self._waiting: deque[Lifecycle] = deque()  # at most all live
        self._displaced: list[Lifecycle] = []
        self._unreachable: list[Lifecycle] = []

    def append(self, lifecycle: Lifecycle) -> None:
        """Queue a trajectory."""
        self._waiting.append(lifecycle)

    def append_displaced(self, lifecycle: Lifecycle) -> None:
        """Queue a trajectory whose replica died; for it a replica need not admit more."""
        self._displaced.append(lifecycle)

    def extend(self, lifecycles: Iterable[Lifecycle]) -> None:
        """Queue several trajectories."""
        self._waiting.extend(lifecycles)

    def remove_group(self, group_id: str) -> None:
        """Remove all members of a group."""
        self._waiting = deque(item for item in self._waiting if item.group_id != group_id)
        self._displaced = [item for item in self._displaced if item.group_id != group_id]

    def take_unreachable(self) -> list[Lifecycle]:
        """Trajectories whose version no replica will serve again; each is told once."""
        unreachable, self._unreachable = self._unreachable, []
        return unreachable

    def pin(self, lifecycle: Lifecycle) -> int | None:
        """The only version that a trajectory may go on under, if there is one."""
        if lifecycle.kind is Kind.EVAL:
            return self._evaluations.version_of(lifecycle)
        return lifecycle.version if self._book.settings.one_version else None

    def leave(self) -> Iterator[tuple[Lifecycle, int, int | None]]:
        """Trajectories that go to a replica now: each with the replica and the version it must have there, if any.

        Every one is to be sent before the next is asked for.
        """
        displaced, self._displaced = self._displaced, []
        for lifecycle in displaced:
            view = self._router.for_displaced() if self._is_free(lifecycle) else None
            if view is None:
                self._waiting.append(lifecycle)
            else:
                yield lifecycle, view.index, None
        for _ in range(len(self._waiting)):
            lifecycle = self._waiting.popleft()
            view, pin = self._place(lifecycle) if self._book.may_run(lifecycle) else (None, None)
            if view is not None:
                yield lifecycle, view.index, pin
            elif pin is not None and self._book.views.is_unreachable(pin):
                self._unreachable.append(lifecycle)
            else:
                self._waiting.append(lifecycle)

    def leave_for_starting(self) -> Iterator[tuple[Lifecycle, int]]:
        """Trajectories that go, and under which version, to a replica that starts: those that nobody else serves.

        Replicas that start together share the versions: of 3, 4, 5 the first of two gets 3 and 5.
        """
        num_starting = self._book.views.num_starting()
        self._waiting.extend(self._displaced)
        self._displaced = []
        going = (lifecycle for lifecycle in self._waiting if self._book.may_run(lifecycle))
        pinned = sorted({pin for pin in map(self.pin, going) if pin is not None})
        unserved = [version for version in pinned if self._router.for_pinned(version) is None]
        wanted = unserved[:: max(1, num_starting)]
        for _ in range(len(self._waiting)):
            lifecycle = self._waiting.popleft()
            pin = self.pin(lifecycle)
            if pin is not None and pin in wanted and self._book.may_run(lifecycle):
                yield lifecycle, pin
            else:
                self._waiting.append(lifecycle)

    def _is_free(self, lifecycle: Lifecycle) -> bool:
        """True where any replica will do."""
        bound = self.pin(lifecycle) is not None or self._book.moves.destination(lifecycle.id) is not None
        return lifecycle.kind is Kind.TRAIN and not bound and self._book.may_run(lifecycle)

    def _place(self, lifecycle: Lifecycle) -> tuple[ReplicaView | None, int | None]:
        """The replica for a trajectory, if there is a place now; and its version, if only one will do."""
        move, pin = self._book.moves.destination(lifecycle.id), self.pin(lifecycle)
        if move is not None:
            if self._book.views.serves(*move):
                return self._book.views.by_index[move[0]], move[1]
            self._book.moves.ends(lifecycle.id)
        if pin is not None:
            return self._router.for_pinned(pin), pin
        if lifecycle.kind is Kind.EVAL:
            return self._book.views.running(self._evaluations.replica_of(lifecycle)), None
        return self._router.for_new(1), None
