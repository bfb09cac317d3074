"""The learner's end of the relay: writes a version into the root's store. Synchronous.

The learner's process owns a `Publisher`; it has no event loop. `publish` copies the tensors into pages that an
older version no longer needs, and the learner waits for that copy alone (law 8). A thread, the finisher, then
hashes the files, renames the folder, which the root notices, and maps pages for the next version. `publish`
waits for the finisher first, so the two never touch pages, files and copier at once. A version's folder appears by
rename, complete and with its digests, or not at all
(`tests/relay/test_publisher.py::test_bad_tensors_are_refused_and_leave_nothing`). A crash of the root makes no
difference to the learner.
"""

import errno
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch
from safetensors.torch import save

from laminar_py.config.section import ConfigError
from laminar_py.records.weights import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Published
from laminar_py.relay.device_copy import TensorCopier
from laminar_py.relay.digests import digest_of, hash_file, hashing_threads, version_digest
from laminar_py.relay.mapped_file import MappedFile, MappedFiles
from laminar_py.relay.messages import MIN_CHUNK_BYTES, FileEntry, Manifest
from laminar_py.relay.stored_version import describe_version, no_room, no_room_errors
from laminar_py.relay.version_store import complete_versions, folder_name, use_spare

SHARD_BYTES = 2 * 2**30
MAX_REMEMBERED = 8  # versions that `completed` knows
# Room for a safetensors header of about a thousand tensors; a shard with more is closed. Data starts on a page.
HEADER_BYTES = 128 * 2**10

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Publisher:
    """Publishes versions into the root's store, e.g. `Publisher(store)`.

    The whole tree cuts files into chunks of `chunk_bytes`. With `adapter_config`, the text of
    `adapter_config.json`, each version is an adapter in the format of peft, with all tensors in one file. Raises
    `ConfigError` if `chunk_bytes` is too small.
    """

    def __init__(
        self,
        store: Path,
        *,
        chunk_bytes: int = 4 * 2**20,
        shard_bytes: int = SHARD_BYTES,
        adapter_config: bytes | None = None,
    ) -> None:
        if chunk_bytes < MIN_CHUNK_BYTES:
            raise ConfigError(f"chunk_bytes={chunk_bytes}: too small; set at least {MIN_CHUNK_BYTES}")
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._shard_bytes = shard_bytes
        self._adapter_config = adapter_config
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        for unfinished in store.glob("v*.new"):
            shutil.rmtree(unfinished)
        self._highest = max(complete_versions(store), default=-1)
        self._finisher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="finish")
        self._hashers = hashing_threads()
        self._copier = TensorCopier()
        self._pages = MappedFiles()
        self._finishing: dict[int, Future[Published]] = {}  # by version, the last few
        self._last_task: Future[None] | None = None  # of the finisher, which is idle after it

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Copy a version out of the learner's memory into the store; return the seconds that the learner waited.

        Reads `tensors` once, one tensor at a time; afterwards they may change. A thread then completes the version
        (`completed` waits for it). Raises `ValueError` unless `version` is above all earlier ones and tensors have
        distinct names, and `NoRoomError` on a full file system; an error leaves nothing of the version.
        """
        if version <= self._highest:
            raise ValueError(f"version {version} is not above {self._highest}, the highest published; raise it")
        began = time.monotonic()
        if self._last_task is not None:
            self._last_task.result()
        folder = self._store / f"{folder_name(version)}.new"
        files: list[VersionFile] = []
        with ExitStack() as undo:
            undo.callback(self._discard, folder)
            self._use_spare(folder)
            try:
                self._write(folder, _check_names(tensors, version), files)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise no_room(self._store, version, sum(file.size for file in files)) from error
            undo.pop_all()
        self._highest = version
        stall_s = time.monotonic() - began
        finishing = self._finisher.submit(self._finish, folder, version, files, stall_s)
        self._last_task = self._finisher.submit(self._keep_pages, finishing, files)
        self._finishing[version] = finishing
        for old in sorted(self._finishing)[:-MAX_REMEMBERED]:
            del self._finishing[old]
        return stall_s

    def completed(self, version: int) -> Published:
        """Wait until a recent version is complete; return its digest and size. Raises `NoRoomError`."""
        return self._finishing[version].result()

    def close(self) -> None:
        """Wait until the last version is complete, stop the threads, and close all files."""
        self._finisher.shutdown()
        self._hashers.shutdown()
        self._pages.close()

    def _use_spare(self, folder: Path) -> None:
        """Make `folder` from the spare folder, if there is one, without files that another process has open."""
        use_spare(self._store, folder)
        for path in list(folder.iterdir()):
            if not self._pages.open(path).is_unused:
                path.unlink()

    def _write(
        self, folder: Path, tensors: Iterator[tuple[str, torch.Tensor]], files: list["VersionFile"]
    ) -> None:
        """Write the files of a version into `folder`, add each to `files` as it begins, and delete all others."""
        if self._adapter_config is None:
            files.extend(self._write_shards(folder, tensors))
        else:
            adapter = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors}
            for name, data in ((ADAPTER_WEIGHTS, save(adapter)), (ADAPTER_CONFIG, self._adapter_config)):
                files.append(VersionFile(folder / name, self._pages.open(folder / name)))
                files[-1].write(data)
        for stale in set(folder.iterdir()) - {file.path for file in files}:
            stale.unlink()

    def _write_shards(self, folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator["Shard"]:
        """Write tensors into shards, and yield each shard before its first tensor is written."""
        number, shard = 0, None
        for name, tensor in tensors:
            if shard is None or not shard.add(name, tensor, shard_bytes=self._shard_bytes):
                if shard is not None:
                    shard.finish()
                number += 1
                path = folder / f"model-{number:05}.safetensors"
                shard = Shard(path, self._pages.open(path), self._copier)
                yield shard
                shard.add(name, tensor, shard_bytes=self._shard_bytes)
        if shard is not None:
            shard.finish()

    def _finish(self, folder: Path, version: int, files: list["VersionFile"], stall_s: float) -> Published:
        """Hash the files, write the manifest, and rename the folder; delete it on errors. Runs on the finisher."""
        with ExitStack() as undo:
            undo.callback(self._discard, folder)
            checksums = [file.hash(chunk_bytes=self._chunk_bytes, threads=self._hashers) for file in files]
            entries = tuple(file.describe(sums) for file, sums in zip(files, checksums, strict=True))
            manifest = Manifest(version, version_digest(entries), self._chunk_bytes, entries)
            with no_room_errors(self._store, version, manifest.num_bytes):
                describe_version(folder, manifest, checksums)
            folder.rename(self._store / folder_name(version))
            undo.pop_all()
        return Published(version, manifest.digest, manifest.num_bytes, stall_s)

    def _keep_pages(self, finishing: Future[Published], files: list["VersionFile"]) -> None:
        """Map the files of a complete version for reuse, and close deleted files. Runs on the finisher."""
        if finishing.exception() is None:
            for file in files:
                file.pages.keep_mapped()
                self._copier.page_lock(file.pages)
        self._pages.sweep()

    def _discard(self, folder: Path) -> None:
        """Drop the copies in flight, and delete the folder of a version that failed."""
        self._copier.drop()
        if folder.exists():
            shutil.rmtree(folder)
        self._pages.sweep()


def _check_names(tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors unchanged. Raises `ValueError` for a name that comes twice, or if there are no tensors."""
    names: set[str] = set()
    for name, tensor in tensors:
        if name in names:
            raise ValueError(f"tensor {name} comes twice in version {version}; name each once")
        names.add(name)
        yield name, tensor
    if not names:
        raise ValueError(f"version {version} has no tensors; publish at least one")


class _HeaderEntry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # [begin, end) in bytes, counted from the end of the header


def _header_entry(tensor: torch.Tensor, begin: int, name: str) -> _HeaderEntry:
    """Describe a tensor whose data begin at byte `begin`. Raises `ValueError` for a dtype without a name."""
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"tensor {name}: dtype {tensor.dtype} is unknown to safetensors; cast the tensor")
    return _HeaderEntry(_DTYPES[tensor.dtype], tuple(tensor.shape), (begin, begin + tensor.nbytes))


class VersionFile:
    """A file of a version that the publisher writes, e.g. `VersionFile(path, pages)`."""

    def __init__(self, path: Path, pages: MappedFile) -> None:
        self.path = path
        self.pages = pages
        self.size = 0  # bytes so far

    def write(self, data: bytes) -> None:
        """Write the whole content. Raises `OSError` on a full file system."""
        self.pages.write(0, np.frombuffer(data, np.uint8))
        self.size = len(data)

    def hash(self, *, chunk_bytes: int, threads: Executor) -> bytes:
        """Cut the finished file to its size; returns its checksums, [num_chunks * CHECKSUM_BYTES]."""
        self.pages.set_size(self.size)
        return hash_file(self.pages, self.size, chunk_bytes=chunk_bytes, threads=threads)

    def describe(self, checksums: bytes) -> FileEntry:
        """Return the file's entry in the manifest, from the checksums of its chunks."""
        return FileEntry(self.path.name, self.size, digest_of(checksums), self.width)

    @property
    def width(self) -> Literal[2, 4]:
        """Bytes of an element, for deltas; 4 suits any content."""
        return 4


class Shard(VersionFile):
    """A safetensors file that is written tensor by tensor, before the names of all are known.

    The file begins with room for the header, which is written last, and the tensors follow. So no tensor moves
    after its copy.
    """

    def __init__(self, path: Path, pages: MappedFile, copier: TensorCopier) -> None:
        super().__init__(path, pages)
        self.size = HEADER_BYTES
        self._copier = copier
        self._header: dict[str, _HeaderEntry] = {}
        # 8 bytes of length and a brace; each entry adds its own bytes and the comma or brace behind it.
        self._header_bytes = 9

    def add(self, name: str, tensor: torch.Tensor, *, shard_bytes: int) -> bool:
        """Append a tensor, which must not change before `finish`; False if it does not fit.

        The first tensor always fits, for a tensor cannot be split. Raises `OSError` on a full file system.
        """
        entry = _header_entry(tensor, self.size - HEADER_BYTES, name)
        header_bytes = self._header_bytes + len(msgspec.json.encode({name: entry})) - 1
        if self._header and (self.size + tensor.nbytes > shard_bytes or header_bytes > HEADER_BYTES):
            return False
        self._copier.copy(tensor, self.pages, self.size)
        self._header[name] = entry
        self._header_bytes = header_bytes
        self.size += tensor.nbytes
        return True

    def finish(self) -> None:
        """Wait for the tensors' copies, and write the header, padded with spaces as the format allows."""
        self._copier.wait()
        room = HEADER_BYTES - 8
        header = msgspec.json.encode(self._header)
        assert len(header) <= room, f"header of {self.path} has {len(header)} bytes, not below {room}"
        padded = room.to_bytes(8, "little") + header.ljust(room)
        self.pages.write(0, np.frombuffer(padded, np.uint8))

    @property
    def width(self) -> Literal[2, 4]:
        """Bytes of an element, for deltas: 2 if 16-bit floats take at least half of the data, else 4."""
        halves = [entry.data_offsets for entry in self._header.values() if entry.dtype in ("BF16", "F16")]
        return 2 if 2 * sum(end - begin for begin, end in halves) >= self.size - HEADER_BYTES else 4
