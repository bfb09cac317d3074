"""A version that arrives at a node: `decide` whether to fetch it, and `Download`, which fetches it. No sockets.

`NodeVersions` calls both, and sends the requests that a `Download` returns.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from itertools import islice

import laminar_py.relay.messages as m
from laminar_py.relay.delta import DeltaError, apply
from laminar_py.relay.digests import chunk_checksum
from laminar_py.relay.version_store import StoredVersion

log = logging.getLogger(__name__)

# Enough bytes in flight to cover 25 Gb/s over 10 ms; a narrower window would idle between two grants.
_WINDOW_BYTES = 32 * 2**20
MIN_WINDOW, MAX_WINDOW = 4, 256  # chunks
MISSED_REMINDERS = 3  # after which a chunk is requested again
_MAX_DAMAGED = 3  # copies of one chunk, or of one file, after which the version is given up


def window_of(chunk_bytes: int) -> int:
    """Number of chunks that may be in flight to a node, e.g. 8 of 4 MiB."""
    return min(MAX_WINDOW, max(MIN_WINDOW, _WINDOW_BYTES // chunk_bytes))


class BrokenVersionError(Exception):
    """A version keeps arriving damaged; the message says which part."""


class ChunkOutcome(Enum):
    """Result of `Download.accept` for a chunk."""

    WRITTEN = "written"
    DAMAGED = "damaged"  # request it again
    USELESS = "useless"  # it is here already, or the version has no such chunk


class Download:
    """A version that arrives, e.g. `Download(store.begin(manifest), window=8, now=time.monotonic)`.

    At most `window` chunks are requested and not here yet, so a slow node holds back only itself
    (`tests/relay/test_downloads.py::test_every_chunk_is_asked_for_once_and_never_more_than_the_window`).
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
        self.wire_bytes = 0  # of undamaged chunks
        stored.base = None if base is None else base.manifest.version
        self._now = now
        self._began = now()
        self.first_byte_s = 0.0
        self._window = window  # chunks
        self._requested: dict[tuple[int, int], int] = {}  # chunk -> reminders since its request
        self._unrequested: Iterator[tuple[int, int]] = stored.missing_chunks()
        self._num_damaged: dict[tuple[int, int | None], int] = {}  # by chunk, or by file
        self._num_verified = 0  # files
        self._idle = threading.Condition()  # notified when a thread has written a chunk
        self._num_writing, self._stopped = 0, False
        self._written: set[tuple[int, int]] = set()  # chunks between `write` and `record`

    @property
    def elapsed_s(self) -> float:
        """Seconds since the download began."""
        return self._now() - self._began

    @property
    def verified(self) -> bool:
        """True once `verify_file` has found the right digest of every file."""
        return self._num_verified == len(self.stored.manifest.files)

    def fill_window(self) -> list[m.Fetch]:
        """Return requests that fill the window with further chunks; none while it is more than half full."""
        if len(self._requested) * 2 > self._window:
            return []
        chunks = list(islice(self._unrequested, self._window - len(self._requested)))
        self._requested |= dict.fromkeys(chunks, 0)
        return self._fetches(chunks)

    def repeat_overdue(self) -> list[m.Fetch]:
        """Count a reminder for each requested chunk; request chunks again at `MISSED_REMINDERS` reminders."""
        overdue = []
        for chunk, missed in self._requested.items():
            self._requested[chunk] = (missed + 1) % MISSED_REMINDERS
            if missed + 1 == MISSED_REMINDERS:
                overdue.append(chunk)
        return self._fetches(overdue)

    def restart(self) -> None:
        """Forget all requests, e.g. after a change of parent; `fill_window` then requests all missing chunks."""
        self._requested.clear()
        self._unrequested = self.stored.missing_chunks()

    def _fetches(self, chunks: Iterable[tuple[int, int]]) -> list[m.Fetch]:
        """Requests for chunks, one for each run of neighbours."""
        runs: list[list[int]] = []  # [file, first chunk, number of chunks]
        for file, index in chunks:
            if runs and runs[-1][0] == file and sum(runs[-1][1:]) == index:
                runs[-1][2] += 1
            else:
                runs.append([file, index, 1])
        return [
            m.Fetch(version=self.version, file=file, first_chunk=first, credits=count, base=self.stored.base)
            for file, first, count in runs
        ]

    def accept(self, chunk: m.Chunk, *, keep_delta: bool) -> ChunkOutcome:
        """Check and write a received chunk; with `keep_delta`, also keep its delta to forward to children.

        Raises `NoRoomError`, and `BrokenVersionError` after `_MAX_DAMAGED` damaged copies.
        """
        file, index, stored = chunk.file, chunk.index, self.stored
        if not stored.is_chunk(file, index) or stored.has_chunk(file, index):
            return ChunkOutcome.USELESS
        data = self._decode(chunk)
        outcome = ChunkOutcome.DAMAGED if data is None else self.write(chunk, data)
        if outcome is ChunkOutcome.WRITTEN and chunk.base is not None and keep_delta:
            stored.deltas[file, index] = bytes(chunk.data)
        self.record(chunk, outcome)
        return outcome

    def write(self, chunk: m.Chunk, data: memoryview) -> ChunkOutcome:
        """Check and write the bytes of a chunk, in any thread; `record` must follow on the event loop.

        Raises `NoRoomError`.
        """
        file, index, stored = chunk.file, chunk.index, self.stored
        with self._idle:
            place = (file, index)
            if (
                self._stopped
                or place in self._written
                or not stored.is_chunk(file, index)
                or stored.has_chunk(file, index)
            ):
                return ChunkOutcome.USELESS
            self._written.add(place)  # until `record`, so that no second copy changes a chunk that is present
            self._num_writing += 1
        try:
            if len(data) != stored.chunk_size(file, index) or chunk.checksum != chunk_checksum(data):
                return ChunkOutcome.DAMAGED
            stored.write_data(file, index, data)
            return ChunkOutcome.WRITTEN
        finally:
            with self._idle:
                self._num_writing -= 1
                self._idle.notify()

    def stop(self) -> None:
        """Let no thread write into the files any more; waits for the chunks in work, a few milliseconds."""
        with self._idle:
            self._stopped = True
            self._idle.wait_for(lambda: self._num_writing == 0)

    def record(self, chunk: m.Chunk, outcome: ChunkOutcome) -> None:
        """Mark a chunk present that `write` wrote, or count its damage.

        Raises `BrokenVersionError` after `_MAX_DAMAGED` damaged copies.
        """
        file, index, stored = chunk.file, chunk.index, self.stored
        if outcome is ChunkOutcome.USELESS:
            return
        self._written.discard((file, index))
        if outcome is ChunkOutcome.DAMAGED:
            self._count_damaged(file, index, f"chunk {index} of {stored.manifest.files[file].name}")
            return
        stored.mark_present(file, index, chunk.checksum)
        self.wire_bytes += stored.chunk_size(file, index) if chunk.base is None else len(chunk.data)
        self.first_byte_s = self.first_byte_s or self.elapsed_s
        self._requested.pop((file, index), None)

    def _decode(self, chunk: m.Chunk) -> memoryview | None:
        """Return a chunk's bytes in full; None for a delta that is too long, damaged, or of another base."""
        if chunk.base is None:
            return chunk.data
        if self.base is None or chunk.base != self.stored.base:
            return None
        if len(chunk.data) >= self.stored.chunk_size(chunk.file, chunk.index):
            return None  # no honest delta is so long, and it would stay in memory
        data = memoryview(bytearray(self.base.chunk_data(chunk.file, chunk.index)))
        try:
            apply(chunk.data, data, data)
        except DeltaError:
            return None
        return data

    def verify_file(self, file: int) -> None:
        """Compare the digest of a file whose chunks are all here; if it is wrong, fetch the file again.

        Raises `BrokenVersionError` after `_MAX_DAMAGED` damaged copies.
        """
        entry, digest = self.stored.manifest.files[file], self.stored.file_digest(file)
        if digest == entry.digest:
            self._num_verified += 1
            return
        self._count_damaged(file, None, f"{entry.name} (digest {digest} instead of {entry.digest})")
        self.stored.forget_file(file)
        self.restart()

    def _count_damaged(self, file: int, index: int | None, part: str) -> None:
        """Count a damaged chunk, or file if `index` is None. Raises `BrokenVersionError` at `_MAX_DAMAGED`."""
        count = self._num_damaged[file, index] = self._num_damaged.get((file, index), 0) + 1
        if count >= _MAX_DAMAGED:
            raise BrokenVersionError(f"version {self.version}: {part} came damaged {count} times")


class Decision(Enum):
    """Decision of a node about an announced version."""

    START = "start"  # download it
    RESUME = "resume"  # it arrives already: request its missing chunks again
    LATER = "later"  # download it after an arriving version that must complete first
    DECLINE = "decline"  # it is complete here, or is neither wanted nor the newest


def decide(
    announce: m.Announce,
    *,
    complete: Collection[int],
    arriving: Collection[int],
    waiting: int | None,
    wanted: bool,
    overtook: int | None,
) -> Decision:
    """Decide about an announced version, at a node with these `complete` and `arriving` versions.

    `waiting` is the version with the decision LATER. `wanted` says that a child or subscriber asked for the
    announced version by number. `overtook` is the version for which the node last abandoned another version.
    """
    version = announce.manifest.version
    if version in arriving:
        return Decision.RESUME
    if version in complete or not (wanted or version > max((*complete, *arriving), default=-1)):
        return Decision.DECLINE
    builds_on_it = announce.base is not None and (announce.base in arriving or announce.base == waiting)
    if not wanted and (overtook in arriving or builds_on_it):
        return Decision.LATER
    return Decision.START
