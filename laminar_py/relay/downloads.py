"""Versions that arrive at one node: `Downloads` decides which to fetch, and `Download` fetches one.

`NodeVersions` owns them and hands over the records of the parent. There are no sockets here. The newest version
wins, but of two versions one is always completed, however fast they are published; so is a version that the next
one builds on (`tests/relay/test_tree.py::test_however_fast_versions_come_one_of_two_is_completed`).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from itertools import islice

import msgspec

import laminar_py.relay.messages as m
from laminar_py.relay.delta import DeltaError, apply
from laminar_py.relay.digests import chunk_checksum, version_digest
from laminar_py.relay.downlink import Downlink
from laminar_py.relay.store import NoRoomError, Store, StoredVersion

log = logging.getLogger(__name__)

MAX_DOUBLINGS = 10  # of the pause before a failed version is tried again: an hour and a half
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

    @property
    def elapsed_s(self) -> float:
        """Seconds since the download began."""
        return self._now() - self._began

    @property
    def verified(self) -> bool:
        """True if every file has its digest."""
        return self._num_verified == len(self.stored.manifest.files)

    def fill_window(self) -> list[m.Fetch]:
        """Request chunks until the window is full again; nothing while it is more than half full."""
        if len(self._requested) * 2 > self._window:
            return []
        chunks = list(islice(self._unrequested, self._window - len(self._requested)))
        self._requested |= dict.fromkeys(chunks, 0)
        return self._fetches(chunks)

    def repeat_overdue(self) -> list[m.Fetch]:
        """Count a reminder, and request chunks again that missed the last `MISSED_REMINDERS`."""
        overdue = []
        for chunk, missed in self._requested.items():
            self._requested[chunk] = (missed + 1) % MISSED_REMINDERS
            if missed + 1 == MISSED_REMINDERS:
                overdue.append(chunk)
        return self._fetches(overdue)

    def restart(self) -> None:
        """Count all requests as lost, e.g. after a change of parent, and begin at the first missing chunk."""
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
        """Check and store a chunk; with `keep_delta` keep its delta, for children.

        Raises `NoRoomError`, `BrokenVersionError` at the last damaged copy or if somebody deleted the file.
        """
        file, index, stored = chunk.file, chunk.index, self.stored
        if not stored.is_chunk(file, index) or stored.has_chunk(file, index):
            return ChunkOutcome.USELESS
        data = self._decode(chunk)
        if data is None or len(data) != stored.chunk_size(file, index) or chunk.checksum != chunk_checksum(data):
            self._count_damaged(file, index, f"chunk {index} of {stored.manifest.files[file].name}")
            return ChunkOutcome.DAMAGED
        try:
            stored.write_chunk(msgspec.structs.replace(chunk, data=data, base=None))
        except FileNotFoundError as error:
            raise BrokenVersionError(f"version {self.version}: {error.filename} was deleted meanwhile") from None
        if chunk.base is not None and keep_delta:
            stored.deltas[file, index] = bytes(chunk.data)
        self.wire_bytes += len(chunk.data)
        self.first_byte_s = self.first_byte_s or self.elapsed_s
        self._requested.pop((file, index), None)
        return ChunkOutcome.WRITTEN

    def _decode(self, chunk: m.Chunk) -> memoryview | None:
        """The chunk's bytes in full; None for a delta that does not decode."""
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

        Raises `BrokenVersionError` at the last damaged copy.
        """
        entry, digest = self.stored.manifest.files[file], self.stored.file_digest(file)
        if digest == entry.digest:
            self._num_verified += 1
            return
        self._count_damaged(file, None, f"{entry.name}: its digest is {digest}, not {entry.digest};")
        self.stored.forget_file(file)
        self.restart()

    def _count_damaged(self, file: int, index: int | None, part: str) -> None:
        count = self._num_damaged[file, index] = self._num_damaged.get((file, index), 0) + 1
        if count >= _MAX_DAMAGED:
            raise BrokenVersionError(f"version {self.version}: {part} came damaged {count} times")


class Decision(Enum):
    """Decision of a node about an announced version."""

    START = "start"  # download it
    RESUME = "resume"  # it arrives already: request its missing chunks again
    LATER = "later"  # download it when the arriving version that may not be abandoned for it is complete
    DECLINE = "decline"  # it is here, or nobody needs it any more


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
    announced version by number. `overtook` is the version for which the last one was abandoned.
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


class Downloads:
    """The versions that arrive at one node.

    `send` sends a record to the parent. `is_wanted` says whether a child or subscriber asked for a version by
    number. `complete` gets each download that is verified and committed, `discard` the folder of a version that is
    dropped, and `give_up` a version that the node cannot have, with the reason.
    """

    def __init__(
        self,
        store: Store,
        downlink: Downlink,
        *,
        chunk_bytes: int,
        send: Callable[[m.Upward], None],
        is_wanted: Callable[[int], bool],
        complete: Callable[[Download], None],
        discard: Callable[[StoredVersion], None],
        give_up: Callable[[int, str], None],
        now: Callable[[], float],
    ) -> None:
        self._store = store
        self._downlink = downlink
        self._chunk_bytes = chunk_bytes
        self._send = send
        self._is_wanted = is_wanted
        self._complete = complete
        self._discard = discard
        self._give_up = give_up
        self._now = now
        self._downloads: dict[int, Download] = {}  # by version
        self._overtook: int | None = None  # arriving version for which another one was abandoned
        self._later: m.Announce | None = None  # the newest with `Decision.LATER`
        self._failed = -1  # the highest version that was given up
        self._num_failures = 0  # of that version
        self._pause = 0  # reminders before the parent may announce it again: twice as many after each failure

    def __contains__(self, version: int) -> bool:
        return version in self._downloads

    def __len__(self) -> int:
        return len(self._downloads)

    @property
    def newest(self) -> int:
        """The highest version that is complete here or arrives, -1 if there is none."""
        return max(self._store.newest, *self._downloads, -1)

    @property
    def bases(self) -> set[int]:
        """Versions that the arriving ones build on."""
        found = (download.stored.base for download in self._downloads.values())
        return {base for base in found if base is not None}

    def find(self, version: int) -> StoredVersion | None:
        """The version's folder, if it arrives."""
        return self._downloads[version].stored if version in self._downloads else None

    def greet(self) -> None:
        """Ask a new parent for the versions that arrive."""
        self._later, self._pause = None, 0  # the parent will announce them again
        for version in self._downloads:
            self._send(m.Want(version))

    def remind(self) -> None:
        """Tell the parent the highest known version, and request overdue chunks again."""
        failed = self._failed if self._pause > 0 else -1
        waiting = -1 if self._waiting is None else self._waiting
        self._send(m.Attach(max(self.newest, waiting, failed)))
        self._pause -= 1
        for download in self._downloads.values():
            for fetch in download.repeat_overdue():
                self._send(fetch)

    def note_failure(self, version: int) -> None:
        """Note that the node cannot have a version now; the parent may announce it again after a pause."""
        if version >= self._failed:
            self._num_failures = self._num_failures + 1 if version == self._failed else 1
            self._failed = version
            self._pause = 2 ** min(self._num_failures, MAX_DOUBLINGS)

    @property
    def _waiting(self) -> int | None:
        return None if self._later is None else self._later.manifest.version

    def handle_announce(self, announce: m.Announce) -> None:
        """Decide about a version that the parent has, or has a part of."""
        version = announce.manifest.version
        decision = decide(
            announce,
            complete=self._store.complete,
            arriving=self._downloads,
            waiting=self._waiting,
            wanted=self._is_wanted(version),
            overtook=self._overtook,
        )
        match decision:
            case Decision.START:
                try:
                    self._start_download(announce)
                except (NoRoomError, BrokenVersionError) as error:
                    self._give_up(version, str(error))
            case Decision.RESUME:
                self._downloads[version].restart()
                self._fill_window(self._downloads[version])
            case Decision.LATER:
                self._later = announce
                for arriving in self._downloads.keys() & {self._overtook, announce.base}:
                    self._send(m.Want(arriving, arriving=True))  # the parent may not abandon it either
            case Decision.DECLINE:
                self._send(m.Done(version))
                self._compare_digests(announce.manifest)

    def handle_chunk(self, chunk: m.Chunk) -> None:
        """Store a chunk that the parent sent, and complete the version with its last chunk."""
        download = self._downloads.get(chunk.version)
        if download is None:
            return  # the version was overtaken while the chunk was in flight
        try:
            self._accept(download, chunk)
        except (NoRoomError, BrokenVersionError) as error:
            self._give_up(chunk.version, str(error))

    def drop(self, version: int) -> None:
        """Stop the download of a version, if it arrives."""
        download = self._downloads.pop(version, None)
        if download is not None:
            self._downlink.forget_version(version)
            self._discard(download.stored)

    def start_waiting(self) -> None:
        """Decide again about the version that waits, since a download ended."""
        announce, self._later = self._later, None
        if announce is not None:
            self.handle_announce(announce)

    def _start_download(self, announce: m.Announce) -> None:
        """Start to download an announced version, and announce it to children.

        If it is the newest version, it replaces running downloads of versions that no child or subscriber wants.
        Raises `NoRoomError`, `BrokenVersionError`.
        """
        manifest = announce.manifest
        self._check_manifest(manifest)
        overtaken = []
        if manifest.version > self.newest:  # the newest version wins
            overtaken = [item.stored for item in self._downloads.values() if not self._is_wanted(item.version)]
        self._store.check_room(manifest, freed_bytes=sum(stored.allocated_bytes for stored in overtaken))
        for stored in overtaken:
            self.drop(stored.manifest.version)
            self._send(m.Done(stored.manifest.version))
            self._overtook = manifest.version
        if self._overtook == manifest.version:
            self._send(m.Want(manifest.version, arriving=True))  # the parent may not abandon it either
        base = None if announce.base is None else self._store.complete.get(announce.base)
        if base is not None and not manifest.has_layout_of(base.manifest):
            base = None
        stored = self._store.begin(manifest)
        download = Download(stored, window=window_of(manifest.chunk_bytes), now=self._now, base=base)
        self._downloads[manifest.version] = download
        self._downlink.announce(stored, newest=manifest.version == self.newest)
        self._fill_window(download)

    def _check_manifest(self, manifest: m.Manifest) -> None:
        """Raise `BrokenVersionError` if a manifest contradicts itself, or has larger chunks than this node."""
        if manifest.digest != version_digest(manifest.files):
            raise BrokenVersionError(f"version {manifest.version}: its digest is not that of its files")
        if len({entry.name for entry in manifest.files}) < len(manifest.files):
            raise BrokenVersionError(f"version {manifest.version}: two of its files have one name")
        if manifest.chunk_bytes > self._chunk_bytes:
            raise BrokenVersionError(
                f"version {manifest.version} was cut into chunks of {manifest.chunk_bytes} bytes, above the"
                f" {self._chunk_bytes} of this node; start the publisher and all nodes with the same"
            )

    def _accept(self, download: Download, chunk: m.Chunk) -> None:
        """Write a chunk and forward it to children; commit the version after its last verified file.

        A damaged chunk is fetched again. Raises `BrokenVersionError` if files of the version are gone.
        """
        outcome = download.accept(chunk, keep_delta=self._downlink.has_children)
        if outcome is ChunkOutcome.DAMAGED:
            self._send(m.Fetch(version=chunk.version, file=chunk.file, first_chunk=chunk.index, credits=1))
        if outcome is not ChunkOutcome.WRITTEN:
            return
        self._downlink.forward_chunk(download.stored, chunk.file, chunk.index)
        if download.stored.has_file(chunk.file):
            download.verify_file(chunk.file)
        if not download.verified:
            self._fill_window(download)
            return
        if not download.stored.has_all_files():
            folder = download.stored.folder
            raise BrokenVersionError(
                f"version {download.version}: files in {folder} were deleted while it arrived"
            )
        self._store.commit(download.stored)
        del self._downloads[download.version]
        self._send(m.Done(download.version))
        self._complete(download)
        self.start_waiting()

    def _fill_window(self, download: Download) -> None:
        for fetch in download.fill_window():
            self._send(fetch)

    def _compare_digests(self, manifest: m.Manifest) -> None:
        """Log an error if the parent has another content under the number of a version that is here."""
        here = self._store.complete.get(manifest.version)
        if here is not None and here.manifest.digest != manifest.digest:
            log.error(
                "version %d is here as %s, and the parent has it as %s: publish under a number of its own",
                manifest.version,
                here.manifest.digest,
                manifest.digest,
            )
