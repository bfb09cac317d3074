"""Version folders of one node on disk: what is complete, what arrives, what is pinned and what may go.

Used by the node (all of it) and the publisher (digests, manifest, names). Invariant: a folder `v<N>` exists
only if each of its files has the digest that its manifest says; everything else has a suffix:
`v<N>.part` arrives, `v<N>.*.old` is being deleted, `v<N>.new` is the publisher's and never touched here. One
retired version is kept as `spare`, for the next to be written over it: by the publisher in the root's store.
"""

import errno
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec
from blake3 import blake3

from laminar_py.relay.delta import encode
from laminar_py.relay.messages import CHECKSUM_BYTES, Chunk, FileEntry, Manifest
from laminar_py.relay.pages import Pages

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
SPARE = "spare"  # folder of a retired version that may be written over
_PIN = "pin-"
_COMPLETE = re.compile(r"v(\d+)")


class NoRoomError(Exception):
    """The file system of a store cannot hold a version; the message names relay.shm and the bytes needed."""


@contextmanager
def writing(store: Path, version: int, num_bytes: int) -> Iterator[None]:
    """Code that writes a version of `num_bytes` into the store: a full file system becomes `NoRoomError`."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise _no_room(store, version, num_bytes) from error


def _no_room(store: Path, version: int, num_bytes: int) -> NoRoomError:
    free = shutil.disk_usage(store).free
    return NoRoomError(
        f"relay.shm={store}: version {version} needs at least {num_bytes} bytes and {free} are free;"
        " enlarge that file system, name another, or lower relay.keep_versions"
    )


def folder_name(version: int) -> str:
    """Name of the folder of a complete version."""
    return f"v{version}"


def chunk_checksum(data: bytes | memoryview) -> bytes:
    """[CHECKSUM_BYTES] of a chunk: BLAKE3, which is faster here than CRC-32 and finds more."""
    return blake3(data).digest(CHECKSUM_BYTES)


def file_digest(path: Path) -> str:
    """BLAKE3 of a file as `b3sum` prints it, on as many threads as there are cores."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).hexdigest()


def version_digest(files: Sequence[FileEntry]) -> str:
    """Identity of a version: BLAKE3 over `name NUL digest` of its files, sorted by name."""
    total = blake3()
    for entry in sorted(files, key=lambda entry: entry.name):
        total.update(entry.name.encode() + b"\0" + bytes.fromhex(entry.digest))
    return total.hexdigest()


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Put `manifest.json` into a folder that is not complete yet."""
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def take_spare(store: Path, folder: Path) -> None:
    """Make `folder` for a new version, with the files of a retired one in it if there is one."""
    try:
        (store / SPARE).rename(folder)
    except FileNotFoundError:
        folder.mkdir(mode=0o700)
        return
    (folder / MANIFEST).unlink(missing_ok=True)


def reuse(folder: Path, sizes: Mapping[str, int]) -> int:
    """Keep of a spare the files with these names that nobody uses, cut to size; how many bytes that is at most."""
    kept = 0
    for path in list(folder.iterdir()):
        pages = Pages(path)
        if path.name in sizes and pages.is_unused:
            kept += min(path.stat().st_size, sizes[path.name])
            pages.cut(sizes[path.name])
        else:
            path.unlink()
        pages.close()
    return kept


def complete_versions(store: Path) -> list[int]:
    """Versions in a store, ascending."""
    found = (_COMPLETE.fullmatch(path.name) for path in store.iterdir())
    return sorted(int(match[1]) for match in found if match)


class StoredVersion:
    """One version in a store, complete or arriving, chunk by chunk.

    Files are opened for each chunk: that costs microseconds beside a chunk of megabytes, and a deleted version
    leaves no descriptor behind.
    """

    def __init__(self, manifest: Manifest, folder: Path, *, complete: bool) -> None:
        self.manifest = manifest
        self.folder = folder
        counts = [manifest.num_chunks(file) for file in range(len(manifest.files))]
        self._present = [bytearray([complete]) * count for count in counts]  # 1 where the chunk is here
        self._missing = [0 if complete else count for count in counts]
        self._checksums: dict[tuple[int, int], bytes] = {}
        self._fresh: Chunk | None = None  # the last that was written, which is what is passed on next
        self.base: int | None = None  # version that `deltas` build on
        self.deltas: dict[tuple[int, int], bytes] = {}  # payloads of chunks, only while it is the newest version
        self.unencoded: set[tuple[int, int]] = set()  # chunks whose deltas are still being made

    @property
    def num_bytes_here(self) -> int:
        """Bytes on disk, to within a chunk a file."""
        return sum(map(sum, self._present)) * self.manifest.chunk_bytes

    def knows(self, file: int, index: int) -> bool:
        """Whether the version has such a chunk at all."""
        return file < len(self._present) and index < len(self._present[file])

    def has(self, file: int, index: int) -> bool:
        """Whether the chunk is here."""
        return bool(self._present[file][index])

    def has_file(self, file: int) -> bool:
        """Whether all chunks of the file are here."""
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
        """Where the file lies now."""
        return self.folder / self.manifest.files[file].name

    def is_ready(self, file: int, index: int, *, base: int | None) -> bool:
        """Whether it can be sent: it is here, and as a delta, if one against `base` is to be had."""
        waits = base is not None and base == self.base and (file, index) in self.unencoded
        return self.has(file, index) and not waits

    def read(self, file: int, index: int, *, base: int | None = None) -> Chunk:
        """A chunk that is here, as a delta if there is one against `base`.

        It has the checksum that it came with, made now where the version entered the tree.
        """
        assert self.has(file, index), f"chunk {index} of file {file} of {self.folder} is not here"
        delta = self.deltas.get((file, index)) if base is not None and base == self.base else None
        if delta is not None:
            checksum = self._checksums[file, index]
            return Chunk(self.manifest.version, file, index, checksum, memoryview(delta), base)
        if self._fresh is not None and (self._fresh.file, self._fresh.index) == (file, index):
            return self._fresh
        data = self.content(file, index)
        checksum = self._checksums.get((file, index)) or chunk_checksum(data)
        self._checksums[file, index] = checksum
        return Chunk(self.manifest.version, file, index, checksum, memoryview(data))

    def content(self, file: int, index: int) -> bytes:
        """The bytes of a chunk that is here."""
        with self.file_path(file).open("rb") as source:
            return os.pread(source.fileno(), self.chunk_size(file, index), index * self.manifest.chunk_bytes)

    def copy_of(self, file: int, index: int) -> memoryview:
        """The bytes of a chunk that is here, to be changed."""
        data = memoryview(bytearray(self.chunk_size(file, index)))
        with self.file_path(file).open("rb") as source:
            os.preadv(source.fileno(), [data], index * self.manifest.chunk_bytes)
        return data

    def encode(self, base: "StoredVersion", file: int, index: int) -> tuple[bytes | None, bytes]:
        """(delta of a chunk against the same one of `base`, checksum); None where the chunk itself is smaller.

        Touches nothing of the two, so threads may do it.
        """
        new, old = self.content(file, index), base.content(file, index)
        return encode(new, old, width=self.manifest.files[file].width), chunk_checksum(new)

    def encoded(self, file: int, index: int, delta: bytes | None, checksum: bytes) -> None:
        """Take over what `encode` gave."""
        self.unencoded.discard((file, index))
        self._checksums[file, index] = checksum
        if delta is not None:
            self.deltas[file, index] = delta

    def forget_deltas(self) -> None:
        """From here on its chunks go out as they are."""
        self.base = None
        self.deltas.clear()
        self.unencoded.clear()

    def write(self, chunk: Chunk) -> None:
        """Store a chunk whose checksum holds, not as a delta. Raises `NoRoomError`."""
        with writing(self.folder.parent, self.manifest.version, self.manifest.num_bytes):
            self._write_at(self.file_path(chunk.file), chunk.index * self.manifest.chunk_bytes, chunk.data)
        self._checksums[chunk.file, chunk.index] = chunk.checksum
        self._fresh = chunk
        self._missing[chunk.file] -= not self._present[chunk.file][chunk.index]
        self._present[chunk.file][chunk.index] = 1

    def _write_at(self, path: Path, position: int, data: memoryview) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while data:
                written = os.pwrite(descriptor, data, position)
                position, data = position + written, data[written:]
        finally:
            os.close(descriptor)

    def forget_file(self, file: int) -> None:
        """Its chunks count as missing again."""
        self._missing[file] = len(self._present[file])
        self._present[file] = bytearray(self._missing[file])
        self._checksums = {key: checksum for key, checksum in self._checksums.items() if key[0] != file}


class Store:
    """The versions of one node, e.g. `Store(Path("/dev/shm/run/relay-1"), keep_versions=2)`."""

    def __init__(self, path: Path, *, keep_versions: int) -> None:
        self.path = path
        self.complete: dict[int, StoredVersion] = {}
        self._keep_versions = keep_versions
        self._pins: dict[str, int] = {}
        self._doomed: dict[Path, int] = {}  # folder that is being deleted -> bytes that this will free

    @property
    def newest(self) -> int:
        """The highest complete version, -1 if there is none."""
        return max(self.complete, default=-1)

    def open(self) -> None:
        """Make the folder, throw away what was left unfinished, and find complete versions and pins."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        for leftover in (*self.path.glob("v*.part"), *self.path.glob("v*.old")):
            log.info("throwing away %s", leftover)
            shutil.rmtree(leftover, ignore_errors=True)  # an earlier node's thread may be at it, too
        self._pins = {
            path.name.removeprefix(_PIN): int(path.read_text())
            for path in self.path.glob(f"{_PIN}*")
            if not path.name.endswith("~")
        }
        self.discover()

    def discover(self) -> list[StoredVersion]:
        """Complete versions that came into the folder since the last look, ascending."""
        found = []
        for version in complete_versions(self.path):
            if version not in self.complete:
                folder = self.path / folder_name(version)
                manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
                self.complete[version] = StoredVersion(manifest, folder, complete=True)
                found.append(self.complete[version])
        return found

    def begin(self, manifest: Manifest) -> StoredVersion:
        """An empty `.part` folder for a version that is to arrive. Raises `NoRoomError`."""
        folder = self.path / f"{folder_name(manifest.version)}.part"
        if not folder.exists():  # else it was left behind when there was no room for the manifest
            take_spare(self.path, folder)
        warm = reuse(folder, {entry.name: entry.size for entry in manifest.files})
        if manifest.num_bytes > shutil.disk_usage(self.path).free + sum(self._doomed.values()) + warm:
            shutil.rmtree(folder)
            raise _no_room(self.path, manifest.version, manifest.num_bytes)
        with writing(self.path, manifest.version, manifest.num_bytes), ExitStack() as undo:
            undo.callback(shutil.rmtree, folder)
            write_manifest(folder, manifest)
            undo.pop_all()
        return StoredVersion(manifest, folder, complete=False)

    def commit(self, arrived: StoredVersion) -> None:
        """All digests hold: the version gets its name."""
        arrived.folder = arrived.folder.rename(self.path / folder_name(arrived.manifest.version))
        self.complete[arrived.manifest.version] = arrived

    def pin(self, name: str, version: int) -> None:
        """Hold a version for a subscriber, instead of the one held for it so far; survives a crash.

        Raises `NoRoomError`.
        """
        unfinished = self.path / f"{_PIN}{name}~"
        with writing(self.path, version, len(str(version))):
            unfinished.write_text(str(version))
        unfinished.rename(self.path / f"{_PIN}{name}")
        self._pins[name] = version

    def surplus(self, held: set[int]) -> list[StoredVersion]:
        """Complete versions that are neither among the newest, nor pinned, nor in `held`."""
        kept = held | set(self._pins.values()) | set(sorted(self.complete)[-self._keep_versions :])
        return [stored for version, stored in sorted(self.complete.items()) if version not in kept]

    def retire(self, stored: StoredVersion) -> Path:
        """Take a version out, complete or not. Returns the folder, moved aside, which `delete` deletes."""
        version = stored.manifest.version
        if self.complete.get(version) is stored:
            del self.complete[version]
        doomed = Path(tempfile.mkdtemp(prefix=f"{folder_name(version)}.", suffix=".old", dir=self.path))
        stored.folder = stored.folder.rename(doomed / stored.folder.name)
        self._doomed[doomed] = stored.num_bytes_here
        return doomed

    def delete(self, doomed: Path) -> None:
        """Delete what was retired, or keep it as the spare; slow enough (10 GB/s) for a thread."""
        with suppress(OSError):  # there is a spare
            for folder in doomed.iterdir():
                folder.rename(self.path / SPARE)
        shutil.rmtree(doomed, ignore_errors=True)  # what is left of it goes at the next start
        del self._doomed[doomed]
