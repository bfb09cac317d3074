"""KV cache of turns that have ended, for the next turn of the same request. Owned by `BlockPool`.

Invariant: of a request there is one at most, and the longest kept makes room first.
"""

from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt

from laminar_py.records.codec import IntArray

_FIRST_NUMBER = -2  # below everything else that a block may belong to


@dataclass(frozen=True, slots=True)
class Kept:
    """KV cache of `ids`, e.g. `Kept("math-3.1", ids, np.array([7, 3]))` of a turn of 40 tokens."""

    rid: str
    ids: IntArray  # [n]
    blocks: npt.NDArray[np.int64]  # [blocks that n tokens take]


class KeptCaches:
    """Kept caches by number, which stands for them where blocks have their owner."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}  # the longest kept first
        self._numbers: dict[str, int] = {}  # by rid
        self._next = count(_FIRST_NUMBER, -1)

    def add(self, kept: Kept) -> int:
        """Keep a cache; returns its number."""
        assert kept.rid not in self._numbers, f"{kept.rid}: a turn ended before the one before was asked for"
        number = next(self._next)
        self._kept[number], self._numbers[kept.rid] = kept, number
        return number

    def take(self, rid: str) -> Kept | None:
        """Keep that of `rid` no more; None if there is none."""
        number = self._numbers.pop(rid, None)
        return None if number is None else self._kept.pop(number)

    def take_oldest(self) -> Kept | None:
        """Keep the one no more that was kept for longest; None if there is none."""
        return self.take(next(iter(self._kept.values())).rid) if self._kept else None

    def moved(self, number: int, place: int, block: int) -> None:
        """Note that a block of `number`, at `place` among those it has, is now `block`."""
        self._kept[number].blocks[place] = block
