"""Reader of pieces by reference, from the segments in the run's folder.

Scorers, learner ranks, the reference model, replicas and the audit have a reader each. Every piece is checked
against the digest of its reference (law 9). Threads may share a reader.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from laminar_py.ledger.segments.frames import AnyPiece, read_frame
from laminar_py.ledger.segments.payload import Payload, join
from laminar_py.ledger.segments.writer import SEGMENT
from laminar_py.records.pieces import ColumnPiece, ColumnRef, PayloadLostError, Piece, PieceRef, TokensRef
from laminar_py.records.spans import sampled_mask
from laminar_py.records.trajectory import BaseTrajectory, Trajectory, TrajectoryRef

OPEN_FILES = 256  # kept open per reader
PATIENCE_S = 60.0  # with several hosts: longer than NFS caches a file's size
RETRY_S = 0.2  # between two tries

P = TypeVar("P", Piece, ColumnPiece)


class LoadedPieces:
    """Pieces that were loaded together, with an error in place of each lost piece."""

    def __init__(self, pieces: Mapping[PieceRef, AnyPiece | PayloadLostError]) -> None:
        self._pieces = pieces

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
        piece = self._pieces[ref]
        if isinstance(piece, PayloadLostError):
            raise piece
        return piece

    def _piece_of(self, kind: type[P], ref: PieceRef) -> P:
        """Return a piece of type `kind`. Raises `PayloadLostError`, also if it is of another type."""
        piece = self.piece(ref)
        if not isinstance(piece, kind):
            raise PayloadLostError(f"{ref.segment}: a {type(piece).__name__} instead of a {kind.__name__}")
        return piece


class PayloadReader:
    """Reads pieces from the segments in `folder`.

    If a piece of another host is missing, the reader reopens the file for up to `patience_s` seconds: a network
    file system may show an open file as it was seconds ago.
    """

    def __init__(self, folder: Path, *, patience_s: float = 0.0) -> None:
        self._folder = folder
        self._patience_s = patience_s
        self._files: OrderedDict[str, int] = OrderedDict()
        self._lock = threading.Lock()

    def load(self, refs: Iterable[PieceRef], *, waits: bool = True) -> LoadedPieces:
        """Read pieces; the result has an error for each piece that cannot be read, at once unless it `waits`."""
        deadline = time.monotonic() + (self._patience_s if waits else 0.0)
        in_file_order = sorted(refs, key=lambda ref: (ref.segment, ref.offset))
        return LoadedPieces({ref: self._read_until(ref, deadline) for ref in in_file_order})

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])

    def _read_until(self, ref: PieceRef, deadline: float) -> AnyPiece | PayloadLostError:
        """Read a piece; until `deadline` (monotonic), reopen the file and retry. Return the last error."""
        while True:
            try:
                return read_frame(memoryview(self._read(ref)), ref.digest)
            except PayloadLostError as error:
                fault = PayloadLostError(f"{self._folder / ref.segment} from byte {ref.offset} on: {error}")
            with self._lock:
                if ref.segment in self._files:
                    os.close(self._files.pop(ref.segment))
            if time.monotonic() >= deadline:
                return fault
            time.sleep(RETRY_S)

    def _read(self, ref: PieceRef) -> bytes:
        """Read the bytes of a piece from a segment in this folder. Raises `PayloadLostError`."""
        with self._lock:  # no other thread may close the file during the read
            try:
                file = self._open(ref.segment)
                # the size first, since a damaged reference may ask for more than memory holds
                is_there = 0 <= ref.offset <= ref.offset + ref.num_bytes <= os.fstat(file).st_size
                data = os.pread(file, ref.num_bytes, ref.offset) if is_there else b""
            except OSError as error:
                raise PayloadLostError(str(error.strerror)) from None
            except ValueError as error:  # not a file name
                raise PayloadLostError(str(error)) from None
        if not is_there or len(data) < ref.num_bytes:
            raise PayloadLostError(f"the file ends before byte {ref.offset + ref.num_bytes}")
        return data

    def _open(self, segment: str) -> int:
        """Return the descriptor of a segment; above `OPEN_FILES`, close the least recently used one."""
        if segment not in self._files:
            path = self._folder / f"{segment}{SEGMENT}"
            self._files[segment] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(segment)
        return self._files[segment]


def complete_all(
    finished: Sequence[TrajectoryRef], reader: PayloadReader
) -> tuple[dict[str, Trajectory], dict[str, str]]:
    """Read the tokens of trajectories together; return trajectories by id, and reasons of lost ones by id."""
    loaded = reader.load(ref for trajectory in finished for ref in trajectory.refs)
    complete: dict[str, Trajectory] = {}
    lost: dict[str, str] = {}
    for trajectory in finished:
        try:
            complete[trajectory.id] = complete_one(trajectory, loaded)
        except PayloadLostError as error:
            lost[trajectory.id] = str(error)
    return complete, lost


def complete_one(finished: TrajectoryRef, loaded: LoadedPieces) -> Trajectory:
    """Return a finished trajectory with tokens and columns from `loaded`. Raises `PayloadLostError`."""
    response = loaded.response(finished.tokens)
    length = len(response.ids)
    if length != finished.length:
        raise PayloadLostError(f"only {length} of its {finished.length} tokens are stored")
    return Trajectory(
        **{name: getattr(finished, name) for name in BaseTrajectory.__struct_fields__},
        response_ids=response.ids,
        logprobs=response.logprobs,
        loss_mask=sampled_mask(finished.spans if finished.num_trained else (), length),
        sampling_mask=response.sampling_mask,
        routed_experts=response.routed_experts,
        columns={name: loaded.column(column).values for name, column in finished.columns.items()},
    )
