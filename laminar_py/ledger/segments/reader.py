"""Reader of pieces by reference, from files of this host and from the stores of other hosts.

Scorers, learner ranks, the reference model and replicas have a reader each; so do the archive and the audit. Every
piece is checked against the digest of its reference (law 9). Threads may share a reader.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, TypeVar

from laminar_py.ledger.segments.frames import AnyPiece, read_frame
from laminar_py.ledger.segments.local import is_local
from laminar_py.ledger.segments.payload import Payload, join
from laminar_py.ledger.segments.writer import SEGMENT
from laminar_py.records.pieces import ColumnPiece, ColumnRef, PayloadLostError, Piece, PieceRef, TokensRef
from laminar_py.records.spans import sampled_mask
from laminar_py.records.trajectory import BaseTrajectory, Trajectory, TrajectoryRef

OPEN_FILES = 64  # kept open per reader

P = TypeVar("P", Piece, ColumnPiece)


class StoreAwayError(PayloadLostError):
    """A store did not answer for so long that all of its pieces count as lost."""


class ElsewhereError(PayloadLostError):
    """A piece may be on another host of a running or killed run; this reader asks no store."""


PieceFetch: TypeAlias = Callable[[str, Sequence[PieceRef]], list[bytes]]
"""Fetches the frames of pieces, in order, from the store of another host by name.

Raises `PayloadLostError` if a piece is lost, `StoreAwayError` if the store does not answer.
"""


class Loaded:
    """Pieces that were loaded together, with an error for each lost one."""

    def __init__(self, found: Mapping[PieceRef, bytes | PayloadLostError]) -> None:
        self._found = found

    def response(self, tokens: Iterable[TokensRef]) -> Payload:
        """Join pieces to a response. Raises `PayloadLostError` if one is lost or they do not fit together."""
        try:
            return join(self._piece_of(Piece, ref.at) for ref in tokens)
        except ValueError as error:
            raise PayloadLostError(str(error)) from error

    def column(self, ref: ColumnRef) -> ColumnPiece:
        """Return a column. Raises `PayloadLostError`."""
        return self._piece_of(ColumnPiece, ref.at)

    def piece(self, ref: PieceRef) -> AnyPiece:
        """Return a piece. Raises `PayloadLostError`."""
        found = self._found[ref]
        if isinstance(found, PayloadLostError):
            raise found
        try:
            return read_frame(memoryview(found), ref.digest)
        except PayloadLostError as error:
            raise PayloadLostError(f"{ref.segment} from byte {ref.offset} on: {error}") from None

    def _piece_of(self, kind: type[P], ref: PieceRef) -> P:
        piece = self.piece(ref)
        if not isinstance(piece, kind):
            raise PayloadLostError(f"{ref.segment}: a {type(piece).__name__} instead of a {kind.__name__}")
        return piece


class PayloadReader:
    """Reads segments in this host's `folder`, and segments of other hosts with `fetch`."""

    def __init__(self, folder: Path, *, fetch: PieceFetch | None = None) -> None:
        self._folder = folder
        self._fetch = fetch
        self._files: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def load(self, refs: Iterable[PieceRef], *, stores: Mapping[str, str] | None = None) -> Loaded:
        """Read pieces; `stores` names the store of each segment of another host."""
        found: dict[PieceRef, bytes | PayloadLostError] = {}
        elsewhere: dict[str, list[PieceRef]] = {}
        for ref in refs:
            store = (stores or {}).get(ref.segment)
            if store is None:
                found[ref] = self._found(ref)
            else:
                elsewhere.setdefault(store, []).append(ref)
        for store, wanted in elsewhere.items():
            found |= self._fetched(store, wanted)
        return Loaded(found)

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])

    def _found(self, ref: PieceRef) -> bytes | PayloadLostError:
        try:
            return self._read(ref)
        except PayloadLostError as error:
            return error

    def _read(self, ref: PieceRef) -> bytes:
        """Read the bytes of a piece from a segment in this folder.

        Raises `PayloadLostError` if the bytes are gone, and `ElsewhereError` if the segment may be on another
        host.
        """
        with self._lock:  # no other thread may close the file meanwhile
            try:
                file = self._open(ref.segment)
                # the size first, since a damaged reference may ask for more than memory holds
                is_there = 0 <= ref.offset <= ref.offset + ref.num_bytes <= os.fstat(file).st_size
                data = os.pread(file, ref.num_bytes, ref.offset) if is_there else b""
            except FileNotFoundError as error:
                kind = ElsewhereError if is_local(self._folder) else PayloadLostError
                raise kind(f"{self._folder / ref.segment}: {error.strerror}") from None
            except OSError as error:
                raise PayloadLostError(f"{self._folder / ref.segment}: {error.strerror}") from None
            except ValueError as error:  # not a file name
                raise PayloadLostError(f"segment {ref.segment!r}: {error}") from None
        if not is_there or len(data) < ref.num_bytes:
            raise PayloadLostError(f"{self._folder / ref.segment}: ends before byte {ref.offset + ref.num_bytes}")
        return data

    def _open(self, segment: str) -> int:
        if segment not in self._files:
            path = self._folder / f"{segment}{SEGMENT}"
            self._files[segment] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(segment)
        return self._files[segment]

    def _fetched(self, store: str, refs: Sequence[PieceRef]) -> dict[PieceRef, bytes | PayloadLostError]:
        """Fetch pieces of a store together; after a loss, fetch each alone, since the others may exist."""
        assert self._fetch is not None, f"{refs[0].segment} is of another host, of which this reader knows none"
        fetch = self._fetch
        try:
            return dict(zip(refs, fetch(store, refs), strict=True))
        except StoreAwayError as error:
            return dict.fromkeys(refs, error)
        except PayloadLostError as error:
            if len(refs) == 1:
                return {refs[0]: error}
        return {ref: self._fetched(store, [ref])[ref] for ref in refs}  # the other pieces may exist


def complete_all(
    finished: Sequence[TrajectoryRef], reader: PayloadReader, *, stores: Mapping[str, str]
) -> tuple[dict[str, Trajectory], dict[str, str]]:
    """Read the tokens of trajectories together; return trajectories by id, and reasons of lost ones by id."""
    loaded = reader.load((ref for trajectory in finished for ref in trajectory.refs), stores=stores)
    complete: dict[str, Trajectory] = {}
    lost: dict[str, str] = {}
    for trajectory in finished:
        try:
            complete[trajectory.id] = complete_one(trajectory, loaded)
        except PayloadLostError as error:
            lost[trajectory.id] = str(error)
    return complete, lost


def complete_one(finished: TrajectoryRef, loaded: Loaded) -> Trajectory:
    """Return a trajectory with its tokens. Raises `PayloadLostError`."""
    response = loaded.response(finished.tokens)
    length = len(response.ids)
    if length != finished.length:
        raise PayloadLostError(f"{length} of its {finished.length} tokens")
    return Trajectory(
        **{name: getattr(finished, name) for name in BaseTrajectory.__struct_fields__},
        response_ids=response.ids,
        logprobs=response.logprobs,
        loss_mask=sampled_mask(finished.spans if finished.num_trained else (), length),
        sampling_mask=response.sampling_mask,
        routed_experts=response.routed_experts,
        columns={name: loaded.column(column).values for name, column in finished.columns.items()},
    )
