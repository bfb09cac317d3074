"""Trajectories of a run with their prompts and responses, wherever these are stored. Reads only."""

import sqlite3
from collections.abc import Iterator
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TypeAlias

from laminar_py.ledger.archive import archive_files, file_pieces, is_recorded
from laminar_py.ledger.database import ledger_path, segments_path
from laminar_py.ledger.pieces import StoredPiece, is_whole, piece_rows, split, stored_pieces
from laminar_py.ledger.responses import StoredResponses, joined
from laminar_py.ledger.rows import TrajectoryRow, read_prompt, read_rows
from laminar_py.ledger.segments.payload import Payload, join
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.records.trajectory import Prompt

_BLOCK = 4096

StoredRow: TypeAlias = tuple[TrajectoryRow, Prompt | None, Payload]


def stored_responses(run: Path, connection: sqlite3.Connection) -> Iterator[StoredRow]:
    """Rows with prompts and responses, each trajectory once: pieces that a crash left in two places are equal.

    Those in the archive come first, as they stand; of what is on record as lost there is an empty response. Memory
    holds one block of trajectories. Raises `LedgerError` where others cannot be read.
    """
    files = archive_files(ledger_path(run).parent)
    archived = (file_pieces(path) for path in files if is_recorded(path, connection))
    reader = PayloadReader(segments_path(ledger_path(run).parent))
    responses = StoredResponses(ledger_path(run).parent, connection)
    sources = chain(archived, (stored_pieces(reader, piece_rows(connection)),))
    done: set[int] = set()
    for source in sources:
        for block in _blocks(groupby(source, key=lambda piece: piece.trajectory), done):
            done.update(number for number, _ in block)
            yield from _rows_of(connection, block, responses)
    for row in read_rows(connection):
        if row.number not in done:
            yield _joined(connection, row, [], responses)


def _blocks(
    groups: Iterator[tuple[int, Iterator[StoredPiece]]], done: set[int]
) -> Iterator[list[tuple[int, list[StoredPiece]]]]:
    whole = ((number, list(pieces)) for number, pieces in groups)
    fresh = ((number, pieces) for number, pieces in whole if number not in done)
    while block := list(islice(fresh, _BLOCK)):
        yield block


def _rows_of(
    connection: sqlite3.Connection, block: list[tuple[int, list[StoredPiece]]], responses: StoredResponses
) -> Iterator[StoredRow]:
    numbers = [number for number, _ in block]
    near = read_rows(connection, "number BETWEEN ? AND ?", (min(numbers), max(numbers)))
    wanted = set(numbers)
    rows = {row.number: row for row in near if row.number in wanted}
    for number, pieces in block:
        if number in rows:
            yield _joined(connection, rows[number], pieces, responses)


def _joined(
    connection: sqlite3.Connection, row: TrajectoryRow, pieces: list[StoredPiece], responses: StoredResponses
) -> StoredRow:
    tokens = split(pieces)[0]
    if not is_whole(tokens, row.length):  # the rest came from another host, to another file; or all is lost
        tokens = split(responses.pieces(row))[0]
    lost = any(piece.is_lost for piece in tokens)
    return row, read_prompt(connection, row), join([]) if lost else joined(row, tokens)
