"""Choice of a replica for a trajectory, within what admission and moves allow. Owned by `control.scheduler`."""

from laminar_py.control.book import Book, Phase
from laminar_py.control.views import ReplicaView


class Router:
    """Admission applied to the replicas of the moment; changes nothing."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._admission = book.settings.admission

    @property
    def num_admitted(self) -> int:
        """Groups that may be issued now."""
        if self._book.phase is not Phase.ADMITTING:
            return 0
        return self._admission.allowed(live=len(self._book.groups), generating=self._book.num_generating)

    @property
    def _oldest(self) -> int | None:
        """Version that a trajectory without tokens must have at least."""
        return self._admission.oldest(self._book.newest_version)

    def for_new(self, size: int) -> ReplicaView | None:
        """A replica that admits `size` more under a version that is new enough."""
        groups = self._admission.share(len(self._book.views.by_index))
        share = None if groups is None else groups * self._book.settings.group_size
        return self._book.views.for_group(size, at_least=self._oldest, share=share)

    def for_displaced(self) -> ReplicaView | None:
        """A replica for one trajectory of a replica that died: if none admits more, the least loaded."""
        return self.for_new(1) or self._book.views.least_loaded(at_least=self._oldest)

    def for_pinned(self, version: int) -> ReplicaView | None:
        """A replica that can take up work of `version`; none that is promised to another version."""
        return self._book.views.for_pinned(version, bound=self._book.moves.expected)
