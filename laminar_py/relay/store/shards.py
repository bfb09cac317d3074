"""The files of a version that is being written: safetensors, tensor by tensor before the names of all are known.

Used by the publisher. Invariant: tensors lie one after the other behind a header of fixed room, which is written
last, so what was copied never moves.
"""

import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import torch

from laminar_py.relay.store.device_copy import TensorCopier
from laminar_py.relay.store.digests import Checksums, digest_of
from laminar_py.relay.store.pages import Pages
from laminar_py.relay.wire.messages import FileEntry

# It holds about a thousand tensors; a shard that has more is closed. Data starts on a page boundary.
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


class _Entry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]  # [begin, end) in bytes, counted from the end of the header


def _entry(tensor: torch.Tensor, begin: int, name: str) -> _Entry:
    if tensor.dtype not in _DTYPES:
        raise ValueError(f"tensor {name}: dtype {tensor.dtype} has no place in safetensors; cast it before")
    return _Entry(_DTYPES[tensor.dtype], tuple(tensor.shape), (begin, begin + tensor.nbytes))


def header_room(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Bytes of whole pages that the header of a file with just these tensors needs."""
    end, entries = 0, {}
    for name, tensor in tensors:
        entries[name] = _entry(tensor, end, name)
        end += tensor.nbytes
    return -(-(8 + len(msgspec.json.encode(entries))) // mmap.PAGESIZE) * mmap.PAGESIZE


class VersionFile:
    """A file being written, e.g. `VersionFile(path, pages, checksums)`."""

    def __init__(self, path: Path, pages: Pages, checksums: Checksums) -> None:
        self.path = path
        self.pages = pages
        self._checksums = checksums
        self._size = 0

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._size

    def write(self, data: bytes) -> None:
        """Write the whole content. Raises `OSError` on a full file system."""
        self.pages.write(0, np.frombuffer(data, np.uint8))
        self._size = len(data)

    def entry(self) -> tuple[FileEntry, bytes]:
        """The finished file and the checksums of its chunks, once they are made."""
        checksums = self._checksums.result(self.size)
        self.pages.cut(self.size)
        return FileEntry(self.path.name, self.size, digest_of(checksums), self._width), checksums

    def drop(self) -> None:
        """Give the file up: returns when nobody reads it any more."""
        self._checksums.drop()

    @property
    def _width(self) -> Literal[2, 4]:
        """Bytes of an element, for deltas."""
        return 4


class Shard(VersionFile):
    """A safetensors file, with `header_bytes` for its header, e.g. `Shard(path, pages, checksums, copier)`."""

    def __init__(
        self,
        path: Path,
        pages: Pages,
        checksums: Checksums,
        copier: TensorCopier,
        *,
        header_bytes: int = HEADER_BYTES,
    ) -> None:
        super().__init__(path, pages, checksums)
        self._copier = copier
        self._room = header_bytes
        self._size = header_bytes
        self._header: dict[str, _Entry] = {}
        self._header_bytes = 9  # the length in front and a brace, then the entries, each with what ends it

    def add(self, name: str, tensor: torch.Tensor, *, shard_bytes: int) -> bool:
        """Append a tensor, which must not change before `finish`; False if it does not fit beside what is here.

        The first always does, for a tensor cannot be split. Raises `OSError` on a full file system.
        """
        entry = _entry(tensor, self._num_bytes, name)
        header_bytes = self._header_bytes + len(msgspec.json.encode({name: entry})) - 1
        if self._header and (self.size + tensor.nbytes > shard_bytes or header_bytes > self._room):
            return False
        self._copier.copy(tensor, self.pages, self.size, filled=self._checksums.filled)
        self._header[name] = entry
        self._header_bytes = header_bytes
        self._size += tensor.nbytes
        return True

    def finish(self) -> None:
        """Wait for the tensors and write the header into its room, padded with spaces as the format allows."""
        self._copier.wait()
        room = self._room - 8
        header = msgspec.json.encode(self._header)
        assert len(header) <= room, f"header of {self.path} has {len(header)} bytes"
        whole = room.to_bytes(8, "little") + header.ljust(room)
        self.pages.write(0, np.frombuffer(whole, np.uint8))

    @property
    def _num_bytes(self) -> int:
        """Bytes of tensors."""
        return self._size - self._room

    @property
    def _width(self) -> Literal[2, 4]:
        """Width of the elements that take most of its bytes."""
        halves = [entry.data_offsets for entry in self._header.values() if entry.dtype in ("BF16", "F16")]
        return 2 if 2 * sum(end - begin for begin, end in halves) >= self._num_bytes else 4
