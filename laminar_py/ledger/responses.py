"""Stored responses of a run, from segments of this host or from the archive.

The audit, `laminar samples` and `export` read them. A file of the archive is compared with its record before its
first use.
"""

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from laminar_py.ledger.archive import archive_files, file_name, file_pieces, is_recorded
from laminar_py.ledger.database import LedgerError, segments_path
from laminar_py.ledger.pieces import StoredPiece, column_values, piece_rows, split, stored_pieces
from laminar_py.ledger.rows import TrajectoryRow
from laminar_py.ledger.segments.payload import Payload, join
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.records.columns import TokenValues
from laminar_py.records.pieces import PayloadLostError
from laminar_py.records.spans import decode_spans, replace_spans


class Numbered(Protocol):
    """The columns of a trajectory's row by which its pieces are found."""

    number: int
    length: int
    last_seq: int


class StoredResponses:
    """Reads responses of the run in a folder."""

    def __init__(self, run: Path, connection: sqlite3.Connection) -> None:
        self.run = run
        self._connection = connection
        self._reader = PayloadReader(segments_path(run))
        self._recorded: dict[Path, bool] = {}

    def response(self, row: TrajectoryRow) -> Payload:
        """Read the response of a trajectory, with its final spans. Raises `LedgerError` if it is lost."""
        return joined(row, split(self.pieces(row))[0])

    def columns(self, row: TrajectoryRow) -> dict[str, TokenValues]:
        """Read the columns that scoring gave a response, by name, without lost ones."""
        return {name: piece.values for name, piece in column_values(self.pieces(row)).items()}

    def pieces(self, row: Numbered) -> list[StoredPiece]:
        """Read the pieces of a trajectory. Raises `LedgerError` if a file of the archive was changed."""
        rows = piece_rows(self._connection, "number = ?", (row.number,))
        return list(stored_pieces(self._reader, rows)) or self._archived(row)

    def _archived(self, row: Numbered) -> list[StoredPiece]:
        """Read the pieces of a trajectory from archive files written after its last event."""
        found: list[StoredPiece] = []
        for path in archive_files(self.run) if row.length else ():
            if path.name >= file_name(row.last_seq, 0) and self._is_recorded(path):
                found += file_pieces(path, row.number)
        return sorted(found, key=lambda piece: (piece.name, piece.start))

    def _is_recorded(self, path: Path) -> bool:
        if path not in self._recorded:
            self._recorded[path] = is_recorded(path, self._connection)
        return self._recorded[path]


def joined(row: TrajectoryRow, tokens: Sequence[StoredPiece]) -> Payload:
    """Join pieces to a response, with its final spans. Raises `LedgerError` if one is missing."""
    try:
        response = join(piece.tokens for piece in tokens)
    except (ValueError, PayloadLostError) as error:
        raise LedgerError(f"trajectory={row.id}: its tokens cannot be read ({error})") from None
    if len(response.ids) < row.length:
        raise LedgerError(
            f"trajectory={row.id}: {len(response.ids)} of its {row.length} tokens are in segments and archive;"
            " restore them"
        )
    if row.spans is None:
        return response
    return replace(response, spans=replace_spans(response.spans, decode_spans(row.spans)))
