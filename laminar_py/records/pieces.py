"""Pieces of responses as they are stored, references to pieces, and the recordings that engines add to tokens.

Replicas, scorers and the reference model write pieces to segments (`ledger.segments.writer`) in the run's folder.
Controller and ledger keep only references: a piece's segment, offset, size and digest. L is the number of response
tokens.

An engine may record two things beside tokens and log-probabilities: the sampling mask (the vocabulary that each
token was drawn from) and the routed experts of a mixture model. The functions here join recordings of consecutive
tokens and pack them into bytes. Joined recordings lie end to end; a gap or an overlap raises
(`tests/records/test_pieces.py`).
"""

import struct
import zlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.codec import IntArray
from laminar_py.records.columns import Dtype, TokenValues
from laminar_py.records.credit import RoleCredit
from laminar_py.records.spans import Span


class PayloadLostError(Exception):
    """A piece cannot be read: its file is missing, or its bytes are missing or damaged. The message says which."""


class Piece(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False, tag="tokens"):
    """Response tokens [start, start + n) of a trajectory, from one assignment to a replica, e.g. 41 of "g3.1":

    `Piece(trajectory_id="g3.1", epoch=0, start=0, spans=(Span(7, 0, 41),), ids=ids, logprobs=logprobs)`. `spans`
    may start before `start`; then they correct the spans of earlier pieces. Tokens that an environment wrote are
    included, with a log-probability of 0 and an empty row in the mask.
    """

    trajectory_id: str
    epoch: int
    start: int
    spans: tuple[Span, ...]
    ids: bytes  # [n] little-endian int32
    logprobs: bytes  # [n] little-endian float32
    mask: bytes | None = None  # n rows by `pack_mask`; None: not recorded
    experts: bytes | None = None  # by `pack_experts`, for a separate range of positions; n may be 0
    used_s: float = 0.0  # seconds of the trajectory's generation until the piece's end, on all replicas
    reward: float | None = None  # reward of the environment that ended the trajectory
    roles: tuple[RoleCredit, ...] = ()  # rewards by role, which sum to `reward`

    @property
    def end(self) -> int:
        """Number of response tokens up to the end of the piece."""
        return self.start + len(self.ids) // 4


class ColumnPiece(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False, tag="column"):
    """A column of one response, e.g. `ColumnPiece(trajectory_id="g3.1", name="token_rewards", values=values)`."""

    trajectory_id: str
    name: str
    values: TokenValues  # [L]


class PieceRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Place, size and digest of a piece, e.g. `PieceRef("replica-3.18f2a", 65536, 24012, digest)`."""

    segment: str  # name of the file
    offset: int  # bytes
    num_bytes: int
    digest: bytes  # [16] BLAKE3


COUNTED = PieceRef("(counted)", 0, 0, b"")
"""Reference to tokens that a simulation only counts and does not store."""


class TokensRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reference to response tokens [start, end), e.g. `TokensRef(0, 41, at)`.

    If `start` equals `end`, the piece holds only routed experts.
    """

    start: int
    end: int
    at: PieceRef
    routed: int = 0  # leading positions whose experts this piece and earlier pieces hold; 0: none


class ColumnRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reference to a column of one response, e.g. `ColumnRef(Dtype.FLOAT32, at)`."""

    dtype: Dtype
    at: PieceRef


class Recording(StrEnum):
    """Data that an engine records beside tokens and log-probabilities if the config asks for it."""

    SAMPLING_MASK = "sampling_mask"
    ROUTED_EXPERTS = "routed_experts"


class SamplingMask(msgspec.Struct, frozen=True):
    """Ids that each of n tokens was drawn from, row after row, e.g. a token out of {3, 5} and a token out of {9}:

    `SamplingMask(counts=[2, 1], ids=[3, 5, 9])`.
    """

    counts: IntArray  # [n] ids of each row
    ids: IntArray  # [sum of counts]


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """Experts that positions [start, start + positions) of prompt and response were routed to, in every layer.

    E.g. 2 positions of 48 layers, top 8 of 128: `RoutedExperts(start=0, layers=48, top_k=8, width=1, data=data)`
    with 768 bytes. The last token of a response is never an input, so a trajectory has P + L - 1 positions.
    """

    start: int
    layers: int
    top_k: int
    width: int  # bytes of an expert's number: 1 or 2
    data: bytes  # [positions, layers, top_k] unsigned little-endian integers of `width` bytes

    @property
    def positions(self) -> int:
        """Number of positions."""
        return len(self.data) // (self.layers * self.top_k * self.width)

    def up_to(self, end: int) -> "RoutedExperts":
        """Return the experts of positions below `end`."""
        num_bytes = max(0, end - self.start) * self.layers * self.top_k * self.width
        return msgspec.structs.replace(self, data=self.data[:num_bytes])

    @property
    def table(self) -> npt.NDArray[np.int16]:
        """[positions, layers, top_k] numbers of experts."""
        flat = np.frombuffer(self.data, f"<u{self.width}").astype(np.int16)
        return flat.reshape(-1, self.layers, self.top_k)


def join_masks(pieces: Sequence[SamplingMask]) -> SamplingMask:
    """Join the rows of one or more masks, in order."""
    if len(pieces) == 1:
        return pieces[0]
    return SamplingMask(
        np.concatenate([piece.counts for piece in pieces]), np.concatenate([piece.ids for piece in pieces])
    )


def join_experts(pieces: Sequence[RoutedExperts]) -> RoutedExperts:
    """Join recordings of consecutive positions. Raises ValueError on a gap, an overlap or another shape."""
    if len(pieces) == 1:
        return pieces[0]
    first, end = pieces[0], pieces[0].start
    for piece in pieces:
        if (piece.layers, piece.top_k) != (first.layers, first.top_k):
            shapes = f"{first.layers} layers, top {first.top_k}, then {piece.layers} layers, top {piece.top_k}"
            raise ValueError(f"routed experts change their shape: {shapes}")
        if piece.start != end:
            raise ValueError(f"routed experts of positions [{end}, {piece.start}) are missing or stored twice")
        end += piece.positions
    # `concatenate` widens all numbers to the widest type
    numbers = np.concatenate([np.frombuffer(piece.data, f"<u{piece.width}") for piece in pieces])
    width, data = numbers.itemsize, numbers.tobytes()
    return RoutedExperts(start=first.start, layers=first.layers, top_k=first.top_k, width=width, data=data)


_mask_head = struct.Struct("<IIBB")  # rows, ids, bytes of a count, bytes of an id
_experts_head = struct.Struct("<IHHB")  # start, layers, top_k, width


def pack_mask(mask: SamplingMask) -> bytes:
    """Pack a mask into bytes: compressed byte planes of counts and ids, half as large as the ids."""
    counts, count_bytes = _to_planes(mask.counts)
    ids, id_bytes = _to_planes(mask.ids)
    head = _mask_head.pack(len(mask.counts), len(mask.ids), count_bytes, id_bytes)
    return head + zlib.compress(counts + ids, 1)


def unpack_mask(data: bytes) -> SamplingMask:
    """Unpack bytes of `pack_mask`. Raises ValueError for other bytes."""
    try:
        rows, size, count_bytes, id_bytes = _mask_head.unpack_from(data)
        planes = zlib.decompress(data[_mask_head.size :])
    except (struct.error, zlib.error) as error:
        raise ValueError(f"a stored sampling mask is damaged: {error}") from None
    split = rows * count_bytes
    if len(planes) != split + size * id_bytes or not 0 < count_bytes <= 4 or not 0 < id_bytes <= 4:
        raise ValueError(f"a stored sampling mask is damaged: {len(planes)} bytes for {rows} rows")
    mask = SamplingMask(_from_planes(planes[:split], rows), _from_planes(planes[split:], size))
    if int(mask.counts.min(initial=0)) < 0 or int(mask.counts.sum(dtype=np.int64)) != size:
        raise ValueError(f"a stored sampling mask is damaged: its counts do not sum to its {size} ids")
    return mask


def pack_experts(experts: RoutedExperts) -> bytes:
    """Pack experts into bytes. Deflate would save only an eighth, for 12 us a token (48 layers, 8 of 128)."""
    return _experts_head.pack(experts.start, experts.layers, experts.top_k, experts.width) + experts.data


def unpack_experts(data: bytes) -> RoutedExperts:
    """Unpack bytes of `pack_experts`. Raises ValueError for other bytes."""
    try:
        start, layers, top_k, width = _experts_head.unpack_from(data)
    except struct.error as error:
        raise ValueError(f"stored routed experts are damaged: {error}") from None
    size = len(data) - _experts_head.size
    if width not in (1, 2) or not layers * top_k or size % (layers * top_k * width):
        raise ValueError(f"stored routed experts are damaged: {size} bytes for {layers} layers, top {top_k}")
    return RoutedExperts(start=start, layers=layers, top_k=top_k, width=width, data=data[_experts_head.size :])


def _to_planes(values: IntArray) -> tuple[bytes, int]:
    """Split [n] values into byte planes, all lowest bytes first; returns the planes and their number.

    There are as many planes as the largest value needs. High bytes are mostly 0, so planes compress better.
    """
    width = max(1, (int(values.max(initial=0)).bit_length() + 7) // 8)
    rows = np.ascontiguousarray(values, "<i4").view(np.uint8).reshape(-1, 4)
    return rows.T[:width].tobytes(), width


def _from_planes(planes: bytes, count: int) -> IntArray:
    """Join byte planes of `_to_planes` into [count] values."""
    rows = np.zeros((count, 4), np.uint8)
    if count:
        rows[:, : len(planes) // count] = np.frombuffer(planes, np.uint8).reshape(-1, count).T
    return rows.view("<i4").reshape(count)
