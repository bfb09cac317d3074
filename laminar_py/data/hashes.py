"""Places of a list by the hash of what stands there, 12 bytes each, where a `dict` has a hundred."""

from collections.abc import Sequence

import numpy as np

from laminar_py.records.codec import IntArray


class HashIndex:
    """Places by hash, in order, e.g. of `[7, 3, 7]` places 0 and 2 by 7; what stands there is to be compared."""

    def __init__(self, hashes: Sequence[int]) -> None:
        given = np.array(hashes, dtype=np.int64)
        self._order = np.argsort(given, kind="stable").astype(np.int32)  # [n] places
        self._hashes = given[self._order]  # [n] of them, sorted

    def places(self, hash: int) -> IntArray:
        """[m] places that have this hash."""
        begin, end = (np.searchsorted(self._hashes, hash, side=side) for side in ("left", "right"))
        return self._order[begin:end]

    def repeats(self) -> IntArray:
        """[r, 2] places whose hash stands before, in order, each after the last one where it does."""
        again = self._hashes[1:] == self._hashes[:-1]
        pairs = np.stack([self._order[1:][again], self._order[:-1][again]], axis=1)
        ordered: IntArray = pairs[np.argsort(pairs[:, 0])]
        return ordered
