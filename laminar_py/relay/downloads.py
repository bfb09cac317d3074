"""A version that arrives at a node: `decide` whether to fetch it, and `Download`, which fetches it. No sockets.

`NodeVersions` calls both, and sends the requests that a `Download` returns.
"""

import logging
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from enum import Enum

import laminar_py.relay.messages as m
from laminar_py.relay.changes import ChangesFile
from laminar_py.relay.delta import DeltaError, unpack
from laminar_py.relay.digests import delta_proof
from laminar_py.relay.frames import ChunkBody
from laminar_py.relay.requests import PARENT, Requests
from laminar_py.relay.stored_version import StoredVersion

log = logging.getLogger(__name__)

_MAX_DAMAGED = 3  # copies of one chunk, or of one file, after which the version is given up


class BrokenVersionError(Exception):
    """A version keeps arriving damaged; the message says which part."""


class ChunkOutcome(Enum):
    """Result of `Download.accept` for a chunk."""

    WRITTEN = "written"
    DAMAGED = "damaged"  # request it again
    USELESS = "useless"  # it is here already, its source was left, or the version has no such chunk


class Download:
    """A version that arrives, e.g. `Download(store.begin(manifest), window=8, now=time.monotonic)`.

    At most `window` full chunks are requested and not here yet, so a slow node holds back only itself
    (`tests/relay/test_downloads.py::test_every_chunk_is_asked_for_once_and_never_more_than_the_window`).
    With `base`, a complete version of the same layout, chunks may come as deltas against it. A delta is proven by
    its own checksum, added to `changes`, and kept; `rebuild` makes the bytes of its chunk later. Threads call
    `write` and `rebuild`, at most one for a chunk: it claims the chunk until `record` or `rebuilt`.
    """

    def __init__(
        self,
        stored: StoredVersion,
        *,
        window: int,
        now: Callable[[], float],
        base: StoredVersion | None = None,
        changes: ChangesFile | None = None,
    ) -> None:
        self.stored = stored
        self.version = stored.manifest.version
        self.base = base
        self.changes = changes  # None also where the version cannot have a change file
        self.rebuilding = False  # while threads make chunks of their deltas
        self.requests = Requests(stored, window=window)
        self.wire_bytes = 0  # of undamaged chunks
        self.other_bytes = 0  # of `wire_bytes`, from other nodes than the parent
        self._now = now
        self._began = now()
        self.first_byte_s = 0.0
        self._num_damaged: dict[tuple[int, int | None], int] = {}  # by chunk, or by file
        self._verified: set[int] = set()  # files
        self._idle = threading.Condition()  # notified when a thread has written a chunk
        self._num_writing, self._stopped = 0, False
        self._claimed: set[tuple[int, int]] = set()  # chunks that are being written, or wait for the event loop

    @property
    def elapsed_s(self) -> float:
        """Seconds since the download began."""
        return self._now() - self._began

    @property
    def arrived(self) -> bool:
        """True while all chunks or their deltas are here, and the checksums that came with them are right."""
        return len(self._verified) == len(self.stored.manifest.files)

    def accept(self, chunk: m.Chunk, source: str = PARENT) -> ChunkOutcome:
        """Check a chunk from `source`; write it, or keep it if it is a delta. Call this on the event loop.

        Raises `NoRoomError`, and `BrokenVersionError` if the file system fails or after `_MAX_DAMAGED` damaged
        copies.
        """
        return self.record(chunk, self.write(chunk, ChunkBody(chunk.data), source), source)

    def write(self, chunk: m.Chunk, body: ChunkBody, source: str = PARENT) -> ChunkOutcome:
        """Check a chunk in any thread, and write its `body`, or the changes that the delta `chunk.data` makes.

        `record` must follow on the event loop; a delta's bytes are kept there. Raises `NoRoomError`,
        `BrokenVersionError` if the file system fails, and `LaneError`.
        """
        file, index, stored = chunk.file, chunk.index, self.stored
        if not self.requests.has_source(source):
            return ChunkOutcome.USELESS
        with self._claim(file, index, stored.is_missing) as claimed:
            if not claimed:
                return ChunkOutcome.USELESS
            if chunk.base is not None:
                right = self._unpack(chunk)
            else:
                right = body.size == stored.chunk_size(file, index) and stored.write_chunk(chunk, body)
            return ChunkOutcome.WRITTEN if right else ChunkOutcome.DAMAGED

    @contextmanager
    def _claim(self, file: int, index: int, is_due: Callable[[int, int], bool]) -> Iterator[bool]:
        """Claim a chunk for this thread, which writes it inside the block.

        Yields False if another thread has claimed it, `is_due` is false for it, or the download was stopped. An
        error in the block ends the claim; an `OSError` becomes `BrokenVersionError`.
        """
        with self._idle:
            claimed = (
                not self._stopped
                and (file, index) not in self._claimed
                and self.stored.is_chunk(file, index)
                and is_due(file, index)
            )
            if claimed:
                self._claimed.add((file, index))
                self._num_writing += 1
        try:
            yield claimed
        except Exception as error:
            if claimed:
                self._claimed.discard((file, index))
            if isinstance(error, OSError):
                raise BrokenVersionError(f"version {self.version}: {error}") from error
            raise
        finally:
            if claimed:
                with self._idle:
                    self._num_writing -= 1
                    self._idle.notify()

    def stop(self) -> None:
        """Let no thread write into the files any more; waits for the chunks in work, a few milliseconds."""
        with self._idle:
            self._stopped = True
            self._idle.wait_for(lambda: self._num_writing == 0)

    def record(self, chunk: m.Chunk, outcome: ChunkOutcome, source: str = PARENT) -> ChunkOutcome:
        """Note the outcome of a chunk that `source` sent: mark it present, or count its damage.

        Returns the outcome, USELESS where the source was left since the write. Raises `BrokenVersionError` after
        `_MAX_DAMAGED` damaged copies.
        """
        file, index, stored = chunk.file, chunk.index, self.stored
        if outcome is ChunkOutcome.USELESS:
            return outcome
        self._claimed.discard((file, index))
        if not self.requests.has_source(source):
            return ChunkOutcome.USELESS
        if outcome is ChunkOutcome.DAMAGED:
            self._count_damaged_chunk(file, index)
            return outcome
        if chunk.base is None:
            self.drop_changes()
            stored.mark_present(file, index, chunk.checksum)
        else:
            stored.keep_delta(chunk)
        num_bytes = stored.chunk_size(file, index) if chunk.base is None else len(chunk.data)
        self.wire_bytes += num_bytes
        self.other_bytes += num_bytes if source != PARENT else 0
        self.requests.widen(num_bytes / stored.chunk_size(file, index))
        self.first_byte_s = self.first_byte_s or self.elapsed_s
        self.requests.arrived((file, index))
        return outcome

    def _unpack(self, chunk: m.Chunk) -> bool:
        """Check a delta, and add it to the changes; False if it is damaged, of another base or too long."""
        base, stored, changes, payload = self.base, self.stored, self.changes, chunk.data
        if base is None or chunk.base != stored.base or len(payload) >= stored.chunk_size(chunk.file, chunk.index):
            return False  # no honest delta is so long, and it stays in memory
        if chunk.proof != delta_proof(base.manifest.digest, payload):
            return False
        if changes is not None:
            data, width = base.chunk_data(chunk.file, chunk.index), stored.manifest.files[chunk.file].width
            try:
                difference = unpack(payload, data, width=width)
            except DeltaError:
                return False
            if not changes.add(chunk.file, chunk.index, difference):
                self.changes = None
        return True

    def drop_changes(self) -> None:
        """Delete the unfinished change file, if there is one: the version gets none."""
        changes, self.changes = self.changes, None  # a thread may set it to None, too
        if changes is not None:
            changes.drop()

    def rebuild(self, file: int, index: int) -> bool | None:
        """Make a chunk of its delta, in any thread: False if it comes out wrong; None if it is not needed.

        Unless it is None, `rebuilt` must follow on the event loop. Raises `NoRoomError`, and
        `BrokenVersionError` if the base is gone or the file system fails.
        """
        assert self.base is not None, f"{self.stored.folder} has deltas without a base"
        with self._claim(file, index, self.stored.is_waiting) as claimed:
            return self.stored.rebuild(self.base, file, index) if claimed else None

    def rebuilt(self, file: int, index: int, *, right: bool) -> m.Fetch | None:
        """Note the result of `rebuild`; where it is wrong, return the request for the chunk in full.

        Raises `BrokenVersionError` after `_MAX_DAMAGED` damaged copies.
        """
        stored = self.stored
        self._claimed.discard((file, index))
        if not stored.is_waiting(file, index):
            return None  # its file was forgotten meanwhile
        if right:
            stored.mark_present(file, index)
            return None
        self._verified.discard(file)
        stored.forget_chunk(file, index)
        self._count_damaged_chunk(file, index)
        return self.requests.ask_again((file, index), PARENT)[1]

    def verify_file(self, file: int) -> None:
        """Compare the digest of a file that has arrived; if it is wrong, fetch the file again.

        Raises `BrokenVersionError` after `_MAX_DAMAGED` damaged copies.
        """
        entry, digest = self.stored.manifest.files[file], self.stored.file_digest(file)
        if digest == entry.digest:
            self._verified.add(file)
            return
        self._count_damaged(file, None, f"{entry.name} (digest {digest} instead of {entry.digest})")
        self.drop_changes()
        self.stored.forget_file(file)
        self.requests.trust_parent_only()  # another source may have sent a wrong chunk with its right checksum

    def _count_damaged_chunk(self, file: int, index: int) -> None:
        self._count_damaged(file, index, f"chunk {index} of {self.stored.manifest.files[file].name}")

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
    announced version by number. `overtook` is an arriving version that must complete, since the node abandoned
    another one for it or has all of its deltas.
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
