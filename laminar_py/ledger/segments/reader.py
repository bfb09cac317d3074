"""Reads pieces by reference: from files of this host, and from the stores of others.

Scorers, learner ranks, the reference model, and replicas that go on with a response each have a reader; so do the
archive and the audit. Invariant: what is given out has the digest of its reference. Threads may share one.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from laminar_py.ledger.segments.frames import AnyPiece, read_frame
from laminar_py.ledger.segments.local import is_local
from laminar_py.ledger.segments.payload import Payload, join
from laminar_py.ledger.segments.writer import SEGMENT
from laminar_py.records.pieces import ColumnPiece, ColumnRef, PayloadLostError, Piece, PieceRef, TokensRef
from laminar_py.records.spans import sampled_mask
from laminar_py.records.trajectory import FinishedTrajectory, Trajectory

OPEN_FILES = 64  # that a reader keeps open


class StoreAwayError(PayloadLostError):
    """A store that has not answered for so long that its pieces count as lost, all of them."""


class ElsewhereError(PayloadLostError):
    """A piece that may be on another host of a run that goes on, or was killed: no store is asked here."""


class PieceFetch(Protocol):
    """Pieces of another host: their bytes, in order, from the store of a name.

    Raises `PayloadLostError` where one is lost, `StoreAwayError` where the store is.
    """

    def __call__(self, store: str, refs: Sequence[PieceRef]) -> list[bytes]:
        """Whole frames."""
        ...


class Loaded:
    """Pieces that were asked for together, those that are lost among them."""

    def __init__(self, found: Mapping[PieceRef, bytes | PayloadLostError]) -> None:
        self._found = found

    def response(self, tokens: Iterable[TokensRef]) -> Payload:
        """The response that these make. Raises `PayloadLostError` where one is lost, or they are not of one."""
        try:
            return join(self._tokens(one.at) for one in tokens)
        except ValueError as error:
            raise PayloadLostError(str(error)) from error

    def column(self, ref: ColumnRef) -> ColumnPiece:
        """A column. Raises `PayloadLostError`."""
        piece = self.piece(ref.at)
        if not isinstance(piece, ColumnPiece):
            raise PayloadLostError(f"{ref.at.segment}: tokens, where a column was to be")
        return piece

    def piece(self, ref: PieceRef) -> AnyPiece:
        """Any piece. Raises `PayloadLostError`."""
        found = self._found[ref]
        if isinstance(found, PayloadLostError):
            raise found
        try:
            return read_frame(memoryview(found), ref.digest)
        except PayloadLostError as error:
            raise PayloadLostError(f"{ref.segment} from byte {ref.offset} on: {error}") from None

    def _tokens(self, ref: PieceRef) -> Piece:
        piece = self.piece(ref)
        if not isinstance(piece, Piece):
            raise PayloadLostError(f"{ref.segment}: a column, where tokens were to be")
        return piece


class PayloadReader:
    """Reader of the segments in `folder`, the one of this host; `fetch` is asked for those of others."""

    def __init__(self, folder: Path, *, fetch: PieceFetch | None = None) -> None:
        self._folder = folder
        self._fetch = fetch
        self._files: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def load(self, refs: Iterable[PieceRef], *, stores: Mapping[str, str] | None = None) -> Loaded:
        """Read pieces; `stores` has the store of each segment that is of another host."""
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
        with self._lock:  # so that no other thread closes the file meanwhile
            try:
                file = self._open(ref.segment)
                # by its size first: a changed reference may ask for more than fits in memory
                is_there = 0 <= ref.offset <= ref.offset + ref.num_bytes <= os.fstat(file).st_size
                data = os.pread(file, ref.num_bytes, ref.offset) if is_there else b""
            except FileNotFoundError as error:
                kind = ElsewhereError if is_local(self._folder) else PayloadLostError
                raise kind(f"{self._folder / ref.segment}: {error.strerror}") from None
            except OSError as error:
                raise PayloadLostError(f"{self._folder / ref.segment}: {error.strerror}") from None
            except ValueError as error:  # no name of a file
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
        assert self._fetch is not None, f"{refs[0].segment} is of another host, of which this reader knows none"
        fetch = self._fetch
        try:
            return dict(zip(refs, fetch(store, refs), strict=True))
        except StoreAwayError as error:
            return dict.fromkeys(refs, error)
        except PayloadLostError as error:
            if len(refs) == 1:
                return {refs[0]: error}
        return {ref: self._fetched(store, [ref])[ref] for ref in refs}  # the others may be there


def complete_all(
    finished: Sequence[FinishedTrajectory], reader: PayloadReader, *, stores: Mapping[str, str]
) -> tuple[dict[str, Trajectory], dict[str, str]]:
    """Trajectories with tokens by id, read together; and of those that are lost, what is."""
    loaded = reader.load((ref for one in finished for ref in one.refs), stores=stores)
    complete: dict[str, Trajectory] = {}
    lost: dict[str, str] = {}
    for one in finished:
        try:
            complete[one.id] = complete_one(one, loaded)
        except PayloadLostError as error:
            lost[one.id] = str(error)
    return complete, lost


def complete_one(finished: FinishedTrajectory, loaded: Loaded) -> Trajectory:
    """A trajectory with its tokens. Raises `PayloadLostError`."""
    response = loaded.response(finished.tokens)
    length = len(response.ids)
    if length != finished.length:
        raise PayloadLostError(f"{length} of its {finished.length} tokens")
    return Trajectory(
        id=finished.id,
        prompt_id=finished.prompt_id,
        group_id=finished.group_id,
        sample_index=finished.sample_index,
        kind=finished.kind,
        prompt_ids=finished.prompt_ids,
        response_ids=response.ids,
        logprobs=response.logprobs,
        loss_mask=sampled_mask(finished.spans if finished.num_trained else (), length),
        spans=finished.spans,
        finish_reason=finished.finish_reason,
        reward=finished.reward,
        advantage=finished.advantage,
        advantage_scale=finished.advantage_scale,
        weight=finished.weight,
        roles=finished.roles,
        sampling_mask=response.sampling_mask,
        routed_experts=response.routed_experts,
        columns={name: loaded.column(column).values for name, column in finished.columns.items()},
    )
