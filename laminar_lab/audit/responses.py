"""Comparison of stored responses with the rows of their trajectories. `audit.verify` calls it.

It checks tokens, log-probabilities, spans, turns, sampling masks, routed experts and columns. Memory holds one
trajectory at a time. `audit.replay` proves the rows themselves.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from itertools import chain, dropwhile, groupby
from pathlib import Path

import msgspec
import numpy as np

from laminar_lab.audit.checks import Rule, Violation
from laminar_lab.audit.stored import StoredPiece, StoredResponses, split_columns, stored_pieces
from laminar_py.ledger import (
    NO_COLUMN,
    TrajectoryRow,
    decode_event,
    is_simulated,
    piece_rows,
    spans_of,
    unchecked_rows,
)
from laminar_py.ledger.segments import Payload, join
from laminar_py.records.codec import BoolArray, IntArray, response_digest
from laminar_py.records.events import StreamLost
from laminar_py.records.pieces import Piece, SamplingMask, unpack_mask
from laminar_py.records.spans import Span, clip_spans, decode_spans, replace_spans, sampled_mask, shift_spans
from laminar_py.records.trajectory import DropReason


class ResponseCheck:
    """Compares responses and gathers `violations`."""

    def __init__(self, run: Path, connection: sqlite3.Connection) -> None:
        self.numbers: list[int] = []  # trajectories with pieces
        self.violations: list[Violation] = []
        self._connection = connection
        self._responses = StoredResponses(run, connection)
        self._simulated = is_simulated(connection)

    def check_stored(self, first: int, last: int) -> list[int]:
        """Check the pieces that SQLite refers to, of trajectories `first` to `last`.

        Returns the trajectories that have tokens and no reference.
        """
        references = piece_rows(self._connection, "number BETWEEN ? AND ?", (first, last))
        self._check_pieces(stored_pieces(self._responses.reader, references), first, last)
        rows = self._connection.execute(
            "SELECT number FROM trajectory WHERE length > 0 AND number BETWEEN ? AND ?", (first, last)
        )
        return sorted({number for (number,) in rows} - set(self.numbers))

    def _check_pieces(self, all_pieces: Iterable[StoredPiece], first: int, last: int) -> None:
        """Check pieces in the order of their trajectories, against rows in the same order: both are read once."""
        rows = unchecked_rows(self._connection, "number BETWEEN ? AND ?", (first, last))
        row = next(rows, None)
        for number, pieces in groupby(all_pieces, key=lambda piece: piece.row.trajectory):
            while row is not None and row.number < number:
                row = next(rows, None)
            if row is not None and row.number == number:
                self.numbers.append(number)
                stored = list(pieces)
                if self._simulated:
                    self.violations += _check_counted(stored, row)
                elif not _is_plainly_right(stored, row):
                    self.violations += _check(self._connection, stored, row)


def _is_plainly_right(pieces: list[StoredPiece], row: TrajectoryRow) -> bool:
    """Whether the response is of the simplest kind (one piece, no environment, no recordings) and is right.

    The test is quick and spares most responses the full check. After False, `_check` decides.
    """
    if len(pieces) != 1 or row.digest is None or row.spans is None or row.restamped is not None:
        return False
    piece = pieces[0].piece
    if not isinstance(piece, Piece) or piece.mask is not None or piece.experts is not None or piece.start:
        return False
    if piece.trajectory_id != row.id or piece.end != row.length or len(piece.ids) != len(piece.logprobs):
        return False
    if any(span.version is None for span in piece.spans):
        return False
    is_right = not pieces[0].fault and response_digest([pieces[0].row.digest]) == row.digest
    return is_right and piece.spans == decode_spans(row.spans)


def _check_counted(stored: list[StoredPiece], row: TrajectoryRow) -> Iterator[Violation]:
    """Check the references to a response of a simulation, which counts tokens and stores none."""
    counted = [piece.row for piece in stored if piece.is_counted and piece.row.name == NO_COLUMN]
    if len(counted) < len(stored):
        yield Violation(Rule.SPANS, row.id, "has tokens of an engine, in a run that was simulated")
        return
    edges = [0, *(reference.end for reference in counted)]
    if [reference.start for reference in counted] != edges[:-1] or edges[-1] != row.length:
        yield Violation(Rule.SPANS, row.id, f"{counted} are not its {row.length} tokens")
        return
    sure = row.restamped or 0
    try:
        stored_spans, spans = spans_of(counted), decode_spans(row.spans or "[]")
    except msgspec.DecodeError as error:
        yield Violation(Rule.SPANS, row.id, str(error))
        return
    if row.spans is not None and clip_spans(stored_spans, sure) != clip_spans(spans, sure):
        yield Violation(Rule.SPANS, row.id, f"was counted with {stored_spans}, it finished with {spans}")


def _check(connection: sqlite3.Connection, stored: list[StoredPiece], row: TrajectoryRow) -> Iterator[Violation]:
    """Yield violations in the stored pieces of a response: damage, wrong tokens, masks or experts."""
    tokens, columns = split_columns(stored)
    for piece in columns:
        if fault := _fault(piece, row):
            yield Violation(Rule.ROWS, f"column {piece.row.name} of {row.id}", fault)
    for piece in tokens:
        if fault := _fault(piece, row):
            yield Violation(Rule.SPANS, row.id, f"the piece from token {piece.row.start} on: {fault}")
    if any(piece.piece is None for piece in tokens):
        if row.digest not in (None, response_digest(piece.row.digest for piece in tokens)):
            yield Violation(Rule.SPANS, row.id, "its references are not those it finished with")
        return
    pieces = [piece.tokens for piece in tokens]
    try:
        response = join(pieces)
    except ValueError as error:
        yield Violation(Rule.SPANS, row.id, str(error))
        return
    for message in _check_tokens(response, [piece.row.digest for piece in tokens], row):
        yield Violation(Rule.SPANS, row.id, message)
    for message in _check_truth(response, _final_spans(response, row)):
        yield Violation(Rule.TRUTH, row.id, message)
    for message in chain(_check_masks(pieces, row), _check_experts(connection, response, row)):
        yield Violation(Rule.RECORDING, row.id, message)


def _fault(stored: StoredPiece, row: TrajectoryRow) -> str:
    """Return the fault of a piece, "" if it is sound or if its trajectory was dropped for its loss."""
    if stored.piece is None and row.drop_reason == DropReason.TOKENS_LOST:
        return ""
    if stored.piece is not None and stored.piece.trajectory_id != row.id:
        return stored.fault or "was changed"
    return stored.fault


def _final_spans(response: Payload, row: TrajectoryRow) -> tuple[Span, ...]:
    """Return the final spans of a response; the stored ones if the row's spans are unreadable."""
    try:
        return replace_spans(response.spans, decode_spans(row.spans or "[]"))
    except msgspec.DecodeError:
        return response.spans


def _check_tokens(response: Payload, digests: list[bytes], row: TrajectoryRow) -> Iterator[str]:
    """Yield faults where stored tokens differ from the length, digest or spans of the trajectory's end."""
    if len(response.ids) != row.length:
        yield f"{len(response.ids)} of its {row.length} tokens are stored"
    if row.digest is None:
        return
    if response_digest(digests) != row.digest:
        yield "its stored tokens are not those it finished with"
    try:
        spans = decode_spans(row.spans or "[]")
    except msgspec.DecodeError as error:
        yield str(error)
        return
    sure = row.restamped or 0  # before this token the engine's last delta replaces the stored spans
    if clip_spans(response.spans, sure) != clip_spans(spans, sure):
        yield f"its tokens were stored with {response.spans}, it finished with {spans}"


def _check_masks(pieces: list[Piece], row: TrajectoryRow) -> Iterator[str]:
    """Iterate over faults of masks. After the first mask every sampled token needs one.

    Tokens before it may come from an incarnation that recorded no masks.
    """
    for piece in dropwhile(lambda piece: piece.mask is None, pieces):
        if piece.mask is None and _sampled_in(piece).any() and row.digest is not None:
            yield f"the tokens from {piece.start} on have no sampling mask, those before them have"
        elif piece.mask is not None:
            yield from _check_mask(unpack_mask(piece.mask), piece)


def _check_mask(mask: SamplingMask, piece: Piece) -> Iterator[str]:
    ids = np.frombuffer(piece.ids, np.int32)
    if len(mask.counts) != len(ids):
        yield f"the {len(ids)} tokens from {piece.start} on have sampling masks of {len(mask.counts)}"
        return
    strays = np.flatnonzero(_sampled_in(piece) & ~_has_its_token(mask, ids))
    if len(strays):
        first = strays[0]
        yield f"token {piece.start + first} ({ids[first]}) is not in its sampling mask; {len(strays)} such"


def _has_its_token(mask: SamplingMask, ids: IntArray) -> BoolArray:
    """Return [L] whether each row of a mask holds its own token."""
    row = np.repeat(np.arange(len(ids)), mask.counts)
    has_token = np.zeros(len(ids), np.bool_)
    has_token[row[mask.ids == ids[row]]] = True
    return has_token


def _check_experts(connection: sqlite3.Connection, response: Payload, row: TrajectoryRow) -> Iterator[str]:
    """Yield faults where recorded experts do not cover every position that the engine read."""
    experts = response.routed_experts
    if experts is None:
        return
    if experts.start:
        yield f"its routed experts begin at position {experts.start}"
    prompt = connection.execute("SELECT length(ids) / 4 FROM prompt WHERE id = ?", (row.prompt_id,)).fetchone()
    if prompt is None or row.digest is None:
        return
    last = _last_sampled(_final_spans(response, row))  # no engine read the environment's tokens after it
    positions, stored = prompt[0] + last - 1, experts.start + experts.positions
    if stored != positions and not (stored < positions and _ended_cut_off(connection, row)):
        yield f"the routed experts of {stored} of its {positions} positions are stored"


def _ended_cut_off(connection: sqlite3.Connection, row: TrajectoryRow) -> bool:
    """Whether the last stream broke off and no other followed, so that the last experts are unknown."""
    cursor = connection.execute(
        "SELECT body FROM event WHERE seq BETWEEN ? AND ? AND kind = 'streamlost' AND subject = ?",
        (row.first_seq, row.last_seq, row.id),
    )
    cuts = (decode_event(body) for (body,) in cursor)
    return any(isinstance(cut, StreamLost) and cut.length == row.length for cut in cuts)


def _check_truth(response: Payload, spans: tuple[Span, ...]) -> Iterator[str]:
    """Iterate over faults of environment tokens in a response (law 9); `spans` are its final spans.

    Spans without a version are tokens of environments; the loss leaves them out for that reason alone. A fault is
    a token whose stored and final marks differ, or an environment token with a property of sampled tokens.
    """
    count = len(response.ids)
    sampled = sampled_mask(response.spans, count)
    moved = np.flatnonzero(sampled_mask(spans, count) != sampled)
    if len(moved):
        stored = "sampled by an engine" if sampled[moved[0]] else "written by an environment"
        yield f"token {moved[0]} was stored as {stored}, but not finished as such; {len(moved)} such tokens"
    yield from _overlong(spans)
    if sampled.all():
        return
    strays = np.flatnonzero(~sampled & (response.logprobs != 0))
    if len(strays):
        value = response.logprobs[strays[0]]
        yield _told(strays[0], f"has a log-probability of {value:g}, not 0", count=len(strays))
    mask = response.sampling_mask
    if mask is not None and len(mask.counts) == count:  # else `_check_mask` reports it
        strays = np.flatnonzero(~sampled & (mask.counts > 0))
        if len(strays):
            yield _told(strays[0], "has a sampling mask", count=len(strays))
    for span in spans:
        if span.version is None and span.kv_version is not None:
            yield _told(span.start, f"has a KV cache of version {span.kv_version}", count=span.end - span.start)


def _overlong(spans: tuple[Span, ...]) -> Iterator[str]:
    """Iterate over turns of the model that exceed their environment's limit."""
    start, limit = 0, None
    for span in spans:
        if span.version is None:
            start, limit = span.end, span.turn_limit
        elif limit is not None and span.end - start > limit:
            yield f"the turn from token {start} on exceeds its environment's limit of {limit} tokens"
            limit = None


def _told(place: int | np.intp, what: str, *, count: int) -> str:
    return f"token {place}, which an environment wrote, {what}; {count} such"


def _sampled_in(piece: Piece) -> BoolArray:
    """Return [n] whether an engine sampled each token of a piece."""
    spans = shift_spans(clip_spans(piece.spans, piece.start), -piece.start)
    return sampled_mask(spans, piece.end - piece.start)


def _last_sampled(spans: tuple[Span, ...]) -> int:
    """Return the end of the last sampled token, 0 without any."""
    return max((span.end for span in spans if span.version is not None), default=0)
