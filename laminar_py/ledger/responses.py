"""Stored responses of a run, from its segments.

The audit, `laminar samples`, `export` and `laminar rescore` read them.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from laminar_py.ledger.database import LedgerError, ledger_path, segments_path
from laminar_py.ledger.pieces import StoredPiece, piece_rows, split_columns, stored_pieces
from laminar_py.ledger.rows import TrajectoryRow, read_prompt, trajectory_rows
from laminar_py.ledger.segments.payload import Payload, join
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.records.columns import TokenValues
from laminar_py.records.pieces import ColumnPiece, PayloadLostError
from laminar_py.records.spans import decode_spans, replace_spans
from laminar_py.records.trajectory import DropReason, Prompt

ResponseRow: TypeAlias = tuple[TrajectoryRow, Prompt | None, Payload]


class StoredResponses:
    """Reads responses of a run; `run` is its folder or its ledger file."""

    def __init__(self, run: Path, connection: sqlite3.Connection) -> None:
        self.run = ledger_path(run).parent
        self.reader = PayloadReader(segments_path(self.run))
        self._connection = connection

    def response(self, row: TrajectoryRow) -> Payload:
        """Read the response of a trajectory, with its final spans. Raises `LedgerError` if it is lost."""
        return _joined(row, split_columns(self.pieces(row))[0])

    def columns(self, row: TrajectoryRow) -> dict[str, TokenValues]:
        """Read the columns that scoring gave a response, by name; leave out lost columns."""
        pieces = (stored.piece for stored in self.pieces(row))
        return {piece.name: piece.values for piece in pieces if isinstance(piece, ColumnPiece)}

    def pieces(self, row: TrajectoryRow) -> list[StoredPiece]:
        """Read the pieces of a trajectory."""
        return list(stored_pieces(self.reader, piece_rows(self._connection, "number = ?", (row.number,))))

    def all_responses(self) -> Iterator[ResponseRow]:
        """Iterate over all trajectories with prompts and responses, in order of issue.

        The response of a trajectory that was dropped because its tokens were lost is empty. Raises `LedgerError`
        if another response cannot be read.
        """
        groups = groupby(
            stored_pieces(self.reader, piece_rows(self._connection)), key=lambda stored: stored.row.trajectory
        )
        number, pieces = next(groups, (0, iter(())))
        for row in trajectory_rows(self._connection):
            tokens: list[StoredPiece] = []
            if number == row.number:
                tokens = split_columns(list(pieces))[0]
                number, pieces = next(groups, (0, iter(())))
            was_lost = row.drop_reason is DropReason.TOKENS_LOST
            response = join([]) if was_lost else _joined(row, tokens)
            yield row, read_prompt(self._connection, row.prompt_id, index=row.prompt_index), response


def _joined(row: TrajectoryRow, tokens: Sequence[StoredPiece]) -> Payload:
    """Join a trajectory's pieces to its response, with final spans. Raises `LedgerError` if one is lost."""
    try:
        response = join(piece.tokens for piece in tokens)
    except (ValueError, PayloadLostError) as error:
        raise LedgerError(
            f"trajectory={row.id}: its tokens cannot be read ({error}); restore the run's segments"
        ) from None
    if len(response.ids) < row.length:
        raise LedgerError(
            f"trajectory={row.id}: only {len(response.ids)} of {row.length} tokens are stored; restore segments"
        )
    if row.spans is None:
        return response
    return replace(response, spans=replace_spans(response.spans, decode_spans(row.spans)))
