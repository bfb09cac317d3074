"""Layout of a version's safetensors files: which byte of which file has which tensor. Pure.

`Publisher` lays out each version from names, dtypes and shapes alone. So every rank of a learner knows each byte's
place before any data move. A file begins with room for its header, and no tensor is split over files.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from laminar_py.records.weights import StoredTensor

SHARD_BYTES = 2 * 2**30
# Room for a safetensors header of about a thousand tensors; a file with more is closed. Data starts on a page.
HEADER_BYTES = 128 * 2**10

_DTYPES = {  # torch's name: name in safetensors
    "torch.float64": "F64",
    "torch.float32": "F32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.int64": "I64",
    "torch.int32": "I32",
    "torch.int16": "I16",
    "torch.int8": "I8",
    "torch.uint8": "U8",
    "torch.bool": "BOOL",
}


class HeaderEntry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file; the defaults stand for the metadata, which are no tensor."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)  # [begin, end) in bytes, counted from the end of the header


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Place of a tensor, e.g. `TensorPlace(0, 131_072, stored)`."""

    file: int
    position: int  # first byte in the file
    stored: StoredTensor

    def byte_of(self, element: int) -> int:
        """Byte of the file at which an element of the flattened tensor begins."""
        return self.position + element * int(self.stored.dtype.itemsize)


class FileLayout:
    """One file, to which tensors are added in turn, e.g. `FileLayout("model-00001.safetensors")`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.size = HEADER_BYTES  # bytes so far
        self._header: dict[str, HeaderEntry] = {}
        # 8 bytes of length and a brace; each entry adds its own bytes and the comma or brace behind it.
        self._header_bytes = 9

    def add(self, stored: StoredTensor, *, shard_bytes: int) -> bool:
        """Add a tensor at the end; False if it does not fit. The first always fits, since none is split."""
        num_bytes = math.prod(stored.shape) * stored.dtype.itemsize
        begin = self.size - HEADER_BYTES
        entry = HeaderEntry(_DTYPES[str(stored.dtype)], tuple(stored.shape), (begin, begin + num_bytes))
        header_bytes = self._header_bytes + len(msgspec.json.encode({stored.name: entry})) - 1
        if self._header and (self.size + num_bytes > shard_bytes or header_bytes > HEADER_BYTES):
            return False
        self._header[stored.name] = entry
        self._header_bytes = header_bytes
        self.size += num_bytes
        return True

    def header(self) -> bytes:
        """[HEADER_BYTES] the file's beginning: the header, padded with spaces as the format allows."""
        room = HEADER_BYTES - 8
        header = msgspec.json.encode(self._header)
        assert len(header) <= room, f"header of {self.name} has {len(header)} bytes, not below {room}"
        return room.to_bytes(8, "little") + header.ljust(room)

    @property
    def width(self) -> Literal[2, 4]:
        """Bytes of an element, for deltas: 2 if 16-bit floats take at least half of the data, else 4."""
        halves = [entry.data_offsets for entry in self._header.values() if entry.dtype in ("BF16", "F16")]
        return 2 if 2 * sum(end - begin for begin, end in halves) >= self.size - HEADER_BYTES else 4


@dataclass(frozen=True, slots=True)
class VersionLayout:
    """All files of a version, and the place of each tensor by its name."""

    files: list[FileLayout]
    places: dict[str, TensorPlace]


def lay_out(tensors: Iterable[StoredTensor], *, version: int, shard_bytes: int) -> VersionLayout:
    """Lay out tensors in their order, in files of at most `shard_bytes` unless a tensor alone is larger.

    Raises `ValueError` for a name that comes twice, for a dtype without a name, or if there are no tensors.
    """
    files: list[FileLayout] = []
    places: dict[str, TensorPlace] = {}
    for stored in tensors:
        if stored.name in places:
            raise ValueError(f"tensor {stored.name} comes twice in version {version}; name each once")
        if str(stored.dtype) not in _DTYPES:
            raise ValueError(
                f"tensor {stored.name}: dtype {stored.dtype} is unknown to safetensors; cast the tensor"
            )
        position = files[-1].size if files else 0
        if not files or not files[-1].add(stored, shard_bytes=shard_bytes):
            files.append(FileLayout(f"model-{len(files) + 1:05}.safetensors"))
            position = files[-1].size
            files[-1].add(stored, shard_bytes=shard_bytes)
        places[stored.name] = TensorPlace(len(files) - 1, position, stored)
    if not files:
        raise ValueError(f"version {version} has no tensors; publish at least one")
    return VersionLayout(files, places)
