"""Rate at which a node may send chunks, and those that wait for their turn. Pure; used by the downlink alone.

Invariant: in any time T chunks of at most `bytes_per_s * (T + SLACK_S)` bytes go out, and one chunk more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from laminar_py.relay.store.version import StoredVersion

SLACK_S = 0.01  # that may be made up for; else timers, which ring late, would keep small chunks far below the cap


class Pace:
    """A cap in bytes per second on what is sent, e.g. `Pace(1e6, now=time.monotonic)`; None: no cap.

    What is sent is spent afterwards, so a chunk of any size may go, and then nothing until it is paid for.
    """

    def __init__(self, bytes_per_s: float | None, *, now: Callable[[], float]) -> None:
        self._s_per_byte = 0.0 if bytes_per_s is None else 1 / bytes_per_s
        self._now = now
        self._paid_at = -math.inf

    @property
    def wait_s(self) -> float:
        """Seconds until something may be sent; 0 if at once."""
        return max(0.0, self._paid_at - self._now())

    def spend(self, num_bytes: int) -> None:
        """So much has been sent just now."""
        self._paid_at = max(self._paid_at, self._now() - SLACK_S) + num_bytes * self._s_per_byte


@dataclass(frozen=True, slots=True)
class Owed:
    """A chunk that a child asked for, e.g. chunk 3 of file 0 as a delta against version 6: `Owed(v7, 0, 3, 6)`."""

    stored: StoredVersion
    file: int
    index: int
    base: int | None  # version that the child has


Place: TypeAlias = tuple[int, int, int]  # version, file, chunk


class ChunkQueue:
    """Chunks that wait to be sent: one of each child in turn, of one child as it asked.

    Bounded by the children's windows: a chunk that is asked for again keeps its place.
    """

    def __init__(self) -> None:
        self._waiting: dict[bytes, dict[Place, Owed]] = {}  # by child; never empty ones

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, child: bytes, owed: Owed) -> None:
        """Let it wait."""
        place = (owed.stored.manifest.version, owed.file, owed.index)
        self._waiting.setdefault(child, {})[place] = owed

    def take(self) -> tuple[bytes, Owed]:
        """The next child and its chunk; the child is last now."""
        child = next(iter(self._waiting))
        chunks = self._waiting.pop(child)
        owed = chunks.pop(next(iter(chunks)))
        if chunks:
            self._waiting[child] = chunks
        return child, owed

    def drop(self, version: int, child: bytes | None = None) -> None:
        """Forget chunks of a version that is wanted no more, by one child or by all."""
        for one in list(self._waiting) if child is None else self._waiting.keys() & {child}:
            left = {place: owed for place, owed in self._waiting[one].items() if place[0] != version}
            if left:
                self._waiting[one] = left
            else:
                del self._waiting[one]

    def leave(self, child: bytes) -> None:
        """The child is gone."""
        self._waiting.pop(child, None)
