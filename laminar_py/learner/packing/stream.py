"""Bins of the next learner step, kept while its sequences come and go. Pure; owned by `packing.stage`.

Invariants: each sequence that was added and not removed is in exactly one bin or still loose; no bin exceeds
`max_tokens`. Whenever enough is loose, it is packed and the bins that came out full are kept; so when the learner
asks, only what is loose is left to pack, however large the step.
"""

from laminar_py.learner.packing.balance import Bin, Entry, fit, make_entry
from laminar_py.records.finished import FinishedTrajectory

WINDOW = 32  # bins: what is loose is packed when it could fill so many; choice enough, and little is left to do
SLACK = 512  # a bin that lacks less than 1 / SLACK of its tokens is full


class StreamPacker:
    """Takes sequences one by one, microseconds each, and has their bins when asked."""

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.clear()

    def __len__(self) -> int:
        return len(self._loose) + len(self._bin_of)

    def clear(self) -> None:
        """Start over."""
        self._full: dict[Bin[FinishedTrajectory], None] = {}
        self._bin_of: dict[str, Bin[FinishedTrajectory]] = {}  # of each sequence in a full one
        self._loose: dict[str, Entry[FinishedTrajectory]] = {}  # the others
        self._loose_tokens = 0
        self._pack_at = WINDOW * self._max_tokens

    def add(self, trajectory: FinishedTrajectory) -> None:
        """Add a sequence. Raises ValueError if it is longer than `max_tokens`."""
        id, entry = trajectory.id, make_entry(trajectory)
        if entry.num_tokens > self._max_tokens:
            raise ValueError(f"{id} has {entry.num_tokens} tokens, packer.max_tokens={self._max_tokens}; raise it")
        assert (self._loose.get(id) or self._bin_of.get(id)) is None, f"{id} is packed twice"
        self._loosen(entry)
        if self._loose_tokens >= self._pack_at:
            self._keep_full()

    def remove(self, id: str) -> None:
        """Remove a sequence; those that shared its bin are loose again."""
        shared = self._bin_of.get(id)
        if shared is not None:
            del self._full[shared]
            for entry in shared.entries:
                del self._bin_of[entry.trajectory.id]
                self._loosen(entry)
        self._loose_tokens -= self._loose.pop(id).num_tokens

    def bins(self) -> list[Bin[FinishedTrajectory]]:
        """Bins of all that is here."""
        return [*self._full, *self._pack_loose()]

    def _loosen(self, entry: Entry[FinishedTrajectory]) -> None:
        self._loose[entry.trajectory.id] = entry
        self._loose_tokens += entry.num_tokens

    def _pack_loose(self) -> list[Bin[FinishedTrajectory]]:
        return fit(list(self._loose.values()), max_tokens=self._max_tokens)

    def _keep_full(self) -> None:
        for packed in self._pack_loose():
            if (self._max_tokens - packed.num_tokens) * SLACK < self._max_tokens:
                self._full[packed] = None
                for entry in packed.entries:
                    self._bin_of[entry.trajectory.id] = packed
                    del self._loose[entry.trajectory.id]
                self._loose_tokens -= packed.num_tokens
        # Doubled, so that sequences which fill no bin (all longer than half) are not packed again and again.
        self._pack_at = max(WINDOW * self._max_tokens, 2 * self._loose_tokens)
