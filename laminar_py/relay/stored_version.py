"""A version folder on disk, complete or arriving: its chunks, their checksums and their deltas.

`VersionStore` makes and finds them, and downloads fill them. The publisher uses the functions that describe a
folder.
"""

import errno
import mmap
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from laminar_py.config.section import ConfigError
from laminar_py.relay.delta import Buffer, DeltaError, Difference, apply, compare
from laminar_py.relay.digests import chunk_checksum, digest_of
from laminar_py.relay.frames import ChunkBody
from laminar_py.relay.mapped_file import MappedFile
from laminar_py.relay.messages import CHECKSUM_BYTES, Chunk, Manifest, Runs

MANIFEST = "manifest.json"
CHECKSUMS = "checksums"  # of all chunks, file by file
_MISSING, _DELTA, _WHOLE = range(3)  # states of a chunk: its delta is here, or all of its bytes
# Deltas of at most this part of a chunk update an older version in place; more would cost more than a copy.
_IN_PLACE = 1 / 16
_PIECE_BYTES = 16 * 2**20  # of a mapping, whose pages are let go at once


class NoRoomError(ConfigError):
    """The file system of a store cannot hold a version; the message names relay.shm and the bytes needed."""


@contextmanager
def no_room_errors(store: Path, version: int, num_bytes: int) -> Iterator[None]:
    """Turn a full file system or quota inside the block, which writes a version, into `NoRoomError`."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise no_room(store, version, num_bytes) from error


def no_room(store: Path, version: int, num_bytes: int) -> NoRoomError:
    """Make the error for a version of `num_bytes` that does not fit into a store."""
    free = shutil.disk_usage(store).free
    return NoRoomError(
        f"relay.shm={store}: version {version} needs at least {num_bytes} bytes and {free} are free;"
        " enlarge that file system, set relay.shm to another, or lower relay.keep_versions"
    )


def describe_version(folder: Path, manifest: Manifest, checksums: Sequence[bytes | bytearray]) -> None:
    """Write `manifest.json`, and the checksums of each file's chunks, into a version folder."""
    (folder / CHECKSUMS).write_bytes(b"".join(checksums))
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


class ChunkDelta(NamedTuple):
    """A chunk's delta as it travels, e.g. `ChunkDelta(payload, delta_proof(base.manifest.digest, payload))`."""

    payload: Buffer
    proof: bytes


class StoredVersion:
    """A version in a store, complete or arriving, chunk by chunk; also its deltas against the version before.

    A delta that arrives is kept first; `rebuild` makes the chunk of it later. A file is mapped for reads at its
    first read, and stays so as long as this object or one of its chunks lives: meanwhile the file is no spare page
    for others. While the version arrives, `pages` has the files open for writes.
    """

    def __init__(self, manifest: Manifest, folder: Path, *, complete: bool) -> None:
        self.manifest = manifest
        self.folder = folder
        counts = [manifest.num_chunks(file) for file in range(len(manifest.files))]
        self._states = [bytearray([_WHOLE if complete else _MISSING]) * count for count in counts]  # by file
        self._num_missing = [0 if complete else count for count in counts]  # by file
        self._num_deltas = [0] * len(counts)  # chunks in state `_DELTA`, by file
        self._checksums = [bytearray(CHECKSUM_BYTES * count) for count in counts]  # [num_chunks, CHECKSUM_BYTES]
        self.pages: list[MappedFile] = []  # of a version that arrived here, by file; the store keeps them open
        self._mapped: dict[int, mmap.mmap] = {}  # by file, from the first read on
        self.base: int | None = None  # version that `deltas` build on
        self.deltas: dict[tuple[int, int], ChunkDelta] = {}  # by chunk
        self._older: list[dict[tuple[int, int], ChunkDelta]] = []  # deltas from the files' old content to the base
        # Mapped files with that old content, but for chunks that came in full and right
        self._in_place: set[int] = set()
        self.unencoded: set[tuple[int, int]] = set()  # chunks whose deltas the root still makes

    @classmethod
    def load(cls, folder: Path) -> "StoredVersion":
        """Read the complete version in a folder. Raises `ConfigError` if its manifest was damaged."""
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"version={folder}: {MANIFEST} cannot be read ({error}); delete this folder"
            ) from None
        stored = cls(manifest, folder, complete=True)
        left = memoryview((folder / CHECKSUMS).read_bytes())
        for checksums in stored._checksums:
            checksums[:], left = left[: len(checksums)], left[len(checksums) :]
        return stored

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that the files take, including pages that still hold an older version's data."""
        paths = (self.file_path(file) for file in range(len(self.manifest.files)))
        return sum(path.stat().st_blocks * 512 for path in paths if path.exists())

    def is_chunk(self, file: int, index: int) -> bool:
        """True if chunk `index` of file number `file` is a part of the version, present or not."""
        return file < len(self._states) and index < len(self._states[file])

    def has_chunk(self, file: int, index: int) -> bool:
        """True if the chunk is here in full; `is_chunk` must hold for it."""
        return self._states[file][index] == _WHOLE

    def is_waiting(self, file: int, index: int) -> bool:
        """True if only the delta of the chunk is here."""
        return self._states[file][index] == _DELTA

    def is_missing(self, file: int, index: int) -> bool:
        """True if neither the chunk nor its delta is here; `is_chunk` must hold for it."""
        return self._states[file][index] == _MISSING

    def has_arrived(self, file: int) -> bool:
        """True if the file lacks no chunk: the bytes or the delta of each are here."""
        return self._num_missing[file] == 0

    @property
    def is_whole(self) -> bool:
        """True if all chunks are here in full."""
        return not any(self._num_missing) and not any(self._num_deltas)

    @property
    def num_missing(self) -> int:
        """Number of chunks of which neither the bytes nor the delta are here."""
        return sum(self._num_missing)

    @property
    def chunk_counts(self) -> list[int]:
        """[files] number of chunks in each file."""
        return [len(states) for states in self._states]

    def whole_runs(self) -> Runs:
        """Runs of neighbouring chunks that are here in full."""
        whole = re.compile(bytes([_WHOLE]) + b"+")
        return tuple(
            (file, run.start(), run.end() - run.start())
            for file, states in enumerate(self._states)
            for run in whole.finditer(states)
        )

    def missing_chunks(self) -> Iterator[tuple[int, int]]:
        """Yield (file, chunk) of each chunk that is not here, in order; chunks may arrive between two yields."""
        return self._chunks_in(_MISSING)

    def waiting_chunks(self) -> Iterator[tuple[int, int]]:
        """Yield (file, chunk) of each chunk of which only the delta is here, in order."""
        return self._chunks_in(_DELTA)

    def _chunks_in(self, state: int) -> Iterator[tuple[int, int]]:
        for file, states in enumerate(self._states):
            index = states.find(state)
            while index >= 0:
                yield file, index
                index = states.find(state, index + 1)

    def chunk_size(self, file: int, index: int) -> int:
        """Bytes of a chunk in full, not as a delta; the last chunk of a file may be shorter."""
        return min(self.manifest.chunk_bytes, self.manifest.files[file].size - index * self.manifest.chunk_bytes)

    def file_path(self, file: int) -> Path:
        """Current path of a file."""
        return self.folder / self.manifest.files[file].name

    def can_send(self, file: int, index: int, *, base: int | None) -> bool:
        """True if the chunk is here, as a delta for a child that has `base`, unless that delta is pending."""
        if base is not None and base == self.base:
            if (file, index) in self.deltas:
                return True
            if (file, index) in self.unencoded:
                return False
        return self.has_chunk(file, index)

    def read_chunk(self, file: int, index: int, *, base: int | None = None) -> Chunk:
        """Read a chunk that is here, with its checksum; as a delta if there is one against `base`."""
        assert self.can_send(file, index, base=base), f"chunk {index} of file {file} of {self.folder} is not here"
        delta = self.deltas.get((file, index)) if base is not None and base == self.base else None
        data = self.chunk_data(file, index) if delta is None else memoryview(delta.payload)
        checksum = self._checksums[file][index * CHECKSUM_BYTES :][:CHECKSUM_BYTES]
        return Chunk(
            version=self.manifest.version,
            file=file,
            index=index,
            checksum=bytes(checksum),
            base=None if delta is None else base,
            proof=None if delta is None else delta.proof,
            data=data,
        )

    def chunk_data(self, file: int, index: int) -> memoryview:
        """The bytes of a chunk that is here: a view of the mapped file."""
        begin, size = index * self.manifest.chunk_bytes, self.chunk_size(file, index)
        mapping = self._mapped.get(file)
        if mapping is None:
            with self.file_path(file).open("rb") as source:
                mapping = self._mapped[file] = mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ)
        return memoryview(mapping)[begin : begin + size]

    def write_chunk(self, chunk: Chunk, body: ChunkBody) -> bool:
        """Write a missing chunk that came in full, in any thread; False if its checksum is wrong.

        The bytes are opened into mapped pages, else into a buffer, and proven there; `mark_present` must follow.
        Raises `NoRoomError`, `LaneError`.
        """
        file, index = chunk.file, chunk.index
        target = self.pages[file].mapped_view(index * self.manifest.chunk_bytes, body.size)
        if target is None:
            data = body.open()
            right = chunk_checksum(data) == chunk.checksum
            if right:
                self.write_data(file, index, data)
            return right
        right = False
        try:
            body.open_into(target)
            right = chunk_checksum(target) == chunk.checksum
        finally:
            if not right:
                self._in_place.discard(file)  # no delta builds on these bytes
        return right

    def write_data(self, file: int, index: int, data: memoryview) -> None:
        """Write the checked bytes of a chunk, in any thread. Raises `NoRoomError`."""
        with no_room_errors(self.folder.parent, self.manifest.version, self.manifest.num_bytes):
            self.pages[file].write(index * self.manifest.chunk_bytes, np.frombuffer(data, np.uint8))

    def mark_present(self, file: int, index: int, checksum: bytes | None = None) -> None:
        """Mark a chunk present whose bytes were written; None leaves the checksum that came with its delta."""
        self._set_state(file, index, _WHOLE, checksum)

    def keep_delta(self, chunk: Chunk) -> None:
        """Keep a checked delta, of which `rebuild` can make the chunk; its bytes must stay as they are."""
        assert chunk.proof is not None, f"a delta without a proof: {chunk}"
        self.deltas[chunk.file, chunk.index] = ChunkDelta(chunk.data, chunk.proof)
        self._set_state(chunk.file, chunk.index, _DELTA, chunk.checksum)

    def forget_chunk(self, file: int, index: int) -> None:
        """Mark a chunk as missing, and drop its delta; a further delta is applied to a copy of the base."""
        self._in_place.discard(file)
        self.deltas.pop((file, index), None)
        self._set_state(file, index, _MISSING)

    def _set_state(self, file: int, index: int, state: int, checksum: bytes | None = None) -> None:
        before, self._states[file][index] = self._states[file][index], state
        self._num_missing[file] += (state == _MISSING) - (before == _MISSING)
        self._num_deltas[file] += (state == _DELTA) - (before == _DELTA)
        if checksum is not None:
            self._checksums[file][index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES] = checksum

    def has_all_files(self) -> bool:
        """True if all files exist in full length; False if a file was deleted while the version arrived."""
        paths = map(self.file_path, range(len(self.manifest.files)))
        return all(
            path.is_file() and path.stat().st_size == entry.size
            for path, entry in zip(paths, self.manifest.files, strict=True)
        )

    def file_digest(self, file: int) -> str:
        """Digest of a file that has arrived, from the checksums of its chunks."""
        return digest_of(self._checksums[file])

    def forget_file(self, file: int) -> None:
        """Mark all chunks of a file as missing, and drop their deltas; the file itself stays on disk."""
        self._num_missing[file], self._num_deltas[file] = len(self._states[file]), 0
        self._states[file] = bytearray(self._num_missing[file])
        self._in_place.discard(file)
        self.deltas = {key: delta for key, delta in self.deltas.items() if key[0] != file}

    def describe(self) -> None:
        """Write manifest and checksums into the folder, once all chunks are here. Raises `NoRoomError`."""
        with no_room_errors(self.folder.parent, self.manifest.version, self.manifest.num_bytes):
            describe_version(self.folder, self.manifest, self._checksums)
        self._older = []

    def end_writes(self) -> None:
        """Note that no thread writes to the files any more."""
        for pages in self.pages:
            pages.is_arriving = False

    # ---- deltas

    def compare(self, base: "StoredVersion", file: int, index: int) -> Difference | None:
        """Compare a chunk with the same chunk of `base`; None where too much changed.

        Changes neither version, so threads may call it.
        """
        width = self.manifest.files[file].width
        return compare(self.chunk_data(file, index), base.chunk_data(file, index), width=width)

    def build_on(
        self, base: int, older: list[dict[tuple[int, int], ChunkDelta]] | None, in_place: set[int]
    ) -> None:
        """Let deltas against version `base` arrive.

        The files `in_place` are mapped, and hold a version that the deltas `older`, in turn, make the base.
        """
        self.base = base
        if older is not None:
            self._older, self._in_place = older, in_place

    def rebuild(self, base: "StoredVersion", file: int, index: int) -> bool:
        """Write the chunk that a delta makes, in place where that is possible; False if its checksum is wrong.

        Threads may call it for different chunks. Raises `NoRoomError`, and `FileNotFoundError` if the base is
        gone.
        """
        width, delta = self.manifest.files[file].width, self.deltas[file, index]
        begin, size = index * self.manifest.chunk_bytes, self.chunk_size(file, index)
        in_place = self.pages[file].mapped_view(begin, size) if self.is_in_place(file, index) else None
        if in_place is not None:
            data, older = in_place, [deltas[file, index].payload for deltas in self._older]
        else:
            data, older = memoryview(bytearray(base.chunk_data(file, index))), []
        try:
            for payload in (*older, delta.payload):
                apply(payload, data, width=width)
        except DeltaError:
            return False
        checksum = self._checksums[file][index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES]
        if chunk_checksum(data) != checksum:
            return False
        if in_place is None:
            self.write_data(file, index, data)
        return True

    def is_in_place(self, file: int, index: int) -> bool:
        """True if the file holds an older version's chunk, and small deltas lead from it to this version's."""
        if file not in self._in_place:
            return False
        deltas = [older.get((file, index)) for older in (*self._older, self.deltas)]
        size = sum(len(delta.payload) for delta in deltas if delta is not None)
        return None not in deltas and size <= _IN_PLACE * self.chunk_size(file, index)

    def add_delta(self, file: int, index: int, delta: ChunkDelta | None) -> None:
        """Keep a chunk's delta for children; with None, children get the chunk in full."""
        self.unencoded.discard((file, index))
        if delta is not None:
            self.deltas[file, index] = delta

    def forget_deltas(self) -> None:
        """Drop all deltas; from now on chunks are sent in full."""
        self.base = None
        self.deltas = {}  # a newer version may still use the old one
        self.unencoded.clear()

    def release_pages(self) -> None:
        """Unmap all pages that were read, 13 to 43 ms a GB, in any thread; a later read maps them again."""
        for mapping in list(self._mapped.values()):
            for begin in range(0, len(mapping), _PIECE_BYTES):
                mapping.madvise(mmap.MADV_DONTNEED, begin, min(_PIECE_BYTES, len(mapping) - begin))
                time.sleep(0)  # `madvise` holds the interpreter's lock

    def free_memory(self) -> None:
        """Drop the deltas and mappings of a retired version; its folder stays."""
        self.forget_deltas()
        self._mapped.clear()
        self._older = []
