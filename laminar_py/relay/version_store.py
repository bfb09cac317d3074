"""Version folders on disk: `StoredVersion` is one, complete or arriving; `VersionStore` has all of a node.

Nodes use all of it. The publisher uses the spare folder and the functions that describe a folder. A version folder
holds safetensors files, `manifest.json` with their sizes and digests, and `checksums` of all chunks, from which a
restarted node knows its chunks. Folders are private to the user.

    `v<N>.new`    the publisher writes version N; nodes never touch it
    `v<N>.part`   version N arrives
    `v<N>`        complete: each file has the digest that the manifest names
                  (`tests/relay/test_store.py::test_a_version_has_its_name_only_after_commit`)
    `v<N>.*.old`  is being deleted
    `spare`       one retired version, whose files the next version overwrites: warm pages are faster than new ones
    `pin-<name>`  the version that a subscriber holds
"""

import ctypes
import errno
import logging
import mmap
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from laminar_py.config.section import ConfigError
from laminar_py.relay.delta import encode
from laminar_py.relay.digests import digest_of
from laminar_py.relay.mapped_file import MappedFile, MappedFiles
from laminar_py.relay.messages import CHECKSUM_BYTES, Chunk, Manifest

log = logging.getLogger(__name__)

MANIFEST = "manifest.json"
CHECKSUMS = "checksums"  # of all chunks, file by file
SPARE = "spare"
_PIN = "pin-"
_IN_MOVED_TO = 0x80  # inotify's event for a name that appears by a rename
_COMPLETE = re.compile(r"v(\d+)")


class NoRoomError(ConfigError):
    """The file system of a store cannot hold a version; the message names relay.shm and the bytes needed."""


@contextmanager
def no_room_errors(store: Path, version: int, num_bytes: int) -> Iterator[None]:
    """Turn a full file system inside the block, which writes a version, into `NoRoomError`."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise no_room(store, version, num_bytes) from error


def no_room(store: Path, version: int, num_bytes: int) -> NoRoomError:
    """Make the error for a version of `num_bytes` that does not fit into a store."""
    free = shutil.disk_usage(store).free
    return NoRoomError(
        f"relay.shm={store}: version {version} needs at least {num_bytes} bytes and {free} are free;"
        " enlarge that file system, set relay.shm to another, or lower relay.keep_versions"
    )


def folder_name(version: int) -> str:
    """Folder name of a complete version, e.g. `v7`."""
    return f"v{version}"


def complete_versions(store: Path) -> list[int]:
    """Numbers of the complete versions in a store, ascending."""
    matches = (_COMPLETE.fullmatch(path.name) for path in store.iterdir())
    return sorted(int(match[1]) for match in matches if match)


def describe_version(folder: Path, manifest: Manifest, checksums: Sequence[bytes | bytearray]) -> None:
    """Write `manifest.json`, and the checksums of each file's chunks, into a version folder."""
    (folder / CHECKSUMS).write_bytes(b"".join(checksums))
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)))


def use_spare(store: Path, folder: Path) -> None:
    """Make `folder` for a new version: the spare folder under a new name, or an empty one if there is none."""
    try:
        (store / SPARE).rename(folder)
    except FileNotFoundError:
        folder.mkdir(mode=0o700)
        return
    for name in (MANIFEST, CHECKSUMS):
        (folder / name).unlink(missing_ok=True)


def watch_folder(store: Path) -> int:
    """Return a descriptor that becomes readable when a rename adds a name to a store. Raises `OSError`."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if descriptor < 0 or libc.inotify_add_watch(descriptor, os.fsencode(store), _IN_MOVED_TO) < 0:
        number = ctypes.get_errno()
        if descriptor >= 0:
            os.close(descriptor)
        raise OSError(number, os.strerror(number), str(store))
    return descriptor


class StoredVersion:
    """A version in a store, complete or arriving, chunk by chunk; also its deltas against the version before.

    A file is mapped at its first read, and stays mapped as long as this object or one of its chunks lives. While
    the version arrives, `pages` has the files open for writes.
    """

    def __init__(self, manifest: Manifest, folder: Path, *, complete: bool) -> None:
        self.manifest = manifest
        self.folder = folder
        counts = [manifest.num_chunks(file) for file in range(len(manifest.files))]
        self._present = [bytearray([complete]) * count for count in counts]  # 1 for each chunk that is here
        self._num_missing = [0 if complete else count for count in counts]
        self._checksums = [bytearray(CHECKSUM_BYTES * count) for count in counts]  # [num_chunks, CHECKSUM_BYTES]
        self.pages: list[MappedFile] = []  # of a version that arrived here, by file; the store keeps them open
        self._mapped: dict[int, memoryview] = {}  # by file, from the first read on
        self.base: int | None = None  # version that `deltas` build on
        self.deltas: dict[tuple[int, int], bytes] = {}  # payloads of chunks, while children may ask for them
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
        return file < len(self._present) and index < len(self._present[file])

    def has_chunk(self, file: int, index: int) -> bool:
        """True if the chunk is here; `is_chunk` must hold for it."""
        return bool(self._present[file][index])

    def has_file(self, file: int) -> bool:
        """True if all chunks of the file are here."""
        return self._num_missing[file] == 0

    def missing_chunks(self) -> Iterator[tuple[int, int]]:
        """Yield (file, chunk) of each chunk that is not here, in order; chunks may arrive between two yields."""
        for file, present in enumerate(self._present):
            index = present.find(0)
            while index >= 0:
                yield file, index
                index = present.find(0, index + 1)

    def chunk_size(self, file: int, index: int) -> int:
        """Bytes of a chunk in full, not as a delta; the last chunk of a file may be shorter."""
        return min(self.manifest.chunk_bytes, self.manifest.files[file].size - index * self.manifest.chunk_bytes)

    def file_path(self, file: int) -> Path:
        """Current path of a file."""
        return self.folder / self.manifest.files[file].name

    def can_send(self, file: int, index: int, *, base: int | None) -> bool:
        """True if the chunk is here and, for a child that has `base`, its delta against `base` is not pending."""
        pending = base is not None and base == self.base and (file, index) in self.unencoded
        return self.has_chunk(file, index) and not pending

    def read_chunk(self, file: int, index: int, *, base: int | None = None) -> Chunk:
        """Read a chunk that is here, with its checksum; as a delta if there is one against `base`."""
        assert self.has_chunk(file, index), f"chunk {index} of file {file} of {self.folder} is not here"
        delta = self.deltas.get((file, index)) if base is not None and base == self.base else None
        data = self.chunk_data(file, index) if delta is None else memoryview(delta)
        checksum = self._checksums[file][index * CHECKSUM_BYTES :][:CHECKSUM_BYTES]
        return Chunk(
            version=self.manifest.version,
            file=file,
            index=index,
            checksum=bytes(checksum),
            base=None if delta is None else base,
            data=data,
        )

    def chunk_data(self, file: int, index: int) -> memoryview:
        """The bytes of a chunk that is here: a view of the mapped file."""
        begin, size = index * self.manifest.chunk_bytes, self.chunk_size(file, index)
        if file not in self._mapped:
            with self.file_path(file).open("rb") as source:
                self._mapped[file] = memoryview(mmap.mmap(source.fileno(), 0, prot=mmap.PROT_READ))
        return self._mapped[file][begin : begin + size]

    def write_chunk(self, chunk: Chunk) -> None:
        """Write a full, checked chunk and mark it present. Raises `NoRoomError`."""
        self.write_data(chunk.file, chunk.index, chunk.data)
        self.mark_present(chunk.file, chunk.index, chunk.checksum)

    def write_data(self, file: int, index: int, data: memoryview) -> None:
        """Write the checked bytes of a chunk, in any thread. Raises `NoRoomError`."""
        with no_room_errors(self.folder.parent, self.manifest.version, self.manifest.num_bytes):
            self.pages[file].write(index * self.manifest.chunk_bytes, np.frombuffer(data, np.uint8))

    def mark_present(self, file: int, index: int, checksum: bytes) -> None:
        """Mark a chunk present whose bytes with this checksum were written."""
        begin = index * CHECKSUM_BYTES
        self._checksums[file][begin : begin + CHECKSUM_BYTES] = checksum
        self._num_missing[file] -= not self._present[file][index]
        self._present[file][index] = 1

    def has_all_files(self) -> bool:
        """True if all files exist in full length; False if a file was deleted while the version arrived."""
        paths = map(self.file_path, range(len(self.manifest.files)))
        return all(
            path.is_file() and path.stat().st_size == entry.size
            for path, entry in zip(paths, self.manifest.files, strict=True)
        )

    def file_digest(self, file: int) -> str:
        """Digest of a file whose chunks are all here."""
        return digest_of(self._checksums[file])

    def forget_file(self, file: int) -> None:
        """Mark all chunks of a file as missing, and drop their deltas; the file itself stays on disk."""
        self._num_missing[file] = len(self._present[file])
        self._present[file] = bytearray(self._num_missing[file])
        self.deltas = {key: delta for key, delta in self.deltas.items() if key[0] != file}

    def describe(self) -> None:
        """Write manifest and checksums into the folder, once all chunks are here. Raises `NoRoomError`."""
        with no_room_errors(self.folder.parent, self.manifest.version, self.manifest.num_bytes):
            describe_version(self.folder, self.manifest, self._checksums)

    def end_writes(self) -> None:
        """Note that no thread writes to the files any more."""
        for pages in self.pages:
            pages.is_arriving = False

    # ---- deltas

    def encode_delta(self, base: "StoredVersion", file: int, index: int) -> bytes | None:
        """Delta of a chunk against the same chunk of `base`; None where the chunk itself is smaller.

        Changes neither version, so threads may call it.
        """
        width = self.manifest.files[file].width
        return encode(self.chunk_data(file, index), base.chunk_data(file, index), width=width)

    def add_delta(self, file: int, index: int, delta: bytes | None) -> None:
        """Keep a chunk's delta for children; with None, children get the chunk in full."""
        self.unencoded.discard((file, index))
        if delta is not None:
            self.deltas[file, index] = delta

    def forget_deltas(self) -> None:
        """Drop all deltas; from now on chunks are sent in full."""
        self.base = None
        self.deltas.clear()
        self.unencoded.clear()

    def free_memory(self) -> None:
        """Drop the deltas and mappings of a retired version; its folder stays."""
        self.forget_deltas()
        self._mapped.clear()


class VersionStore:
    """The versions of one node, e.g. `VersionStore(Path("/dev/shm/run/relay-1"), keep_versions=2)`."""

    def __init__(self, path: Path, *, keep_versions: int) -> None:
        self.path = path
        self.complete: dict[int, StoredVersion] = {}
        self._keep_versions = keep_versions
        self._pins: dict[str, int] = {}  # subscriber -> version
        self._deleting: dict[Path, int] = {}  # folder -> bytes that its deletion will free
        self._files = MappedFiles()

    @property
    def newest(self) -> int:
        """The highest complete version, -1 if there is none."""
        return max(self.complete, default=-1)

    def open(self) -> None:
        """Make the folder, delete what an earlier process left unfinished, and find complete versions and pins."""
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # the folder of the run
        self.path.mkdir(mode=0o700, exist_ok=True)
        for leftover in (*self.path.glob("v*.part"), *self.path.glob("v*.old")):
            log.info("deleting the unfinished %s", leftover)
            shutil.rmtree(leftover, ignore_errors=True)  # a thread of an earlier node may delete it, too
        self._pins = {
            path.name.removeprefix(_PIN): int(path.read_text())
            for path in self.path.glob(f"{_PIN}*")
            if not path.name.endswith("~")
        }
        self.discover()

    def discover(self) -> list[StoredVersion]:
        """Load the complete versions that appeared in the folder since the last call; returns them, ascending."""
        appeared = []
        for version in complete_versions(self.path):
            if version not in self.complete:
                self.complete[version] = StoredVersion.load(self.path / folder_name(version))
                appeared.append(self.complete[version])
        return appeared

    def check_room(self, manifest: Manifest, *, freed_bytes: int) -> None:
        """Raise `NoRoomError` if a version does not fit, even after the caller has freed `freed_bytes`."""
        spare = self.path / SPARE
        reused = sum(path.stat().st_blocks * 512 for path in spare.iterdir()) if spare.exists() else 0
        room = shutil.disk_usage(self.path).free + sum(self._deleting.values()) + reused + freed_bytes
        if manifest.num_bytes > room:
            raise no_room(self.path, manifest.version, manifest.num_bytes)

    def begin(self, manifest: Manifest) -> StoredVersion:
        """Make the `.part` folder of a version that will arrive, with all its files. Raises `NoRoomError`."""
        folder = self.path / f"{folder_name(manifest.version)}.part"
        sizes = {entry.name: entry.size for entry in manifest.files}
        use_spare(self.path, folder)
        _keep_usable_files(folder, sizes, self._files)
        stored = StoredVersion(manifest, folder, complete=False)
        with no_room_errors(self.path, manifest.version, manifest.num_bytes):
            # All files exist from here on, and stay open: writes never make a new file that lacks earlier chunks.
            stored.pages = [self._files.open(folder / name) for name in sizes]
            for pages, size in zip(stored.pages, sizes.values(), strict=True):
                pages.set_size(size)
                pages.is_arriving = True
        return stored

    def commit(self, arrived: StoredVersion) -> None:
        """Make a verified version complete: describe it and rename its folder. Raises `NoRoomError`."""
        arrived.describe()
        arrived.end_writes()
        arrived.folder = arrived.folder.rename(self.path / folder_name(arrived.manifest.version))
        self.complete[arrived.manifest.version] = arrived

    def keep_mapped(self, stored: StoredVersion) -> None:
        """Map the files of a complete version, for the next one to overwrite. Call this in a thread."""
        for pages in stored.pages:
            if not pages.is_deleted:
                pages.keep_mapped()
        self._files.sweep()

    def close(self) -> None:
        """Close all files."""
        self._files.close()

    def pin(self, name: str, version: int) -> None:
        """Pin a version for subscriber `name`, which ends its earlier pin. A pin survives a crash.

        Raises `NoRoomError`.
        """
        unfinished = self.path / f"{_PIN}{name}~"
        with no_room_errors(self.path, version, len(str(version))):
            unfinished.write_text(str(version))
        unfinished.rename(self.path / f"{_PIN}{name}")
        self._pins[name] = version

    def unpin(self, name: str) -> None:
        """Remove the pin of subscriber `name`, if there is one."""
        if self._pins.pop(name, None) is not None:
            (self.path / f"{_PIN}{name}").unlink(missing_ok=True)

    def surplus(self, needed: set[int]) -> list[StoredVersion]:
        """Complete versions that are neither among the newest `keep_versions`, nor pinned, nor `needed`."""
        staying = needed | set(self._pins.values()) | set(sorted(self.complete)[-self._keep_versions :])
        return [stored for version, stored in sorted(self.complete.items()) if version not in staying]

    def retire(self, stored: StoredVersion) -> Path | None:
        """Take a version out of the store, complete or not.

        Returns the folder to pass to `delete`; None if it became the spare folder or is gone already.
        """
        version = stored.manifest.version
        if self.complete.get(version) is stored:
            del self.complete[version]
        stored.free_memory()
        stored.end_writes()
        if not stored.folder.exists():
            return None
        with suppress(OSError):  # there is a spare folder already
            stored.folder = stored.folder.rename(self.path / SPARE)
            return None
        doomed = Path(tempfile.mkdtemp(prefix=f"{folder_name(version)}.", suffix=".old", dir=self.path))
        stored.folder = stored.folder.rename(doomed / stored.folder.name)
        self._deleting[doomed] = stored.allocated_bytes
        return doomed

    def delete(self, doomed: Path) -> None:
        """Delete a folder that `retire` returned. Call this in a thread: it frees about 10 GB/s."""
        shutil.rmtree(doomed, ignore_errors=True)  # `open` deletes the rest at the next start
        self._files.sweep()
        del self._deleting[doomed]


def _keep_usable_files(folder: Path, sizes: Mapping[str, int], files: MappedFiles) -> None:
    """Delete a folder's files that `sizes` (bytes by name) lacks or a process has open; cut the others to size."""
    for path in list(folder.iterdir()):
        pages = files.open(path)
        if path.name in sizes and pages.is_unused:
            pages.set_size(min(pages.size, sizes[path.name]))
        else:
            path.unlink()
    files.sweep()
