"""References to stored pieces in SQLite. The ledger writes references; recovery and audit read them.

SQLite has the place of a piece, a segment its bytes.
"""

import sqlite3
from collections.abc import Iterator, Sequence

import msgspec

from laminar_py.records.columns import Dtype
from laminar_py.records.pieces import ColumnRef, PieceRef, TokensRef
from laminar_py.records.spans import Span, decode_spans, replace_spans

NO_COLUMN = ""  # name of response tokens


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
