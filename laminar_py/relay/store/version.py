"""A version in its folder, complete or arriving, chunk by chunk; and how such a folder is made.

Used by the store and all who read or write chunks. A folder holds safetensors files, `manifest.json` with their
sizes and digests, and `checksums` of all chunks, which tell a node that starts anew what it holds.
"""

import errno
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from laminar_py.config.section import ConfigError
from laminar_py.relay.store.delta import encode
from laminar_py.relay.store.digests import digest_of
from laminar_py.relay.wire.messages import CHECKSUM_BYTES, Chunk, Manifest

MANIFEST = "manifest.json"
CHECKSUMS = "checksums"  # of all chunks of all files, one after the other


class NoRoomError(ConfigError):
    """The file system of a store cannot hold a version; the message names relay.shm and the bytes needed."""


@contextmanager
def writing(store: Path, version: int, num_bytes: int) -> Iterator[None]:
    """Code that writes a version of `num_bytes` into the store: a full file system becomes `NoRoomError`."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise no_room(store, version, num_bytes) from error


def no_room(store: Path, version: int, num_bytes: int) -> NoRoomError:
    """The error for a version that does not fit, with the remedy."""
    free = shutil.disk_usage(store).free
    return NoRoomError(
        f"relay.shm={store}: version {version} needs at least {num_bytes} bytes and {free} are free;"
        " enlarge that file system, name another, or lower relay.keep_versions"
    )


def folder_name(version: int) -> str:
    """Name of the folder of a complete version."""
    return f"v{version}"


def describe(folder: Path, manifest: Manifest, checksums: Sequence[bytes | bytearray]) -> None:
    """Put into a folder what makes it a version: `manifest.json`, and the checksums of each file's chunks."""
    (folder / CHECKSUMS).write_bytes(b"".join(checksums))
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


class StoredVersion:
    """Version in a store, complete or arriving, chunk by chunk.

    Files are mapped when they are first read, for as long as this object lives or a chunk of it is on its way;
    writing opens them for each chunk, which costs microseconds beside megabytes.
    """

    def __init__(self, manifest: Manifest, folder: Path, *, complete: bool) -> None:
        self.manifest = manifest
        self.folder = folder
        counts = [manifest.num_chunks(file) for file in range(len(manifest.files))]
        self._present = [bytearray([complete]) * count for count in counts]  # 1 where the chunk is here
        self._missing = [0 if complete else count for count in counts]
        self._checksums = [bytearray(CHECKSUM_BYTES * count) for count in counts]  # [num_chunks, CHECKSUM_BYTES]
        self._mapped: dict[int, memoryview] = {}  # by file, once all of it is here
        self._fresh: Chunk | None = None  # the last that was written, which is what is passed on next
        self.base: int | None = None  # version that `deltas` build on
        self.deltas: dict[tuple[int, int], bytes] = {}  # payloads of chunks, while they may be asked for
        self.unencoded: set[tuple[int, int]] = set()  # chunks whose deltas are still being made

    @classmethod
    def load(cls, folder: Path) -> "StoredVersion":
        """The complete version in a folder. `ConfigError` if its manifest has been changed since."""
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"version={folder}: {MANIFEST} cannot be read ({error}); delete it") from None
        stored = cls(manifest, folder, complete=True)
        left = memoryview((folder / CHECKSUMS).read_bytes())
        for checksums in stored._checksums:
            checksums[:], left = left[: len(checksums)], left[len(checksums) :]
        return stored

    @property
    def allocated(self) -> int:
        """Bytes of memory that its files take, also where they hold what was there before."""
        paths = (self.file_path(file) for file in range(len(self.manifest.files)))
        return sum(path.stat().st_blocks * 512 for path in paths if path.exists())

    def knows(self, file: int, index: int) -> bool:
        """True if the version has such a chunk at all."""
        return file < len(self._present) and index < len(self._present[file])

    def has(self, file: int, index: int) -> bool:
        """True if the chunk is here."""
        return bool(self._present[file][index])

    def has_file(self, file: int) -> bool:
        """True if all chunks of the file are here."""
        return self._missing[file] == 0

    def missing(self) -> Iterator[tuple[int, int]]:
        """(file, chunk) of all that is not here, in order; may be drawn from while chunks arrive."""
        for file, present in enumerate(self._present):
            index = present.find(0)
            while index >= 0:
                yield file, index
                index = present.find(0, index + 1)

    def chunk_size(self, file: int, index: int) -> int:
        """Bytes of that chunk."""
        return min(self.manifest.chunk_bytes, self.manifest.files[file].size - index * self.manifest.chunk_bytes)

    def file_path(self, file: int) -> Path:
        """Path of the file now."""
        return self.folder / self.manifest.files[file].name

    def is_ready(self, file: int, index: int, *, base: int | None) -> bool:
        """True if the chunk can be sent: it is here, and as a delta, if one against `base` is to be had."""
        waits = base is not None and base == self.base and (file, index) in self.unencoded
        return self.has(file, index) and not waits

    def read(self, file: int, index: int, *, base: int | None = None) -> Chunk:
        """A chunk that is here, as a delta if there is one against `base`, with the checksum that it came with."""
        assert self.has(file, index), f"chunk {index} of file {file} of {self.folder} is not here"
        delta = self.deltas.get((file, index)) if base is not None and base == self.base else None
        if delta is None and self._fresh and (self._fresh.file, self._fresh.index) == (file, index):
            return self._fresh
        data = self.content(file, index) if delta is None else memoryview(delta)
        checksum = self._checksums[file][index * CHECKSUM_BYTES :][:CHECKSUM_BYTES]
        return Chunk(
            version=self.manifest.version,
            file=file,
            index=index,
            checksum=bytes(checksum),
            base=None if delta is None else base,
            data=data,
        )

    def content(self, file: int, index: int) -> memoryview:
        """The bytes of a chunk that is here; as they lie in the file, if all of that is here."""
        begin, size = index * self.manifest.chunk_bytes, self.chunk_size(file, index)
        if file in self._mapped:
            return self._mapped[file][begin : begin + size]
        with self.file_path(file).open("rb") as source:
            if self.has_file(file):
                self._mapped[file] = memoryview(mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ))
                return self._mapped[file][begin : begin + size]
            return memoryview(os.pread(source.fileno(), size, begin))

    def copy_of(self, file: int, index: int) -> memoryview:
        """The bytes of a chunk that is here, to be changed."""
        return memoryview(bytearray(self.content(file, index)))

    def encode(self, base: "StoredVersion", file: int, index: int) -> bytes | None:
        """Delta of a chunk against the same one of `base`; None where the chunk itself is smaller.

        Touches nothing of the two, so threads may do it.
        """
        width = self.manifest.files[file].width
        return encode(self.content(file, index), base.content(file, index), width=width)

    def encoded(self, file: int, index: int, delta: bytes | None) -> None:
        """Take over what `encode` gave."""
        self.unencoded.discard((file, index))
        if delta is not None:
            self.deltas[file, index] = delta

    def forget_deltas(self) -> None:
        """From here on its chunks go out as they are."""
        self.base = None
        self.deltas.clear()
        self.unencoded.clear()

    def forget(self) -> None:
        """Let go of the memory of a version that is given up."""
        self.forget_deltas()
        self._mapped.clear()
        self._fresh = None

    def write(self, chunk: Chunk) -> None:
        """Store a chunk whose checksum holds, not as a delta. Raises `NoRoomError`, `FileNotFoundError`."""
        with writing(self.folder.parent, self.manifest.version, self.manifest.num_bytes):
            self._write_at(self.file_path(chunk.file), chunk.index * self.manifest.chunk_bytes, chunk.data)
        begin = chunk.index * CHECKSUM_BYTES
        self._checksums[chunk.file][begin : begin + CHECKSUM_BYTES] = chunk.checksum
        self._fresh = chunk
        self._missing[chunk.file] -= not self._present[chunk.file][chunk.index]
        self._present[chunk.file][chunk.index] = 1

    def _write_at(self, path: Path, position: int, data: memoryview) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            while data:
                written = os.pwrite(descriptor, data, position)
                position, data = position + written, data[written:]
        finally:
            os.close(descriptor)

    def is_whole(self) -> bool:
        """True if all files are there in full length: nobody deleted one while it arrived."""
        paths = map(self.file_path, range(len(self.manifest.files)))
        return all(
            path.is_file() and path.stat().st_size == entry.size
            for path, entry in zip(paths, self.manifest.files, strict=True)
        )

    def file_digest(self, file: int) -> str:
        """Digest of a file whose chunks are all here."""
        return digest_of(self._checksums[file])

    def forget_file(self, file: int) -> None:
        """Count the chunks of a file as missing again."""
        self._missing[file] = len(self._present[file])
        self._present[file] = bytearray(self._missing[file])
        self.deltas = {key: delta for key, delta in self.deltas.items() if key[0] != file}
        self._fresh = None

    def describe(self) -> None:
        """Put manifest and checksums beside the files, once all are here. Raises `NoRoomError`."""
        with writing(self.folder.parent, self.manifest.version, self.manifest.num_bytes):
            describe(self.folder, self.manifest, self._checksums)
        self._fresh = None
