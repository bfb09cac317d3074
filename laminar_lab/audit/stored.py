"""Stored pieces and responses of a run, from its segments.

The audit, `laminar samples`, `export` and `laminar rescore` read them.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import TypeAlias

import msgspec

from laminar_py.ledger import (
    NO_COLUMN,
    LedgerError,
    PieceRow,
    TrajectoryRow,
    ledger_path,
    piece_rows,
    read_prompt,
    segments_path,
    trajectory_rows,
)
from laminar_py.ledger.segments import AnyPiece, Payload, PayloadReader, join, tokens_ref
from laminar_py.records.columns import TokenValues
from laminar_py.records.pieces import COUNTED, ColumnPiece, PayloadLostError, Piece
from laminar_py.records.spans import clip_spans, decode_spans, encode_spans, replace_spans
from laminar_py.records.trajectory import DropReason, Prompt

AT_ONCE = 256  # pieces per read
NOT_GENERATED = "counted in a simulation, in which nothing was generated"


class StoredPiece(msgspec.Struct, frozen=True, gc=False):
    """A reference with its piece; `fault` says why the piece is unreadable, or that it differs; "" if neither."""

    row: PieceRow
    piece: AnyPiece | None
    fault: str = ""

    @property
    def is_counted(self) -> bool:
        """Whether a simulation only counted its tokens."""
        return self.fault == NOT_GENERATED

    @property
    def tokens(self) -> Piece:
        """The piece of response tokens. Raises `PayloadLostError` if it cannot be read."""
        if not isinstance(self.piece, Piece):
            raise PayloadLostError(self.fault or "a column in the place of tokens")
        return self.piece


def stored_pieces(reader: PayloadReader, rows: Iterator[PieceRow]) -> Iterator[StoredPiece]:
    """Read the pieces of references, in order; a simulation's piece is None, with fault `NOT_GENERATED`."""
    while block := list(islice(rows, AT_ONCE)):
        loaded = reader.load(row.ref for row in block if row.segment != COUNTED.segment)
        for row in block:
            piece: AnyPiece | None = None
            if row.segment == COUNTED.segment:
                fault = NOT_GENERATED
            else:
                try:
                    piece = loaded.piece(row.ref)
                    fault = "" if _matches(row, piece) else "differs from its reference"
                except PayloadLostError as error:
                    fault = str(error)
            yield StoredPiece(row, piece, fault)


def _matches(row: PieceRow, piece: AnyPiece) -> bool:
    """Return whether a piece has the name, type, range, spans and experts that its reference states."""
    expected = row.name, row.dtype, row.start, row.end, row.spans, row.routed
    if isinstance(piece, ColumnPiece):
        return expected == (piece.name, piece.values.dtype.value, 0, len(piece.values.array), "[]", 0)
    tokens = tokens_ref(piece, row.ref)
    spans = encode_spans(clip_spans(piece.spans, piece.start))
    return expected == (NO_COLUMN, "", tokens.start, tokens.end, spans, tokens.routed)


def split_columns(pieces: Sequence[StoredPiece]) -> tuple[list[StoredPiece], list[StoredPiece]]:
    """Split a trajectory's pieces into tokens and columns."""
    tokens = [stored for stored in pieces if stored.row.name == NO_COLUMN]
    return tokens, [stored for stored in pieces if stored.row.name != NO_COLUMN]


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
