"""Choice of a replica for a trajectory, within what admission and moves allow. Owned by `control.scheduler`.

Invariant: a replica is never given more new samples than it said it admits; a trajectory pinned to a version goes
only to a replica that serves it, or that is idle and can load it, since an engine's versions never go back; and a
group's new samples go to one replica, which prefills their prompt once.
"""

from collections.abc import Collection

from laminar_py.control.book import Book, Phase
from laminar_py.control.staleness import Admission
from laminar_py.control.views import ReplicaView


class Router:
    """Rules by which a replica is chosen of those there are at the moment; changes nothing."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._views = book.views

    @property
    def _admission(self) -> Admission:
        return self._book.settings.admission  # whose capacity follows the number of replicas

    @property
    def num_admitted(self) -> int:
        """Groups that may be issued now; a step with too few counts as a full one, so what follows is no older."""
        book = self._book
        if book.phase is not Phase.ADMITTING or (self._admission.by_batch and book.at_ceiling):
            return 0
        return self._admission.allowed(live=len(book.groups) + book.num_missing, generating=book.num_generating)

    @property
    def _oldest(self) -> int | None:
        """Version that a trajectory without tokens must have at least."""
        return self._admission.oldest(self._book.newest_version, self._book.ages)

    def for_new(self, size: int) -> ReplicaView | None:
        """The least loaded replica that admits `size` more under a version that is new enough.

        Where whole batches are waited for, each replica has a share, so that one that reports early does not
        take a whole batch before the others have the weights for it.
        """
        groups = self._admission.share(self._views.num_placed)
        view = self._views.with_room(size, oldest=self._oldest)
        if view is None or groups is None:
            return view
        return view if len(view.in_flight) + size <= groups * self._book.settings.group_size else None

    def for_displaced(self) -> ReplicaView | None:
        """A replica for one trajectory of a replica that died: if none admits more, the least loaded."""
        return self.for_new(1) or self._views.least_loaded(oldest=max(0, self._oldest or 0))

    def for_pinned(self, version: int, *, limit: int | None = None) -> ReplicaView | None:
        """A replica that can continue work of `version`: one that serves it, else an idle one that is older.

        A replica that expects moves does not leave the version that it serves; one that has `limit` trajectories,
        where there is one, gets no more. One that leaves takes what nobody else can.
        """
        first = next(self._views.that_serve(version), None)
        if first is not None and (limit is None or len(first.in_flight) < limit):
            return first
        return self._idle_below(version) or next(self._views.leaving_that_serve(version), None)

    def for_pass(self, version: int, *, holders: Collection[int], most: int, num_out: int) -> ReplicaView | None:
        """A replica for a member of an evaluation of `version`, of which `num_out` are at the `holders`.

        One that has none yet, while the holders that still serve it are fewer than `most`; else the least loaded
        of these, unless they have a batch each. Replicas that leave are for what nobody else can take.
        """
        serving = [view for view in map(self._views.by_index.__getitem__, holders) if _serves(view, version)]
        holding = [view for view in serving if not view.leaving] or serving
        if sum(not view.leaving for view in holding) < most:
            others = (view for view in self._views.that_serve(version) if view.index not in holders)
            other = next(others, None) or self._idle_below(version)
            other = other or (None if holding else next(self._views.leaving_that_serve(version), None))
            if other is not None:
                return other
        is_full = num_out >= len(holding) * self._book.settings.batch_per_replica
        least = min(holding, key=lambda view: (len(view.in_flight), view.index), default=None)
        return None if is_full else least

    def _idle_below(self, version: int) -> ReplicaView | None:
        """A replica that can load it, and expects no moves under the version that it serves."""
        return self._views.idle_below(version, expecting=self._book.moves.expected)


def _serves(view: ReplicaView, version: int) -> bool:
    return view.version >= 0 and view.serving == version
