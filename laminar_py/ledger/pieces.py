"""References to stored pieces in SQLite, and the pieces that they name.

The ledger writes references; recovery and audit read them. SQLite has the place of a piece, a segment its bytes.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from laminar_py.ledger.segments.frames import AnyPiece
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import tokens_ref
from laminar_py.records.columns import Dtype
from laminar_py.records.pieces import COUNTED, ColumnPiece, ColumnRef, PayloadLostError, Piece, PieceRef, TokensRef
from laminar_py.records.spans import Span, clip_spans, decode_spans, encode_spans, replace_spans

AT_ONCE = 256  # pieces per read
NO_COLUMN = ""  # name of response tokens
NOT_GENERATED = "counted in a simulation, in which nothing was generated"


class PieceRow(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A row of the table `piece`: a reference to tokens or to a column of a trajectory."""

    trajectory: int
    name: str  # of a column; empty: response tokens
    dtype: str
    start: int
    end: int
    spans: str  # JSON
    routed: int  # leading positions whose experts are recorded with it
    segment: str
    offset: int
    num_bytes: int
    digest: bytes

    @property
    def ref(self) -> PieceRef:
        """The place of the piece."""
        return PieceRef(self.segment, self.offset, self.num_bytes, self.digest)


COLUMNS = PieceRow.__struct_fields__
INSERT = f"INSERT INTO piece VALUES ({', '.join('?' * len(COLUMNS))})"


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


def piece_rows(
    connection: sqlite3.Connection, where: str = "1", values: tuple[object, ...] = ()
) -> Iterator[PieceRow]:
    """Yield the references of trajectories that meet the SQL condition `where`; tokens come before columns."""
    cursor = connection.execute(
        f"SELECT {', '.join(f'p.{column}' for column in COLUMNS)} FROM piece p JOIN trajectory ON number ="
        f" p.trajectory WHERE {where} ORDER BY p.trajectory, p.name, p.start, p.rowid",
        values,
    )
    return (PieceRow(*row) for row in cursor)


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


def tokens_of(rows: Sequence[PieceRow]) -> tuple[TokensRef, ...]:
    """Return the references to response tokens among a trajectory's references."""
    return tuple(TokensRef(row.start, row.end, row.ref, row.routed) for row in rows if row.name == NO_COLUMN)


def columns_of(rows: Sequence[PieceRow]) -> dict[str, ColumnRef]:
    """Return the references to columns among a trajectory's references, by name."""
    return {row.name: ColumnRef(Dtype(row.dtype), row.ref) for row in rows if row.name != NO_COLUMN}


def spans_of(rows: Sequence[PieceRow]) -> tuple[Span, ...]:
    """Return the stored spans of a trajectory's tokens."""
    spans: tuple[Span, ...] = ()
    for row in rows:
        if row.name == NO_COLUMN:
            spans = replace_spans(spans, decode_spans(row.spans))
    return spans


def split_columns(pieces: Sequence[StoredPiece]) -> tuple[list[StoredPiece], list[StoredPiece]]:
    """Split a trajectory's pieces into tokens and columns."""
    tokens = [stored for stored in pieces if stored.row.name == NO_COLUMN]
    return tokens, [stored for stored in pieces if stored.row.name != NO_COLUMN]
