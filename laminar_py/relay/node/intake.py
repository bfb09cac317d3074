"""Arrival of a version: the window of credits, what was asked for, and what came damaged. No sockets.

Used by the node, once per arriving version. Invariant: at most `window` chunks are asked for and not yet here,
so a slow node holds back only itself.
"""

from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import islice

import msgspec

from laminar_py.relay.store.delta import DeltaError, apply
from laminar_py.relay.store.digests import chunk_checksum
from laminar_py.relay.store.version import StoredVersion
from laminar_py.relay.wire.messages import Chunk, Fetch

# Enough bytes on their way to cover 25 Gb/s over 10 ms; a narrower window would idle between grants.
_WINDOW_BYTES = 32 * 2**20
MIN_WINDOW, MAX_WINDOW = 4, 256  # chunks
MISSED = 3  # calls of `overdue` after which a chunk is asked for again
_MAX_REFUSALS = 3  # damaged copies of one chunk, or of one file, after which the version is given up


def window_of(chunk_bytes: int) -> int:
    """Chunks of this size that may be on their way to a node, e.g. 8 of 4 MiB."""
    return min(MAX_WINDOW, max(MIN_WINDOW, _WINDOW_BYTES // chunk_bytes))


class ChunkOutcome(Enum):
    """Fate of a chunk that came."""

    WRITTEN = "written"
    DAMAGED = "damaged"  # ask for it again
    USELESS = "useless"  # here already, or none of this version


class BrokenVersionError(Exception):
    """A version keeps arriving damaged; the message says which part."""


class Intake:
    """An arriving version, e.g. `Intake(store.begin(manifest), window=8, now=time.monotonic)`.

    With `base`, a complete version of the same layout, chunks may come as deltas against it.
    """

    def __init__(
        self,
        stored: StoredVersion,
        *,
        window: int,
        now: Callable[[], float],
        base: StoredVersion | None = None,
    ) -> None:
        self.stored = stored
        self.version = stored.manifest.version
        self.base = base
        self.wire_bytes = 0  # of chunks that were right
        stored.base = None if base is None else base.manifest.version
        self._now = now
        self._began = now()
        self.first_byte_s = 0.0
        self._window = window  # chunks
        self._asked: dict[tuple[int, int], int] = {}  # chunk -> how often it was found missing since
        self._unasked: Iterator[tuple[int, int]] = stored.missing()
        self._refusals: dict[tuple[int, int | None], int] = {}
        self._num_verified = 0  # files

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was begun."""
        return self._now() - self._began

    @property
    def verified(self) -> bool:
        """True if every file has its digest."""
        return self._num_verified == len(self.stored.manifest.files)

    def overdue(self) -> list[Fetch]:
        """Requests for chunks that were asked for, and had not come at the last two calls either."""
        late = []
        for chunk, missed in self._asked.items():
            self._asked[chunk] = (missed + 1) % MISSED
            if missed + 1 == MISSED:
                late.append(chunk)
        return self._fetches(late)

    def restart(self) -> None:
        """Begin again at the first missing chunk: what was asked for will not come (a new parent)."""
        self._asked.clear()
        self._unasked = self.stored.missing()

    def grant(self) -> list[Fetch]:
        """Requests that fill the window again, runs of chunks joined; empty while it is more than half full."""
        if len(self._asked) * 2 > self._window:
            return []
        asking = list(islice(self._unasked, self._window - len(self._asked)))
        self._asked |= dict.fromkeys(asking, 0)
        return self._fetches(asking)

    def _fetches(self, chunks: Iterable[tuple[int, int]]) -> list[Fetch]:
        runs: list[list[int]] = []  # [file, first chunk, chunks]
        for file, index in chunks:
            if runs and runs[-1][0] == file and sum(runs[-1][1:]) == index:
                runs[-1][2] += 1
            else:
                runs.append([file, index, 1])
        return [
            Fetch(version=self.version, file=file, first_chunk=first, credits=count, base=self.stored.base)
            for file, first, count in runs
        ]

    def accept(self, chunk: Chunk, *, keep_delta: bool) -> ChunkOutcome:
        """Check and store a chunk; `keep_delta` to pass it on as it came.

        Raises `NoRoomError`, or `BrokenVersionError` at the last damaged copy.
        """
        file, index, stored = chunk.file, chunk.index, self.stored
        if not stored.knows(file, index) or stored.has(file, index):
            return ChunkOutcome.USELESS
        data = self._content(chunk)
        if data is None or len(data) != stored.chunk_size(file, index) or chunk.checksum != chunk_checksum(data):
            self._refuse(file, index, f"chunk {index} of {stored.manifest.files[file].name}")
            return ChunkOutcome.DAMAGED
        try:
            stored.write(msgspec.structs.replace(chunk, data=data, base=None))
        except FileNotFoundError as error:
            raise BrokenVersionError(f"version {self.version}: {error.filename} was deleted meanwhile") from None
        if chunk.base is not None and keep_delta:
            stored.deltas[file, index] = bytes(chunk.data)
        self.wire_bytes += len(chunk.data)
        self.first_byte_s = self.first_byte_s or self.elapsed_s
        self._asked.pop((file, index), None)
        return ChunkOutcome.WRITTEN

    def _content(self, chunk: Chunk) -> memoryview | None:
        """The piece itself; None for a delta that makes none."""
        if chunk.base is None:
            return chunk.data
        if self.base is None or chunk.base != self.stored.base:
            return None
        if len(chunk.data) >= self.stored.chunk_size(chunk.file, chunk.index):
            return None  # none of ours is; it would be kept in memory
        data = self.base.copy_of(chunk.file, chunk.index)
        try:
            apply(chunk.data, data, data)
        except DeltaError:
            return None
        return data

    def judge_file(self, file: int) -> None:
        """Compare a file whose chunks are all here with its digest; if that differs, it is missing once more.

        Raises `BrokenVersionError` at the last try.
        """
        entry, digest = self.stored.manifest.files[file], self.stored.file_digest(file)
        if digest == entry.digest:
            self._num_verified += 1
            return
        self._refuse(file, None, f"{entry.name}: its digest is {digest}, not {entry.digest};")
        self.stored.forget_file(file)
        self.restart()

    def _refuse(self, file: int, index: int | None, what: str) -> None:
        count = self._refusals[file, index] = self._refusals.get((file, index), 0) + 1
        if count >= _MAX_REFUSALS:
            raise BrokenVersionError(f"version {self.version}: {what} came damaged {count} times")
