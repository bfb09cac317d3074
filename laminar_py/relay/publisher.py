"""The learner's end of the relay: writes a version into the root's store and tells the root. Synchronous.

Called from the learner's process, which has no event loop. The learner stands still for the copy alone, into pages
that an older version no longer needs. Invariant: a version's folder appears by rename, complete and with its
digests; whether the root lives makes no difference to the learner.
"""

import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch

from laminar_py.relay.messages import MIN_CHUNK_BYTES, FileEntry, Manifest, Written
from laminar_py.relay.pages import Pages
from laminar_py.relay.store import (
    complete_versions,
    file_digest,
    folder_name,
    take_spare,
    version_digest,
    write_manifest,
    writing,
)
from laminar_py.relay.transport import Notifier, RelayKeys
from laminar_py.types import Published

# A header of fixed room comes before data whose names are not known yet, so tensors may come one at a time.
# It holds about a thousand tensors; a shard that has more is closed. Data starts on a page boundary.
HEADER_BYTES = 128 * 2**10
SHARD_BYTES = 2 * 2**30
SEALS_KEPT = 8  # versions that `sealed` knows

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


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # [begin, end) in bytes, counted from the end of the header


def _entry(tensor: torch.Tensor, begin: int, name: str) -> _Entry:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"tensor {name}: dtype {tensor.dtype} has no place in safetensors; cast it before")
    return _Entry(_DTYPES[tensor.dtype], tuple(tensor.shape), (begin, begin + tensor.nbytes))


class _Shard:
    """One safetensors file being written, tensor by tensor."""

    def __init__(self, path: Path, pages: Pages) -> None:
        self.path = path
        self.pages = pages
        self._header: dict[str, _Entry] = {}
        self._header_bytes = 8  # the length in front, then the entries
        self.num_bytes = 0  # of tensors

    def takes(self, name: str, tensor: torch.Tensor, *, shard_bytes: int) -> bool:
        """Whether it fits beside what is here. The first always does, for a tensor cannot be split."""
        header_bytes = self._header_bytes + self._header_cost(name, tensor)
        num_bytes = HEADER_BYTES + self.num_bytes + tensor.nbytes
        return not self._header or (num_bytes <= shard_bytes and header_bytes <= HEADER_BYTES)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Append a tensor. Only this one is copied, and only if it is not contiguous in main memory."""
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self.pages.write(HEADER_BYTES + self.num_bytes, raw.numpy())
        self._header_bytes += self._header_cost(name, tensor)
        self._header[name] = _entry(tensor, self.num_bytes, name)
        self.num_bytes += tensor.nbytes

    @property
    def width(self) -> Literal[2, 4]:
        """Bytes of an element, for deltas: of most of its bytes."""
        halves = [entry.data_offsets for entry in self._header.values() if entry.dtype in ("BF16", "F16")]
        return 2 if 2 * sum(end - begin for begin, end in halves) >= self.num_bytes else 4

    def finish(self) -> None:
        """Write the header into its room, padded with spaces as the format allows."""
        room = HEADER_BYTES - 8
        header = msgspec.json.encode(self._header)
        assert len(header) <= room, f"header of {self.path} has {len(header)} bytes"
        whole = room.to_bytes(8, "little") + header.ljust(room)
        self.pages.write(0, np.frombuffer(whole, np.uint8))
        self.pages.cut(HEADER_BYTES + self.num_bytes)

    def _header_cost(self, name: str, tensor: torch.Tensor) -> int:
        return len(msgspec.json.encode({name: _entry(tensor, self.num_bytes, name)}))


class Publisher:
    """Publishes versions into the root's store, e.g. `Publisher(store, root.endpoint, keys)`.

    `chunk_bytes` is how the whole tree cuts files. Raises `ValueError` at construction for a bad size.
    """

    def __init__(
        self,
        store: Path,
        root_endpoint: str,
        keys: RelayKeys | None,
        *,
        chunk_bytes: int = 4 * 2**20,
        shard_bytes: int = SHARD_BYTES,
        heartbeat_s: float = 5.0,
    ) -> None:
        if chunk_bytes < MIN_CHUNK_BYTES:
            raise ValueError(f"relay.chunk_bytes={chunk_bytes}: too small; set at least {MIN_CHUNK_BYTES}")
        self._store = store
        self._chunk_bytes = chunk_bytes
        self._shard_bytes = shard_bytes
        store.mkdir(mode=0o700, parents=True, exist_ok=True)
        for unfinished in store.glob("v*.new"):
            shutil.rmtree(unfinished)
        self._highest = max(complete_versions(store), default=-1)
        self._notifier = Notifier(root_endpoint, keys, heartbeat_s=heartbeat_s)
        self._sealer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="seal")
        self._pages: dict[int, Pages] = {}  # by inode: files of versions that are in the store
        self._sealing: dict[int, Future[Published]] = {}  # by version, the last few

    def publish(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> float:
        """Copy a version out of the learner's memory. Returns how many seconds that took; the tensors may change.

        `tensors` is read once, one tensor at a time. Digests, and the word to the root, follow in a thread, which
        `sealed` waits for, and the next `publish`. Raises `ValueError` if the number was used before, and
        `NoRoomError` if the store's file system is too small; nothing of the version is left then.
        """
        if version <= self._highest:
            raise ValueError(f"version {version} is not above {self._highest}, the highest published; number on")
        began = time.monotonic()
        for unfinished in self._sealing.values():
            unfinished.result()
        folder = self._store / f"{folder_name(version)}.new"
        with ExitStack() as undo:
            self._take_spare(folder)
            undo.callback(shutil.rmtree, folder)
            shards = list(self._write_shards(folder, version, tensors))
            if not shards:
                raise ValueError(f"version {version} has no tensors; publish at least one")
            for stale in {path.name for path in folder.iterdir()} - {shard.path.name for shard in shards}:
                (folder / stale).unlink()
            undo.pop_all()
        self._highest = version
        stall_s = time.monotonic() - began
        self._sealing[version] = self._sealer.submit(self._seal, folder, version, shards, stall_s)
        for old in sorted(self._sealing)[:-SEALS_KEPT]:
            del self._sealing[old]
        return stall_s

    def sealed(self, version: int) -> Published:
        """One of the last versions, once it is complete and the root was told. Raises `NoRoomError`."""
        return self._sealing[version].result()

    def close(self, *, linger_s: float = 1.0) -> None:
        """End the connection to the root, after at most `linger_s` for it to hear of the last version."""
        self._sealer.shutdown()
        for pages in self._pages.values():
            pages.close()
        self._notifier.close(linger_s=linger_s)

    def _seal(self, folder: Path, version: int, shards: list[_Shard], stall_s: float) -> Published:
        with ExitStack() as undo:
            undo.callback(shutil.rmtree, folder)
            files = tuple(
                FileEntry(shard.path.name, shard.path.stat().st_size, file_digest(shard.path), shard.width)
                for shard in shards
            )
            manifest = Manifest(version, version_digest(files), self._chunk_bytes, files)
            with writing(self._store, version, manifest.num_bytes):
                write_manifest(folder, manifest)
            undo.pop_all()
        folder.rename(self._store / folder_name(version))
        self._notifier.send(Written(version))
        for shard in shards:
            shard.pages.keep()
        return Published(version, manifest.digest, manifest.num_bytes, stall_s)

    def _write_shards(
        self, folder: Path, version: int, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[_Shard]:
        """Finished safetensors files."""
        names: set[str] = set()
        left = iter(tensors)
        item = next(left, None)
        total = 0  # bytes
        for number in count(1):
            if item is None:
                return
            path = folder / f"model-{number:05}.safetensors"
            shard = _Shard(path, self._open(path))
            while item is not None and shard.takes(*item, shard_bytes=self._shard_bytes):
                name, tensor = item
                if name in names:
                    raise ValueError(f"tensor {name} comes twice in version {version}; name each once")
                names.add(name)
                total += tensor.nbytes
                with writing(self._store, version, total):
                    shard.add(name, tensor)
                item = next(left, None)
            with writing(self._store, version, total):
                shard.finish()
            yield shard

    def _take_spare(self, folder: Path) -> None:
        """Make a folder for a new version: of the pages of a retired one, as far as nobody else uses them."""
        for inode, pages in list(self._pages.items()):
            if pages.is_deleted:
                self._pages.pop(inode).close()
        take_spare(self._store, folder)
        for path in list(folder.iterdir()):
            if not self._open(path).is_unused:
                self._pages.pop(path.stat().st_ino).close()
                path.unlink()

    def _open(self, path: Path) -> Pages:
        """The pages of a file, which are kept open from version to version."""
        pages = self._pages.get(path.stat().st_ino) if path.exists() else None
        if pages is None:
            pages = Pages(path)
            self._pages[pages.inode] = pages
        return pages
