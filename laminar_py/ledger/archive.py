"""The archive holds stored tokens that no rollback needs, as Parquet: `archive/*.parquet`.

After a checkpoint each host writes a file of the pieces in its segments that are older than all kept checkpoints
(`archive_pieces`). The ledger deletes its references when the files are on record; a crash before that leaves
equal copies in both places. Readers open an archive file only if it is the recorded one (law 11). Functions import
pyarrow themselves, which spares the memory of processes that archive nothing.
"""

import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.ledger.database import ARCHIVE_NAME, LedgerError, segments_path
from laminar_py.ledger.pieces import PieceRow, StoredPiece, rebuilt, stored_pieces
from laminar_py.ledger.rows import decode_event
from laminar_py.ledger.segments.frames import describe
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.records.codec import decode, encode, file_digest
from laminar_py.records.events import Archived
from laminar_py.records.host import sync
from laminar_py.records.pieces import ColumnPiece

if TYPE_CHECKING:
    import pyarrow as pa

_ROW_GROUP_BYTES = 4 * 2**20  # a reader of one trajectory reads a whole row group
_BINARY = ("mask", "experts", "values", "digest")
# the other columns hardly compress
_COMPRESSION = dict.fromkeys(("trajectory", "name", "start", "description", "ids.list.element", "mask"), "zstd")
SETTLED = "status = 'dropped' OR status = 'consumed' AND (kind = 'eval' OR step <= ?)"


class ArchiveRequest(msgspec.Struct, frozen=True):
    """References to pieces of one host, by trajectory, and the name of the file to write."""

    run: str
    name: str
    rows: list[PieceRow]


class ArchiveAnswer(msgspec.Struct, frozen=True):
    """A new file, and the trajectories left out because a piece could not be read, with the reason."""

    event: Archived
    unreadable: dict[int, str]


def archive_pieces(request: bytes) -> bytes:
    """Write an archive file on the host whose segments have the pieces: `ArchiveRequest` in, `ArchiveAnswer` out.

    Raises `OSError`.
    """
    wanted = decode(ArchiveRequest, request)
    run, unreadable = Path(wanted.run), dict[int, str]()
    folder = run / ARCHIVE_NAME
    folder.mkdir(exist_ok=True)
    reader = PayloadReader(segments_path(run))
    path, unfinished = folder / wanted.name, folder / f"{wanted.name}.tmp"
    numbers = set[int]()

    def readable() -> Iterator[StoredPiece]:
        stored = stored_pieces(reader, iter(wanted.rows))
        for number, pieces in groupby(stored, key=lambda piece: piece.trajectory):
            own = list(pieces)
            if fault := next((piece.fault for piece in own if piece.piece is None), ""):
                unreadable[number] = fault
            else:
                numbers.add(number)
                yield from own

    _write_file(unfinished, readable())
    reader.close()
    os.replace(unfinished, path)
    for parent in (folder, run):
        sync(parent)
    event = Archived(str(path.relative_to(run)), len(numbers), path.stat().st_size, file_digest(path))
    return encode(ArchiveAnswer(event, unreadable))


def archive_files(run: Path) -> list[Path]:
    """Return the files of the archive, in order of writing."""
    return sorted((run / ARCHIVE_NAME).glob("*.parquet"))


def file_name(seq: int, part: int) -> str:
    """Return a file name by event number, so that no later file takes the name of an earlier one."""
    return f"pieces-{seq:012d}-{part}.parquet"


def file_pieces(path: Path, number: int | None = None) -> Iterator[StoredPiece]:
    """Iterate over the pieces in a file, of trajectory `number` or of all. Raises `LedgerError`."""
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
    """Return the event of an archive file; None if a crash came before its event.

    The name of a file has an event number; the events of all files of one call follow that event directly.
    """
    query = "SELECT CAST(body AS BLOB) FROM event WHERE seq > ? AND kind = 'archived' ORDER BY seq"
    seq = re.fullmatch(r"pieces-(\d{12})-\d+\.parquet", path.name)
    for (body,) in connection.execute(query, (int(seq[1]),)) if seq else ():
        with suppress(msgspec.DecodeError, UnicodeDecodeError):
            event = decode_event(body)
            if isinstance(event, Archived) and Path(event.path).name == path.name:
                return event
            if isinstance(event, Archived) and not Path(event.path).name.startswith(path.name.rpartition("-")[0]):
                return None
    return None


def was_changed(path: Path, event: Archived) -> bool:
    """Whether a file differs from its recorded size or digest."""
    return path.stat().st_size != event.num_bytes or file_digest(path) != event.digest


def is_recorded(path: Path, connection: sqlite3.Connection) -> bool:
    """Whether a file is on record. Raises `LedgerError` if it was changed."""
    event = record_of(path, connection)
    if event is not None and was_changed(path, event):
        raise LedgerError(f"archive={path}: was changed since it was written; restore it")
    return event is not None


def _schema() -> "pa.Schema":
    import pyarrow as pa

    return pa.schema(
        [
            ("trajectory", pa.int64()),
            ("name", pa.string()),
            ("start", pa.int32()),
            ("description", pa.binary()),
            ("ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            *((name, pa.binary()) for name in _BINARY),
        ]
    )


class _Row(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A piece as a row of Parquet."""

    trajectory: int
    name: str
    start: int
    description: bytes
    ids: bytes
    logprobs: bytes
    mask: bytes | None
    experts: bytes | None
    values: bytes | None  # of a column
    digest: bytes

    @property
    def num_bytes(self) -> int:
        """Size of its arrays."""
        return sum(len(array or b"") for array in (self.ids, self.logprobs, self.mask, self.experts, self.values))


def _row(stored: StoredPiece) -> _Row:
    piece = stored.piece
    assert piece is not None, "unreadable pieces are left out"
    tokens = None if isinstance(piece, ColumnPiece) else piece
    return _Row(
        trajectory=stored.trajectory,
        name=stored.name,
        start=stored.start,
        description=describe(piece),
        ids=tokens.ids if tokens else b"",
        logprobs=tokens.logprobs if tokens else b"",
        mask=tokens.mask if tokens else None,
        experts=tokens.experts if tokens else None,
        values=piece.values.data if isinstance(piece, ColumnPiece) else None,
        digest=stored.digest,
    )


def _write_file(path: Path, pieces: Iterator[StoredPiece]) -> None:
    import pyarrow.parquet as pq

    schema = _schema()
    with path.open("wb") as file:
        # numbers hardly repeat, so only names get a dictionary; readers find a trajectory by the statistics
        with pq.ParquetWriter(
            file, schema, compression=_COMPRESSION, use_dictionary=["name"], write_statistics=["trajectory"]
        ) as writer:
            for group in _by_size(map(_row, pieces)):
                writer.write_table(_table(group, schema))
        file.flush()
        os.fsync(file.fileno())


def _table(rows: list[_Row], schema: "pa.Schema") -> "pa.Table":
    """Make a table from buffers, since pyarrow would import pandas, if installed, to look at Python objects."""
    import pyarrow as pa

    def numbers(values: npt.NDArray[Any], kind: "pa.DataType") -> "pa.Array":
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])

    def texts(values: Sequence[bytes | None], kind: "pa.DataType") -> "pa.Array":
        present = np.packbits([value is not None for value in values], bitorder="little")
        offsets, data = _joined([value or b"" for value in values], 1)
        return pa.Array.from_buffers(kind, len(values), [pa.py_buffer(present), pa.py_buffer(offsets), data])

    def lists(values: list[bytes], kind: "pa.DataType", dtype: str) -> "pa.Array":
        offsets, data = _joined(values, np.dtype(dtype).itemsize)
        inner = pa.Array.from_buffers(kind.value_type, int(offsets[-1]), [None, data])
        return pa.ListArray.from_arrays(numbers(offsets, pa.int32()), inner)

    columns = [
        numbers(np.array([row.trajectory for row in rows], np.int64), pa.int64()),
        texts([row.name.encode() for row in rows], pa.string()),
        numbers(np.array([row.start for row in rows], np.int32), pa.int32()),
        texts([row.description for row in rows], pa.binary()),
        lists([row.ids for row in rows], schema.field("ids").type, "<i4"),
        lists([row.logprobs for row in rows], schema.field("logprobs").type, "<f4"),
        *(texts([getattr(row, name) for row in rows], pa.binary()) for name in _BINARY),
    ]
    return pa.Table.from_arrays(columns, schema=schema)


def _joined(blobs: list[bytes], size: int) -> tuple[npt.NDArray[np.int32], "pa.Buffer"]:
    """Return [n + 1] offsets of blobs, in items of `size` bytes, and the joined blobs."""
    import pyarrow as pa

    offsets = np.zeros(len(blobs) + 1, np.int32)
    np.cumsum([len(blob) // size for blob in blobs], out=offsets[1:])
    return offsets, pa.py_buffer(b"".join(blobs))


def _by_size(rows: Iterator[_Row]) -> Iterator[list[_Row]]:
    group: list[_Row] = []
    size = 0
    for row in rows:
        group.append(row)
        size += row.num_bytes
        if size >= _ROW_GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _blobs(column: "pa.ListArray") -> list[bytes]:
    values = column.values.to_numpy()
    data, size = values.tobytes(), values.itemsize
    return [data[start * size : end * size] for start, end in pairwise(column.offsets.to_pylist())]


def _pieces(rows: "pa.Table") -> Iterator[StoredPiece]:
    ids, logprobs = (_blobs(rows[name].combine_chunks()) for name in ("ids", "logprobs"))
    plain = (rows[name].to_pylist() for name in ("trajectory", "name", "start", "description", *_BINARY))
    for number, name, start, description, mask, experts, values, digest, tokens, scores in zip(
        *plain, ids, logprobs, strict=True
    ):
        arrays = b"".join(chain((tokens, scores), filter(None, (mask, experts, values))))
        yield rebuilt(number, name, start, digest, description, arrays)
