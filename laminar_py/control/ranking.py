"""Replicas by version and load, in order, so that a choice looks at the first and not at all of them. Pure.

Owned by `control.views`. Invariant: a replica is in a ranking once or not at all, where it was put last. A change
costs a search in a sorted list and one move of its memory; an answer costs as much as there are versions.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from heapq import merge
from typing import TypeAlias

Entry: TypeAlias = tuple[int, int]  # load and index of a replica


class Ranking:
    """Replicas of each version, the least loaded first, then the lowest index, e.g. `{7: [(0, 12), (3, 4)]}`."""

    def __init__(self) -> None:
        self._by_version: dict[int, list[Entry]] = {}  # none is empty
        self._places: dict[int, tuple[int, Entry]] = {}  # version and entry of each that is in it

    def put(self, index: int, version: int | None, *, load: int = 0) -> None:
        """Put a replica under a version, wherever it was before; None takes it out."""
        place = None if version is None else (version, (load, index))
        known = self._places.get(index)
        if place == known:
            return
        if known is not None:
            entries = self._by_version[known[0]]
            del entries[bisect_left(entries, known[1])]
            if not entries:
                del self._by_version[known[0]]
            del self._places[index]
        if place is not None:
            insort(self._by_version.setdefault(place[0], []), place[1])
            self._places[index] = place

    def of(self, version: int) -> Sequence[Entry]:
        """Replicas of a version."""
        return self._by_version.get(version, ())

    def below(self, version: int) -> Iterator[Entry]:
        """Replicas of all older versions, in order."""
        return merge(*(entries for known, entries in self._by_version.items() if known < version))

    @property
    def by_version(self) -> Mapping[int, Sequence[Entry]]:
        """Replicas of each version that has any."""
        return self._by_version
