"""Change files: what differs between two versions, tensor by tensor, for engines that patch their weights.

`NodeVersions` makes one for a version whose chunks all came as deltas; `records/weights.py` has the format. The
differences of chunks come in any order, from several threads, and are written in order, so all but the header
exists when the last chunk has arrived. Values are absolute: an element's bits in the verified base, plus
its step. A file is written over the pages of a retired one: fresh pages cost more than the rest of the work.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.weights import AT, TO, UNUSED
from laminar_py.relay.delta import MIN_SPACING, Difference, Elements, elements
from laminar_py.relay.mapped_file import MappedFile
from laminar_py.relay.messages import Manifest
from laminar_py.relay.stored_version import StoredVersion
from laminar_py.relay.version_layout import HeaderEntry

log = logging.getLogger(__name__)

CELL = 2  # bytes of the smallest element in a change file
_WORD = 4  # bytes of the largest element of a delta; chunks of whole words split no element
_PLACE = 8  # bytes of a place
_ITEM_BYTES = {"BF16": 2, "F16": 2, "I16": 2, "F32": 4, "I32": 4}
_ENTRY_BYTES = 160  # at most, of a tensor in a header, besides its name
_ALIGNMENT = 64


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
class _Region:
    """Bytes [begin, end) of a change file, for items of one size; those before `used` are written."""

    begin: int
    end: int
    used: int


@dataclass(slots=True)
class _Changed:
    """Changes of one tensor so far; `at` and `to` are the first byte of its places, and of its values."""

    at: int
    to: int
    count: int
    item_bytes: int


_Piece: TypeAlias = tuple[int, npt.NDArray[np.int64], Elements]  # number of a tensor, its places and values


class ChangesFile:
    """A change file in the making, e.g. `ChangesFile.begin(path, base, manifest)`.

    `add` each chunk's difference once, in any thread, then `finish`. The file has a region for places, and one for
    values of each size. Each has room for all that deltas can change, as a hole in the file that takes no memory.
    The file gives itself up where less than `reserve` bytes of its file system are left. `spare` is its path
    once it is dropped.
    """

    def __init__(
        self,
        path: Path,
        base: StoredVersion,
        manifest: Manifest,
        layouts: list[_Layout],
        *,
        spare: Path | None = None,
        reserve: int = 0,
    ) -> None:
        self.path = path
        self._spare = spare
        self._base = base
        self._manifest = manifest
        self._layouts = layouts
        self._reserve = reserve
        names = [name for layout in layouts for name in layout.names]
        room = 2 * sum(len(msgspec.json.encode(name)) + _ENTRY_BYTES for name in names) + 4 * _ENTRY_BYTES
        self._header_bytes = -(-room // _ALIGNMENT) * _ALIGNMENT
        self._regions = _make_regions(manifest, layouts, self._header_bytes)
        self._tensors: dict[tuple[int, int], _Changed] = {}  # by file and place in its layout
        self._early: dict[tuple[int, int], list[_Piece]] = {}  # chunks that came before an earlier one
        self._order = ((file, i) for file in range(len(layouts)) for i in range(manifest.num_chunks(file)))
        self._next = next(self._order, None)
        self._lock = threading.Lock()
        self._unfinished = path.with_name(f"{path.name}~")
        self._pages: MappedFile | None = _open_pages(
            self._unfinished, max(it.end for it in self._regions.values())
        )

    @classmethod
    def begin(
        cls, path: Path, base: StoredVersion, manifest: Manifest, *, spare: Path | None = None, reserve: int = 0
    ) -> "ChangesFile | None":
        """Begin the file of a version with the layout of `base`, over the retired file `spare` if that exists.

        Returns None if it cannot be made.
        """
        try:
            if manifest.chunk_bytes % _WORD:
                raise _NoChangesError(f"chunks of {manifest.chunk_bytes} bytes split elements")
            layouts = [
                _read_layout(base.file_path(file), entry.width) for file, entry in enumerate(manifest.files)
            ]
            if spare is not None and spare.exists():
                spare.rename(path.with_name(f"{path.name}~"))
            return cls(path, base, manifest, layouts, spare=spare, reserve=reserve)
        except (_NoChangesError, OSError) as error:
            log.debug("version %d gets no change file: %s", manifest.version, error)
            return None

    def add(self, file: int, index: int, difference: Difference) -> bool:
        """Add the difference of a chunk; False if the version can have no change file, which is then gone."""
        try:
            pieces = self._split(file, index, difference)
            with self._lock:
                if self._pages is None:
                    return False
                self._early[file, index] = pieces
                while self._next is not None and (following := self._early.pop(self._next, None)) is not None:
                    self._write(self._next[0], following)
                    self._next = next(self._order, None)
                if self._next is None:
                    self._free_pages(self._pages)
                self._check_room()
        except (_NoChangesError, OSError) as error:
            log.debug("version %d gets no change file: %s", self._manifest.version, error)
            self._delete()
            return False
        return True

    def finish(self) -> Path | None:
        """Write the header, after all chunks, and give the file its name; None if there is no room."""
        assert self._next is None, f"chunk {self._next} of version {self._manifest.version} is missing"
        try:
            self._write_at(0, np.frombuffer(self._make_header(), np.uint8))
            self._unfinished.rename(self.path)
        except OSError as error:
            log.debug("version %d gets no change file: %s", self._manifest.version, error)
            self._delete()
            return None
        self._close()
        return self.path

    def drop(self) -> None:
        """End the unfinished file, once no thread writes it; a thread that adds a chunk later fails.

        The file becomes the spare one, if there is none: to free its pages would hold up the event loop.
        """
        if self._spare is None or self._spare.exists():
            self._delete()
            return
        with self._lock:
            if self._pages is not None:
                with suppress(FileNotFoundError):
                    self._unfinished.rename(self._spare)
            self._close()

    def _delete(self) -> None:
        with self._lock:
            if self._pages is not None:
                self._unfinished.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        if self._pages is not None:
            self._pages.close()
        self._pages = None
        self._early.clear()
        self._tensors.clear()

    def _split(self, file: int, index: int, difference: Difference) -> list[_Piece]:
        """Divide a chunk's changes among tensors. Raises `_NoChangesError`, `OSError`."""
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
        last, pieces = first + len(data), []
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
                pieces.append((tensor, inside + (first - begin) // changed.itemsize, changed))
        return pieces

    def _write(self, file: int, pieces: Sequence[_Piece]) -> None:
        """Write the changes of the chunk that is next. Raises `_NoChangesError` if they do not fit, `OSError`."""
        for tensor, places, values in pieces:
            at, to = self._regions[_PLACE], self._regions[values.itemsize]
            found = self._tensors.setdefault((file, tensor), _Changed(at.used, to.used, 0, values.itemsize))
            found.count += len(places)
            for region, items in ((at, places), (to, values)):
                if region.used + items.nbytes > region.end:
                    raise _NoChangesError(f"its file has room for {region.end - region.begin} bytes of changes")
                self._write_at(region.used, items.view(np.uint8))
                region.used += items.nbytes

    def _make_header(self) -> bytes:
        """Describe the tensors' places and values, and the holes that are left in the regions."""
        header: dict[str, Mapping[str, str] | HeaderEntry] = {
            "__metadata__": {
                "base": str(self._base.manifest.version),
                "version": str(self._manifest.version),
            }
        }

        def put(name: str, dtype: str, begin: int, count: int, item_bytes: int) -> None:
            begin -= self._header_bytes
            header[name] = HeaderEntry(dtype, (count,), (begin, begin + count * item_bytes))

        for (file, tensor), changed in self._tensors.items():
            name, dtype = self._layouts[file].names[tensor], self._layouts[file].dtypes[tensor]
            put(name + AT, "I64", changed.at, changed.count, _PLACE)
            put(name + TO, dtype, changed.to, changed.count, changed.item_bytes)
        for item_bytes, region in self._regions.items():
            if region.used < region.end:
                put(f"{item_bytes}{UNUSED}", "U8", region.used, region.end - region.used, 1)
        room = self._header_bytes - 8
        encoded = msgspec.json.encode(header)
        assert len(encoded) <= room, f"header of {self.path} has {len(encoded)} bytes, not below {room}"
        return room.to_bytes(8, "little") + encoded.ljust(room)

    def _write_at(self, position: int, data: npt.NDArray[np.uint8]) -> None:
        """Write bytes. Raises `OSError` on a full file system."""
        assert self._pages is not None, f"{self.path} was dropped"
        self._pages.write(position, data)

    def _free_pages(self, pages: MappedFile) -> None:
        """Give back pages of a retired file, which had more changes; keep as many again as this file uses."""
        for region in self._regions.values():
            pages.free(2 * region.used - region.begin, region.end)

    def _check_room(self) -> None:
        """Raise `_NoChangesError` where the version that arrives might find too little room."""
        if self._reserve:
            state = os.statvfs(self.path.parent)
            if state.f_bavail * state.f_frsize < self._reserve:
                raise _NoChangesError(f"the version itself needs {self._reserve} more bytes in {self.path.parent}")


def _make_regions(manifest: Manifest, layouts: Sequence[_Layout], begin: int) -> dict[int, _Region]:
    """Regions for places and for values of each size, by bytes of an item, from byte `begin` on."""
    most, regions = manifest.num_bytes // CELL // MIN_SPACING, dict[int, _Region]()
    for item_bytes in (_PLACE, _WORD, CELL):
        count = most
        if item_bytes != _PLACE:
            sizes = (
                int(end - begin) // item_bytes
                for it in layouts
                for begin, end, dtype in zip(it.begins, it.ends, it.dtypes, strict=True)
                if _ITEM_BYTES.get(dtype) == item_bytes
            )
            count = min(most, sum(sizes))
        regions[item_bytes] = _Region(begin, begin + count * item_bytes, begin)
        begin = regions[item_bytes].end
    return regions


def _open_pages(path: Path, size: int) -> MappedFile:
    """Open a file of `size` bytes, with the pages that it has unless a process reads it. Raises `OSError`."""
    pages = None
    try:
        pages = MappedFile(path)
        if not pages.is_unused:
            pages.close()
            path.unlink()
            pages = MappedFile(path)
        pages.set_size(size)
    except OSError:
        if pages is not None:
            pages.close()
        path.unlink(missing_ok=True)
        raise
    return pages


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
            header = msgspec.json.decode(source.read(size), type=dict[str, HeaderEntry])
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
