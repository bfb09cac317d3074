"""The archive holds stored pieces that no rollback needs, in files of the run's folder: `archive/*.segment`.

After a checkpoint each host writes a file of the pieces in its segments that are older than all kept checkpoints
(`archive_pieces`). A file is a segment of compressed pieces that ends with their references. The ledger deletes
its own references when the files are on record; a crash before that leaves equal copies in both places. Readers
open an archive file only if it is the recorded one (law 11).
"""

import os
import re
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import groupby
from pathlib import Path

import msgspec
from msgspec.structs import replace

from laminar_py.ledger.database import ARCHIVE_NAME, LedgerError, segments_path
from laminar_py.ledger.pieces import PieceRow, StoredPiece, stored_pieces
from laminar_py.ledger.rows import decode_event
from laminar_py.ledger.segments.frames import make_frame
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import SEGMENT, segments_in
from laminar_py.records.codec import decode, encode, file_digest
from laminar_py.records.events import Archived
from laminar_py.records.host import sync

SETTLED = "status = 'dropped' OR status = 'consumed' AND (kind = 'eval' OR step <= ?)"
_END = struct.Struct("<Q")  # last bytes of a file: the place of its references


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
    path, unfinished = folder / wanted.name, folder / f"{wanted.name}.tmp"
    rows: list[PieceRow] = []
    with closing(PayloadReader(segments_path(run))) as reader, unfinished.open("wb") as file:
        for number, pieces in _by_trajectory(stored_pieces(reader, iter(wanted.rows))):
            if fault := next((stored.fault for stored in pieces if stored.piece is None), ""):
                unreadable[number] = fault
                continue
            for stored in pieces:
                assert stored.piece is not None, "trajectories with unreadable pieces are left out"
                frame, offset = make_frame(stored.piece, packed=True), file.tell()
                file.writelines(frame.buffers)
                rows.append(replace(stored.row, segment=path.stem, offset=offset, num_bytes=frame.num_bytes))
        end = file.tell()
        file.write(encode(rows) + _END.pack(end))
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    for parent in (folder, run):
        sync(parent)
    numbers = {row.trajectory for row in rows}
    event = Archived(str(path.relative_to(run)), len(numbers), path.stat().st_size, file_digest(path))
    return encode(ArchiveAnswer(event, unreadable))


def _by_trajectory(pieces: Iterator[StoredPiece]) -> Iterator[tuple[int, list[StoredPiece]]]:
    return ((number, list(own)) for number, own in groupby(pieces, key=lambda stored: stored.row.trajectory))


def archive_files(run: Path) -> list[Path]:
    """Return the files of the archive, in order of writing."""
    return segments_in(run / ARCHIVE_NAME)


def file_name(seq: int, part: int) -> str:
    """Return a file name by event number, so that no later file takes the name of an earlier one."""
    return f"pieces-{seq:012d}-{part}{SEGMENT}"


def file_pieces(path: Path, number: int | None = None) -> Iterator[StoredPiece]:
    """Iterate over the pieces in a file, of trajectory `number` or of all. Raises `LedgerError`."""
    try:
        with path.open("rb") as file:
            place = file.seek(-_END.size, os.SEEK_END)
            (start,) = _END.unpack(file.read())
            file.seek(start)
            rows = decode(list[PieceRow], file.read(place - start))
    except (OSError, ValueError, OverflowError, msgspec.DecodeError) as error:
        raise LedgerError(f"archive={path}: cannot be read ({error}); restore it") from error
    with closing(PayloadReader(path.parent)) as reader:
        yield from stored_pieces(reader, (row for row in rows if number in (None, row.trajectory)))


def record_of(path: Path, connection: sqlite3.Connection) -> Archived | None:
    """Return the event of an archive file; None if a crash came before its event.

    The name of a file has an event number. The events of one call's files follow that event directly.
    """
    query = "SELECT CAST(body AS BLOB) FROM event WHERE seq > ? AND kind = 'archived' ORDER BY seq"
    seq = re.fullmatch(rf"pieces-(\d{{12}})-\d+{re.escape(SEGMENT)}", path.name)
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
