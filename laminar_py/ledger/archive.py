"""Response pieces that no rollback can need, in Parquet: `archive/*.parquet`, one file per call.

Written by the ledger after a checkpoint, for what is older than all that are kept; it deletes the pieces from
SQLite only when the file is complete. A crash in between leaves some pieces in both places, equal byte for byte.
Invariant: a file that is not the recorded one is never opened for a response.
pyarrow is imported by the functions that need it: a controller that archives nothing is spared its memory.
"""

import os
import re
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.ledger.database import ARCHIVE_NAME, LedgerError, reading
from laminar_py.ledger.payload import Payload, Piece, join, stored_pieces
from laminar_py.ledger.rows import TrajectoryRow, decode_event
from laminar_py.records.digests import file_digest
from laminar_py.records.disk import sync
from laminar_py.records.events import Archived
from laminar_py.records.spans import decode_spans, replace_spans

if TYPE_CHECKING:
    import pyarrow as pa

_ROW_GROUP_BYTES = 4 * 2**20  # whoever looks for one trajectory reads so much
_BINARY = ("mask", "experts", "digest")
# the rest is random bits, as good as
_COMPRESSION = dict.fromkeys(("trajectory", "start", "spans", "ids.list.element", "mask"), "zstd")
_SETTLED = "status = 'dropped' OR status = 'consumed' AND (kind = 'eval' OR step <= ?)"


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """A new file of the archive, and the numbers of the trajectories that are in it."""

    event: Archived
    trajectories: list[int]


def write_archive(run: Path, step: int, *, ledger: Path | None = None) -> ArchiveFile | None:
    """Copy to a new file all pieces still in SQLite that nobody needs who goes back to `step` or a later one.

    None if there are none; returns when it is on disk. The run's `ledger` may lie elsewhere.
    """
    moved: list[int] = []
    with reading(ledger or run) as connection:
        pieces = stored_pieces(connection, _SETTLED, (step,))
        seq = connection.execute("SELECT seq FROM head").fetchone()[0]
        first = next(pieces, None)
        if first is None:
            return None
        folder = run / ARCHIVE_NAME
        folder.mkdir(exist_ok=True)
        unfinished = folder / "unfinished"
        _write_file(unfinished, _noting(moved, first, pieces))
        path = folder / _file_name(seq)
        os.replace(unfinished, path)
    for parent in (folder, run):
        sync(parent)
    event = Archived(str(path.relative_to(run)), len(moved), path.stat().st_size, file_digest(path))
    return ArchiveFile(event, moved)


def archive_files(run: Path) -> list[Path]:
    """Files of the archive, in the order in which they were written."""
    return sorted((run / ARCHIVE_NAME).glob("*.parquet"))


def file_pieces(path: Path, number: int | None = None) -> Iterator[Piece]:
    """Pieces in one file, by trajectory, as stored; of one trajectory, or of all. Raises `LedgerError`."""
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            if not file.schema_arrow.equals(_schema()):
                raise LedgerError(f"archive={path}: its columns are not those of an archive; restore it")
            for group in range(file.num_row_groups):
                statistics = file.metadata.row_group(group).column(0).statistics
                if number is None or statistics.min <= number <= statistics.max:
                    rows = file.read_row_group(group, use_threads=False)
                    if number is not None:
                        rows = rows.filter(pc.equal(rows["trajectory"], number))
                    yield from _pieces(rows)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise LedgerError(f"archive={path}: cannot be read ({reason}); restore it") from error


def record_of(path: Path, connection: sqlite3.Connection) -> Archived | None:
    """The record of a file of the archive; None for one that a crash kept off the record.

    No other of its kind lies between that event and the one that the file is named by, so no more is read.
    """
    query = "SELECT CAST(body AS BLOB) FROM event WHERE seq > ? AND kind = 'archived' ORDER BY seq LIMIT 1"
    seq = re.fullmatch(r"pieces-(\d{12})\.parquet", path.name)
    found = connection.execute(query, (int(seq[1]),)).fetchone() if seq else None
    if found is not None:
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            event = decode_event(found[0])
            if isinstance(event, Archived) and Path(event.path).name == path.name:
                return event
    return None


def was_changed(path: Path, event: Archived) -> bool:
    """True where a file is not, byte for byte, what was recorded of it."""
    return path.stat().st_size != event.num_bytes or file_digest(path) != event.digest


def is_recorded(path: Path, connection: sqlite3.Connection) -> bool:
    """True for a file that is on record, and so has what SQLite lacks. Raises `LedgerError` if it was changed."""
    event = record_of(path, connection)
    if event is not None and was_changed(path, event):
        raise LedgerError(f"archive={path}: was changed since it was written; restore it")
    return event is not None


class StoredResponses:
    """Responses of a run, wherever their pieces are; each file of the archive is checked when first needed."""

    def __init__(self, run: Path, connection: sqlite3.Connection) -> None:
        self.run = run
        self._connection = connection
        self._recorded: dict[Path, bool] = {}

    def of(self, row: TrajectoryRow) -> Payload:
        """The response of a trajectory, with the spans that hold. Raises `LedgerError` where it is lost."""
        pieces = list(stored_pieces(self._connection, "number = ?", (row.number,)))
        if not pieces and row.length:
            pieces = self._archived(row)
        response = join(pieces)
        if row.spans is None:
            return response
        return replace(response, spans=replace_spans(response.spans, decode_spans(row.spans)))

    def _archived(self, row: TrajectoryRow) -> list[Piece]:
        """Pieces of a trajectory in the archive: all in one file, which was written after its last event."""
        for path in archive_files(self.run):
            if path.name >= _file_name(row.last_seq) and self._is_recorded(path):
                pieces = list(file_pieces(path, row.number))
                if pieces:
                    return pieces
        raise LedgerError(
            f"archive={self.run / ARCHIVE_NAME}: none of the {row.length} tokens of {row.id} is there; restore it"
        )

    def _is_recorded(self, path: Path) -> bool:
        if path not in self._recorded:
            self._recorded[path] = is_recorded(path, self._connection)
        return self._recorded[path]


def _file_name(seq: int) -> str:
    """By event number: a later file never takes the name of an earlier one."""
    return f"pieces-{seq:012d}.parquet"


def _noting(moved: list[int], first: Piece, rest: Iterable[Piece]) -> Iterator[Piece]:
    for piece in chain((first,), rest):
        if not moved or moved[-1] != piece.trajectory:
            moved.append(piece.trajectory)
        yield piece


def _schema() -> "pa.Schema":
    import pyarrow as pa

    return pa.schema(
        [
            ("trajectory", pa.int64()),
            ("start", pa.int32()),
            ("spans", pa.string()),
            ("ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            *((name, pa.binary()) for name in _BINARY),
        ]
    )


def _write_file(path: Path, pieces: Iterator[Piece]) -> None:
    import pyarrow.parquet as pq

    schema = _schema()
    with path.open("wb") as file:
        # numbers repeat too seldom for a dictionary; statistics are for finding a trajectory
        with pq.ParquetWriter(
            file, schema, compression=_COMPRESSION, use_dictionary=["spans"], write_statistics=["trajectory"]
        ) as writer:
            for group in _by_size(pieces):
                writer.write_table(_table(group, schema))
        file.flush()
        os.fsync(file.fileno())


def _table(pieces: list[Piece], schema: "pa.Schema") -> "pa.Table":
    """From buffers: what takes objects of Python imports pandas, where it is installed, to ask about them."""
    import pyarrow as pa

    def numbers(values: npt.NDArray[Any], kind: "pa.DataType") -> "pa.Array":
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])

    def texts(values: list[bytes | None], kind: "pa.DataType") -> "pa.Array":
        present = np.packbits([value is not None for value in values], bitorder="little")
        offsets, data = _joined([value or b"" for value in values], 1)
        return pa.Array.from_buffers(kind, len(values), [pa.py_buffer(present), pa.py_buffer(offsets), data])

    def lists(values: list[bytes], kind: "pa.DataType", dtype: str) -> "pa.Array":
        offsets, data = _joined(values, np.dtype(dtype).itemsize)
        inner = pa.Array.from_buffers(kind.value_type, int(offsets[-1]), [None, data])
        return pa.ListArray.from_arrays(numbers(offsets, pa.int32()), inner)

    columns = [
        numbers(np.array([piece.trajectory for piece in pieces], np.int64), pa.int64()),
        numbers(np.array([piece.start for piece in pieces], np.int32), pa.int32()),
        texts([piece.spans.encode() for piece in pieces], pa.string()),
        lists([piece.ids for piece in pieces], schema.field("ids").type, "<i4"),
        lists([piece.logprobs for piece in pieces], schema.field("logprobs").type, "<f4"),
        *(texts([getattr(piece, name) for piece in pieces], pa.binary()) for name in _BINARY),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _joined(blobs: list[bytes], size: int) -> tuple[npt.NDArray[np.int32], "pa.Buffer"]:
    """Offsets of blobs in items of `size` bytes, [n + 1], and the blobs in a row."""
    import pyarrow as pa

    offsets = np.zeros(len(blobs) + 1, np.int32)
    np.cumsum([len(blob) // size for blob in blobs], out=offsets[1:])
    return offsets, pa.py_buffer(b"".join(blobs))


def _by_size(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        group.append(piece)
        size += len(piece.ids) + len(piece.logprobs) + len(piece.mask or b"") + len(piece.experts or b"")
        if size >= _ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _blobs(column: "pa.ListArray") -> list[bytes]:
    values = column.values.to_numpy()
    data, size = values.tobytes(), values.itemsize
    return [data[start * size : end * size] for start, end in pairwise(column.offsets.to_pylist())]


def _pieces(rows: "pa.Table") -> Iterator[Piece]:
    ids, logprobs = (_blobs(rows[name].combine_chunks()) for name in ("ids", "logprobs"))
    plain = (rows[name].to_pylist() for name in ("trajectory", "start", "spans", *_BINARY))
    for number, start, spans, *binary, tokens, scores in zip(*plain, ids, logprobs, strict=True):
        yield Piece(number, start, spans, tokens, scores, *binary)
