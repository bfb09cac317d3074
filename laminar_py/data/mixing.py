"""Sources side by side, and each one's rows without end. Pure functions of a place and the seed."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from laminar_py.records.codec import IntArray

SLOTS = 1000  # places that are divided by weight
CACHED = 8  # blocks or epochs; a lost prompt of an older one costs a permutation


class WeightedSources:
    """Places of a stream divided among sources by weight, e.g. 3 to 1: of each 1000 places 750 and 250.

    Each source has places of its own, 0, 1, 2, ..., in order.
    """

    def __init__(self, weights: Sequence[float], *, seed: int) -> None:
        total = sum(weights)
        self._slots = [max(1, round(SLOTS * weight / total)) for weight in weights]
        self._seed = seed
        self._block = lru_cache(maxsize=CACHED)(self._shuffled)

    def at(self, place: int) -> tuple[int, int]:
        """The source of a place, and its own place there."""
        if len(self._slots) == 1:
            return 0, place
        number, offset = divmod(place, sum(self._slots))
        sources, ranks = self._block(number)
        source = int(sources[offset])
        return source, number * self._slots[source] + int(ranks[offset])

    def _shuffled(self, number: int) -> tuple[IntArray, IntArray]:
        sources = np.repeat(np.arange(len(self._slots), dtype=np.int32), self._slots)
        np.random.default_rng((self._seed, number, len(self._slots))).shuffle(sources)
        ranks = np.zeros_like(sources)
        for source, slots in enumerate(self._slots):
            ranks[sources == source] = np.arange(slots, dtype=np.int32)
        return sources, ranks


class Epochs:
    """Rows of a source without end: epoch after epoch, each a permutation of its own.

    With 3 rows, places 0 to 2 hold every row once, and so do 3 to 5 in another order. Places may be asked for in
    any order; each costs O(1) once its epoch has been seen.
    """

    def __init__(self, num_rows: int, *, seed: int, source: int) -> None:
        assert num_rows, "a stream needs a prompt"
        self.num_rows = num_rows
        self._key = (seed, source) if source else (seed,)
        self.order = lru_cache(maxsize=CACHED)(self._permute)  # [num_rows] rows of an epoch

    def row(self, place: int) -> int:
        """The row at a place >= 0."""
        epoch, offset = divmod(place, self.num_rows)
        return int(self.order(epoch)[offset])

    def _permute(self, epoch: int) -> IntArray:
        rows = np.arange(self.num_rows, dtype=np.int32)
        np.random.default_rng((*self._key, epoch)).shuffle(rows)
        return rows
