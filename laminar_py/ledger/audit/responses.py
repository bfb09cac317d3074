"""Stored responses against what their trajectories finished with. Driven by `audit.verify`.

Tokens, log-probabilities, spans, turns, sampling masks, routed experts and columns; one trajectory is in memory at
a time. Its row is only compared here: `audit.replay` proves it.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, dropwhile, groupby
from pathlib import Path

import msgspec
import numpy as np

from laminar_py.ledger.archive import file_pieces
from laminar_py.ledger.audit.truth import check_truth, last_sampled, sampled_in
from laminar_py.ledger.audit.violations import Rule, Violation
from laminar_py.ledger.database import LedgerError
from laminar_py.ledger.pieces import NO_COLUMN, StoredPiece, is_whole, piece_rows, spans_of, split, stored_pieces
from laminar_py.ledger.responses import StoredResponses
from laminar_py.ledger.rows import decode_event
from laminar_py.ledger.segments.payload import Payload, join
from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.start import is_simulated
from laminar_py.records.codec import BoolArray, IntArray, response_digest
from laminar_py.records.events import StreamCut
from laminar_py.records.pieces import Piece, SamplingMask, unpack_mask
from laminar_py.records.spans import Span, clip_spans, decode_spans, replace_spans


class _Promise(msgspec.Struct, array_like=True):
    """Columns of a trajectory's row that say something of its response."""

    number: int
    id: str
    prompt_id: str
    first_seq: int
    last_seq: int
    length: int
    spans: str | None
    restamped: int | None
    digest: str | None  # None: not finished


_PROMISED = ", ".join(_Promise.__struct_fields__)


class ResponseCheck:
    """Compares responses; `numbers` are the trajectories of which it saw pieces, `violations` what is wrong.

    `apart` are those of which a file of the archive has some pieces alone: they came from several hosts.
    """

    def __init__(self, connection: sqlite3.Connection, reader: PayloadReader) -> None:
        self.numbers: list[int] = []
        self.apart: list[int] = []
        self.violations: list[Violation] = []
        self.num_elsewhere = 0  # trajectories of which another host has pieces
        self._connection = connection
        self._reader = reader
        self._simulated = is_simulated(connection)

    def check_stored(self, first: int, last: int) -> list[int]:
        """Look at what SQLite refers to of trajectories `first` to `last`; those of which there should be more."""
        rows_of = piece_rows(self._connection, "number BETWEEN ? AND ?", (first, last))
        self._see(stored_pieces(self._reader, rows_of), first, last)
        rows = self._connection.execute(
            "SELECT number FROM trajectory WHERE length > 0 AND number BETWEEN ? AND ?", (first, last)
        )
        return sorted({number for (number,) in rows} - set(self.numbers))

    def check_file(self, path: Path) -> None:
        """Look at what a file of the archive has."""
        pieces = file_pieces(path)
        one = next(pieces, None)
        if one is not None:
            self._see(chain((one,), pieces), one.trajectory, 2**62, in_file=True)

    def check_rows_apart(self, numbers: Iterable[int], responses: StoredResponses) -> None:
        """Look at what several files of the archive have of these trajectories."""
        query = f"SELECT {_PROMISED} FROM trajectory WHERE number = ?"
        for number in numbers:
            promise = _Promise(*self._connection.execute(query, (number,)).fetchone())
            with suppress(LedgerError):  # a file that was changed is told as such
                self.violations += _check(self._connection, responses.pieces(promise), promise)

    def _see(self, all_pieces: Iterable[StoredPiece], first: int, last: int, *, in_file: bool = False) -> None:
        """Pieces are in the order of their trajectories, as are the rows: both are read once."""
        query = f"SELECT {_PROMISED} FROM trajectory WHERE number BETWEEN ? AND ?"
        rows = self._connection.execute(f"{query} ORDER BY number", (first, last))
        row = rows.fetchone()
        for number, pieces in groupby(all_pieces, key=lambda piece: piece.trajectory):
            while row is not None and row[0] < number:
                row = rows.fetchone()
            if row is not None and row[0] == number:
                self.numbers.append(number)
                promise, stored = _Promise(*row), list(pieces)
                self.num_elsewhere += any(piece.is_elsewhere for piece in stored)
                if in_file and not is_whole(split(stored)[0], promise.length):
                    self.apart.append(number)
                elif self._simulated:
                    self.violations += _check_counted(stored, promise)
                elif not _is_plainly_right(stored, promise):
                    self.violations += _check(self._connection, stored, promise)


def _is_plainly_right(pieces: list[StoredPiece], promise: _Promise) -> bool:
    """True only where a finished response of one piece and no environment, with nothing recorded, is right.

    False means that it has to be looked at closely.
    """
    if len(pieces) != 1 or promise.digest is None or promise.spans is None or promise.restamped is not None:
        return False
    piece = pieces[0].piece
    if not isinstance(piece, Piece) or piece.mask is not None or piece.experts is not None or piece.start:
        return False
    if piece.trajectory_id != promise.id or piece.end != promise.length or len(piece.ids) != len(piece.logprobs):
        return False
    if any(span.version is None for span in piece.spans):
        return False
    is_right = pieces[0].is_intact and response_digest([pieces[0].digest]) == promise.digest
    return is_right and piece.spans == decode_spans(promise.spans)


def _check_counted(stored: list[StoredPiece], promise: _Promise) -> Iterator[Violation]:
    """Look at the references to a response of a simulation; tokens that they could lead to there are none."""
    rows = [piece.counted for piece in stored if piece.counted is not None and piece.name == NO_COLUMN]
    if len(rows) < len(stored):
        yield Violation(Rule.SPANS, promise.id, "has tokens of an engine, in a run that was simulated")
        return
    edges = [0, *(row.end for row in rows)]
    if [row.start for row in rows] != edges[:-1] or edges[-1] != promise.length:
        yield Violation(Rule.SPANS, promise.id, f"{rows} are not its {promise.length} tokens")
        return
    sure = promise.restamped or 0
    try:
        counted, spans = spans_of(rows), decode_spans(promise.spans or "[]")
    except msgspec.DecodeError as error:
        yield Violation(Rule.SPANS, promise.id, str(error))
        return
    if promise.spans is not None and clip_spans(counted, sure) != clip_spans(spans, sure):
        yield Violation(Rule.SPANS, promise.id, f"was counted with {counted}, it finished with {spans}")


def _check(connection: sqlite3.Connection, stored: list[StoredPiece], promise: _Promise) -> Iterator[Violation]:
    tokens, columns = split(stored)  # once, whatever a crash of the archive left twice
    for piece in columns:
        if _is_here(piece) and not (piece.is_intact and _is_of(piece, promise)):
            yield Violation(Rule.ROWS, f"column {piece.name} of {promise.id}", piece.fault or "was changed")
    for piece in tokens:
        if _is_here(piece) and not (piece.is_intact and _is_of(piece, promise)):
            fault = piece.fault or "was changed"
            yield Violation(Rule.SPANS, promise.id, f"the piece from token {piece.start} on: {fault}")
    if any(piece.piece is None for piece in tokens):
        if promise.digest not in (None, response_digest(piece.digest for piece in tokens)):
            yield Violation(Rule.SPANS, promise.id, "its references are not those it finished with")
        return
    pieces = [piece.tokens for piece in tokens]
    try:
        response = join(pieces)
    except ValueError as error:
        yield Violation(Rule.SPANS, promise.id, str(error))
        return
    for message in _check_tokens(response, [piece.digest for piece in tokens], promise):
        yield Violation(Rule.SPANS, promise.id, message)
    for message in check_truth(response, _holding(response, promise)):
        yield Violation(Rule.TRUTH, promise.id, message)
    for message in chain(_check_masks(pieces, promise), _check_experts(connection, response, promise)):
        yield Violation(Rule.RECORDING, promise.id, message)


def _holding(response: Payload, promise: _Promise) -> tuple[Span, ...]:
    """Spans that hold; those of the pieces where the row has none that can be read."""
    try:
        return replace_spans(response.spans, decode_spans(promise.spans or "[]"))
    except msgspec.DecodeError:
        return response.spans


def _is_here(stored: StoredPiece) -> bool:
    return not (stored.is_lost or stored.is_elsewhere)


def _is_of(stored: StoredPiece, promise: _Promise) -> bool:
    return stored.piece is not None and stored.piece.trajectory_id == promise.id


def _check_tokens(response: Payload, digests: list[bytes], promise: _Promise) -> Iterator[str]:
    if len(response.ids) != promise.length:
        yield f"{len(response.ids)} of its {promise.length} tokens are stored"
    if promise.digest is None:
        return
    if response_digest(digests) != promise.digest:
        yield "its stored tokens are not those it finished with"
    try:
        spans = decode_spans(promise.spans or "[]")
    except msgspec.DecodeError as error:
        yield str(error)
        return
    sure = promise.restamped or 0  # before it the engine's last word holds, and not what was stored
    if clip_spans(response.spans, sure) != clip_spans(spans, sure):
        yield f"its tokens were stored with {response.spans}, it finished with {spans}"


def _check_masks(pieces: list[Piece], promise: _Promise) -> Iterator[str]:
    """From the first mask on every sampled token has one; what is older may come from before masks were made."""
    for piece in dropwhile(lambda piece: piece.mask is None, pieces):
        if piece.mask is None and sampled_in(piece).any() and promise.digest is not None:
            yield f"the tokens from {piece.start} on have no sampling mask, those before them have"
        elif piece.mask is not None:
            yield from _check_mask(unpack_mask(piece.mask), piece)


def _check_mask(mask: SamplingMask, piece: Piece) -> Iterator[str]:
    ids = np.frombuffer(piece.ids, np.int32)
    if len(mask.counts) != len(ids):
        yield f"the {len(ids)} tokens from {piece.start} on have sampling masks of {len(mask.counts)}"
        return
    strays = np.flatnonzero(sampled_in(piece) & ~_has_its_token(mask, ids))
    if len(strays):
        first = strays[0]
        yield f"token {piece.start + first} ({ids[first]}) is not in its sampling mask; {len(strays)} such"


def _has_its_token(mask: SamplingMask, ids: IntArray) -> BoolArray:
    """Mask [L] of the rows that hold their own token."""
    row = np.repeat(np.arange(len(ids)), mask.counts)
    found = np.zeros(len(ids), np.bool_)
    found[row[mask.ids == ids[row]]] = True
    return found


def _check_experts(connection: sqlite3.Connection, response: Payload, promise: _Promise) -> Iterator[str]:
    experts = response.routed_experts
    if experts is None:
        return
    if experts.start:
        yield f"its routed experts begin at position {experts.start}"
    prompt = connection.execute("SELECT length(ids) / 4 FROM prompt WHERE id = ?", (promise.prompt_id,)).fetchone()
    if prompt is None or promise.digest is None:
        return
    last = last_sampled(_holding(response, promise))  # what an environment wrote behind it no engine has read
    positions, stored = prompt[0] + last - 1, experts.start + experts.positions
    if stored != positions and not (stored < positions and _ended_cut_off(connection, promise)):
        yield f"the routed experts of {stored} of its {positions} positions are stored"


def _ended_cut_off(connection: sqlite3.Connection, promise: _Promise) -> bool:
    """True where the last stream broke off and none came after it, so that nobody knows the last experts."""
    cursor = connection.execute(
        "SELECT body FROM event WHERE seq BETWEEN ? AND ? AND kind = 'streamcut' AND subject = ?",
        (promise.first_seq, promise.last_seq, promise.id),
    )
    cuts = (decode_event(body) for (body,) in cursor)
    return any(isinstance(cut, StreamCut) and cut.length == promise.length for cut in cuts)
