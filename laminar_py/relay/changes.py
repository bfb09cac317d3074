"""Change files: what differs between two versions, tensor by tensor, for engines that patch their weights.

`NodeVersions` makes one for a version whose chunks all came as deltas; `records/weights.py` has the format. The
differences of chunks come in any order and are written in order, so most of the file exists before the last chunk
arrives. Values are absolute: an element's bits in the base, which was verified, plus its step.
"""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.weights import AT, TO
from laminar_py.relay.delta import Difference, Elements, elements
from laminar_py.relay.messages import Manifest
from laminar_py.relay.stored_version import StoredVersion

log = logging.getLogger(__name__)

CELL = 2  # bytes of the smallest element in a change file
_WORD = 4  # bytes of the largest element of a delta; chunks of whole words split no element
_ITEM_BYTES = {"BF16": 2, "F16": 2, "I16": 2, "F32": 4, "I32": 4}
_ENTRY_BYTES = 160  # at most, of a tensor in a header, besides its name
_ALIGNMENT = 64


class _HeaderEntry(msgspec.Struct, frozen=True):
    """A tensor in the header of a safetensors file; the defaults stand for the metadata, which are no tensor."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data_offsets: tuple[int, int] = (0, 0)  # [begin, end) in bytes, counted from the end of the header


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where the tensors of a file lie, ascending; `begins` and `ends` are [num_tensors] bytes of the file."""

    names: list[str]
    dtypes: list[str]
    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    width: int  # bytes of an element in deltas that also is each tensor's, else `CELL`


class _NoChangesError(Exception):
    """A version has no change file; the message says why."""


@dataclass(slots=True)
class _Changed:
    """Changes of one tensor so far: a run of places in the file, and their values."""

    begin: int  # byte of the change file
    count: int
    values: list[Elements]


class ChangesFile:
    """A change file in the making, e.g. `ChangesFile.begin(path, base, manifest)`.

    `add` each chunk's difference once, then `finish`. Not for two threads at once.
    """

    def __init__(self, path: Path, base: StoredVersion, manifest: Manifest, layouts: list[_Layout]) -> None:
        self.path = path
        self._base = base
        self._manifest = manifest
        self._layouts = layouts
        names = [name for layout in layouts for name in layout.names]
        room = 2 * sum(len(msgspec.json.encode(name)) + _ENTRY_BYTES for name in names) + _ENTRY_BYTES
        self._header_bytes = -(-room // _ALIGNMENT) * _ALIGNMENT
        self._end = self._header_bytes  # of the places, which come first
        self._tensors: dict[tuple[int, int], _Changed] = {}  # by file and place in its layout
        self._early: dict[tuple[int, int], Difference] = {}  # chunks that came before an earlier one
        self._order = ((file, i) for file in range(len(layouts)) for i in range(manifest.num_chunks(file)))
        self._next = next(self._order, None)
        self._unfinished = path.with_name(f"{path.name}~")
        self._descriptor = os.open(self._unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    @classmethod
    def begin(cls, path: Path, base: StoredVersion, manifest: Manifest) -> "ChangesFile | None":
        """Begin the file of a version with the layout of `base`; None if it cannot be made."""
        try:
            if manifest.chunk_bytes % _WORD:
                raise _NoChangesError(f"chunks of {manifest.chunk_bytes} bytes split elements")
            layouts = [
                _read_layout(base.file_path(file), entry.width) for file, entry in enumerate(manifest.files)
            ]
            return cls(path, base, manifest, layouts)
        except (_NoChangesError, OSError) as error:
            log.debug("version %d gets no change file: %s", manifest.version, error)
            return None

    def add(self, file: int, index: int, difference: Difference) -> bool:
        """Add the difference of a chunk; False if the version can have no change file, which is then gone."""
        self._early[file, index] = difference
        try:
            while self._next is not None and (following := self._early.pop(self._next, None)) is not None:
                self._write(*self._next, following)
                self._next = next(self._order, None)
        except (_NoChangesError, OSError) as error:
            log.debug("version %d gets no change file: %s", self._manifest.version, error)
            self.drop()
            return False
        return True

    def finish(self) -> Path | None:
        """Write values and header, after all chunks, and give the file its name; None if there is no room."""
        assert self._next is None, f"chunk {self._next} of version {self._manifest.version} is missing"
        try:
            os.pwrite(self._descriptor, self._write_values(), 0)
            self._unfinished.rename(self.path)
        except OSError as error:
            log.debug("version %d gets no change file: %s", self._manifest.version, error)
            self.drop()
            return None
        self._close()
        return self.path

    def drop(self) -> None:
        """Delete the unfinished file."""
        self._unfinished.unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1
        self._early.clear()
        self._tensors.clear()

    def _write(self, file: int, index: int, difference: Difference) -> None:
        """Write the places of a chunk's changes and keep the values. Raises `_NoChangesError`, `OSError`."""
        data = self._base.chunk_data(file, index)
        width, layout = difference.steps.itemsize, self._layouts[file]
        if difference.tail != data[len(data) - len(difference.tail) :]:
            raise _NoChangesError("a part of an element changed")
        places, values = difference.places, elements(data, width).take(difference.places) + difference.steps
        if layout.width != width:
            places, values = _cells(places, values, data)
        first = index * self._manifest.chunk_bytes
        if len(places) and (not len(layout.ends) or first + int(places[0]) * layout.width < layout.begins[0]):
            raise _NoChangesError("bytes outside all tensors changed")
        last, written = first + len(data), [np.empty(0, "<i8")]
        for tensor in range(int(np.searchsorted(layout.ends, first, "right")), len(layout.ends)):
            begin, end = int(layout.begins[tensor]), int(layout.ends[tensor])
            if begin >= last:
                break
            cuts = -(-np.array([begin - first, end - first]) // layout.width)
            left, right = np.searchsorted(places, cuts)
            if left < right:
                inside, changed = places[left:right], values[left:right]
                if _ITEM_BYTES.get(layout.dtypes[tensor]) != layout.width:
                    inside, changed = _widened(inside, changed, data, layout, tensor, first)
                begin_of_run = self._end + 8 * sum(map(len, written))
                found = self._tensors.setdefault((file, tensor), _Changed(begin_of_run, 0, []))
                found.count += len(inside)
                found.values.append(changed)
                written.append(inside.astype("<i8") + (first - begin) // changed.itemsize)
        self._write_at(self._end, together := np.concatenate(written))
        self._end += together.nbytes

    def _write_values(self) -> bytes:
        """Write the values behind all places, wide ones first, and return the header."""
        header: dict[str, Mapping[str, str] | _HeaderEntry] = {
            "__metadata__": {
                "base": str(self._base.manifest.version),
                "version": str(self._manifest.version),
            }
        }
        end = self._end
        for (file, tensor), changed in sorted(self._tensors.items(), key=lambda item: -item[1].values[0].itemsize):
            name, dtype = self._layouts[file].names[tensor], self._layouts[file].dtypes[tensor]
            values = np.concatenate(changed.values)
            self._write_at(end, values)
            for suffix, kind, begin, size in (
                (AT, "I64", changed.begin, 8 * changed.count),
                (TO, dtype, end, values.nbytes),
            ):
                begin -= self._header_bytes
                header[name + suffix] = _HeaderEntry(kind, (changed.count,), (begin, begin + size))
            end += values.nbytes
        room = self._header_bytes - 8
        encoded = msgspec.json.encode(header)
        assert len(encoded) <= room, f"header of {self.path} has {len(encoded)} bytes, not below {room}"
        return room.to_bytes(8, "little") + encoded.ljust(room)

    def _write_at(self, position: int, array: npt.NDArray[np.generic]) -> None:
        """Write an array. Raises `OSError` on a full file system."""
        rest = array.view(np.uint8).data
        while rest:
            written = os.pwrite(self._descriptor, rest, position)
            position, rest = position + written, rest[written:]


def _read_layout(path: Path, width: int) -> _Layout:
    """Read where the tensors of a file lie. Raises `_NoChangesError` if it has no readable header, `OSError`."""
    if path.suffix != ".safetensors":
        none = np.empty(0, np.int64)
        return _Layout(names=[], dtypes=[], begins=none, ends=none, width=width)
    with path.open("rb") as source:
        size = int.from_bytes(source.read(8), "little")
        if size + 8 > os.fstat(source.fileno()).st_size:
            raise _NoChangesError(f"{path} is no safetensors file")
        try:
            header = msgspec.json.decode(source.read(size), type=dict[str, _HeaderEntry])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _NoChangesError(f"{path}: {error}") from None
    with suppress(KeyError):
        del header["__metadata__"]
    tensors = sorted((entry.data_offsets, name, entry.dtype) for name, entry in header.items())
    offsets = np.array([offset for offset, _, _ in tensors], np.int64).reshape(-1, 2) + 8 + size
    names, dtypes = [name for _, name, _ in tensors], [dtype for _, _, dtype in tensors]
    begins, ends = offsets[:, 0], offsets[:, 1]
    if (begins[1:] != ends[:-1]).any() or (begins % CELL).any():
        raise _NoChangesError(f"{path}: tensors overlap, leave holes, or begin at an odd byte")
    exact = all(_ITEM_BYTES.get(dtype) == width for dtype in dtypes) and not (begins % width).any()
    return _Layout(names=names, dtypes=dtypes, begins=begins, ends=ends, width=width if exact else CELL)


def _cells(
    places: npt.NDArray[np.intp], values: Elements, base: memoryview
) -> tuple[npt.NDArray[np.intp], Elements]:
    """Split changed words into changed cells, without cells that did not change."""
    halves = values.view("<u2")
    cells = (2 * places[:, None] + np.arange(2)).reshape(-1)
    changed = halves != elements(base, CELL)[cells]
    return cells[changed], halves[changed]


def _widened(
    cells: npt.NDArray[np.intp],
    values: Elements,
    base: memoryview,
    layout: _Layout,
    tensor: int,
    first: int,
) -> tuple[npt.NDArray[np.intp], Elements]:
    """Join changed cells to changed words of the chunk, which begins at byte `first`.

    Raises `_NoChangesError` for a tensor of another width, or that does not lie on words.
    """
    if _ITEM_BYTES.get(layout.dtypes[tensor]) != _WORD or layout.begins[tensor] % _WORD or layout.width != CELL:
        raise _NoChangesError(f"{layout.names[tensor]} has elements of {layout.dtypes[tensor]}")
    words, which = np.unique(cells // 2, return_inverse=True)
    joined = elements(base, _WORD)[words].copy()
    joined.view("<u2").reshape(-1, 2)[which, cells % 2] = values
    return words, joined
