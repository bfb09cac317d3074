"""Stored responses of a run, from segments of this host or from the archive.

The audit, `laminar samples`, `export` and `laminar rescore` read them. A file of the archive is compared with its
record before its first use.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TypeAlias

from laminar_py.ledger.archive import archive_files, file_name, file_pieces, is_recorded
from laminar_py.ledger.database import LedgerError, ledger_path, segments_path
from laminar_py.ledger.pieces import StoredPiece, column_values, is_whole, piece_rows, split_columns, stored_pieces
from laminar_py.ledger.rows import TrajectoryRow, read_prompt, trajectory_rows
from laminar_py.ledger.segments.payload import Payload, join
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.records.columns import TokenValues
from laminar_py.records.pieces import PayloadLostError
from laminar_py.records.spans import decode_spans, replace_spans
from laminar_py.records.trajectory import Prompt

_BLOCK = 4096  # trajectories in memory at a time

ResponseRow: TypeAlias = tuple[TrajectoryRow, Prompt | None, Payload]


class StoredResponses:
    """Reads responses of a run; `run` is its folder or its ledger file."""

    def __init__(self, run: Path, connection: sqlite3.Connection) -> None:
        self.run = ledger_path(run).parent
        self._connection = connection
        self.reader = PayloadReader(segments_path(self.run))
        self._recorded: dict[Path, bool] = {}

    def response(self, row: TrajectoryRow) -> Payload:
        """Read the response of a trajectory, with its final spans. Raises `LedgerError` if it is lost."""
        return _joined(row, split_columns(self.pieces(row))[0])

    def columns(self, row: TrajectoryRow) -> dict[str, TokenValues]:
        """Read the columns that scoring gave a response, by name, without lost ones."""
        return {name: piece.values for name, piece in column_values(self.pieces(row)).items()}

    def pieces(self, row: TrajectoryRow) -> list[StoredPiece]:
        """Read the pieces of a trajectory. Raises `LedgerError` if a file of the archive was changed."""
        rows = piece_rows(self._connection, "number = ?", (row.number,))
        return list(stored_pieces(self.reader, rows)) or self._archived(row)

    def all_responses(self) -> Iterator[ResponseRow]:
        """Iterate over all trajectories with prompts and responses, each once; archived ones come first.

        A response that is recorded as lost is empty. Memory holds one block of trajectories. Raises `LedgerError`
        if another response cannot be read.
        """
        archived = (file_pieces(path) for path in archive_files(self.run) if self._is_recorded(path))
        referenced = stored_pieces(self.reader, piece_rows(self._connection))
        done: set[int] = set()  # a crash may leave equal pieces in two places
        for source in chain(archived, (referenced,)):
            groups = ((number, list(own)) for number, own in groupby(source, key=lambda one: one.row.trajectory))
            fresh = (group for group in groups if group[0] not in done)
            while block := dict(islice(fresh, _BLOCK)):
                done |= block.keys()
                near = trajectory_rows(self._connection, "number BETWEEN ? AND ?", (min(block), max(block)))
                yield from (self._response_row(row, block[row.number]) for row in near if row.number in block)
        yield from (
            self._response_row(row, []) for row in trajectory_rows(self._connection) if row.number not in done
        )

    def _response_row(self, row: TrajectoryRow, pieces: list[StoredPiece]) -> ResponseRow:
        """Join the tokens of a trajectory from `pieces`, or from all files if these are incomplete."""
        tokens = split_columns(pieces)[0]
        if not is_whole(tokens, row.length):  # the rest came from another host, to another file; or all is lost
            tokens = split_columns(self.pieces(row))[0]
        lost = any(piece.is_lost for piece in tokens)
        return (
            row,
            read_prompt(self._connection, row.prompt_id, index=row.prompt_index),
            join([]) if lost else _joined(row, tokens),
        )

    def _archived(self, row: TrajectoryRow) -> list[StoredPiece]:
        """Read the pieces of a trajectory from archive files written after its last event."""
        found: list[StoredPiece] = []
        for path in archive_files(self.run) if row.length else ():
            if path.name >= file_name(row.last_seq, 0) and self._is_recorded(path):
                found += file_pieces(path, row.number)
        return sorted(found, key=lambda piece: (piece.row.name, piece.row.start))

    def _is_recorded(self, path: Path) -> bool:
        if path not in self._recorded:
            self._recorded[path] = is_recorded(path, self._connection)
        return self._recorded[path]


def _joined(row: TrajectoryRow, tokens: Sequence[StoredPiece]) -> Payload:
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
