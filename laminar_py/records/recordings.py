"""Sampling masks and routed experts: their shapes, how pieces join, and how they are packed for the ledger. Pure.

Joined by a running stream and by a trajectory's life, packed by the ledger's writer, unpacked by its readers.
Invariant: pieces lie end to end, nothing is missing and nothing is there twice.
"""

import struct
import zlib
from collections.abc import Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.codec import IntArray

_mask_head = struct.Struct("<IIBB")  # rows, ids, bytes of a count, bytes of an id
_experts_head = struct.Struct("<IHHB")  # start, layers, top_k, width


class Recording(StrEnum):
    """Kind of data that an engine records beside tokens and log-probabilities, where it is asked to."""

    SAMPLING_MASK = "sampling_mask"
    ROUTED_EXPERTS = "routed_experts"


class SamplingMask(msgspec.Struct, frozen=True):
    """The vocabulary that n tokens were drawn from, row after row, e.g. two tokens out of {3, 5} and {9}:

    `SamplingMask(counts=[2, 1], ids=[3, 5, 9])`.
    """

    counts: IntArray  # [n]
    ids: IntArray  # [sum of counts]


class RoutedExperts(msgspec.Struct, frozen=True, kw_only=True):
    """The experts that positions [start, start + positions) of prompt and response went to, in every layer.

    `data` is [positions, layers, top_k] of unsigned little-endian integers of `width` bytes. The last token of
    a response is never an input, so a whole trajectory has P + L - 1 positions.
    """

    start: int
    layers: int
    top_k: int
    width: int  # 1 or 2
    data: bytes

    @property
    def positions(self) -> int:
        """Tokens covered."""
        return len(self.data) // (self.layers * self.top_k * self.width)

    @property
    def table(self) -> npt.NDArray[np.int16]:
        """[positions, layers, top_k]."""
        flat = np.frombuffer(self.data, f"<u{self.width}").astype(np.int16)
        return flat.reshape(-1, self.layers, self.top_k)


def join_masks(pieces: Sequence[SamplingMask]) -> SamplingMask:
    """The rows of all pieces, one or more, in order."""
    if len(pieces) == 1:
        return pieces[0]
    return SamplingMask(
        np.concatenate([piece.counts for piece in pieces]), np.concatenate([piece.ids for piece in pieces])
    )


def join_experts(pieces: Sequence[RoutedExperts]) -> RoutedExperts:
    """The positions of all pieces, one or more; ValueError if they do not lie end to end, or differ in shape."""
    if len(pieces) == 1:
        return pieces[0]
    first, end = pieces[0], pieces[0].start
    width = max(piece.width for piece in pieces)
    for piece in pieces:
        if (piece.layers, piece.top_k) != (first.layers, first.top_k):
            shapes = f"{first.layers} layers, top {first.top_k}, then {piece.layers} layers, top {piece.top_k}"
            raise ValueError(f"routed experts of {shapes}")
        if piece.start != end:
            raise ValueError(f"routed experts of positions [{end}, {piece.start}) are missing or stored twice")
        end += piece.positions
    data = b"".join(_widened(piece, width) for piece in pieces)
    return RoutedExperts(start=first.start, layers=first.layers, top_k=first.top_k, width=width, data=data)


def _widened(piece: RoutedExperts, width: int) -> bytes:
    if piece.width == width:
        return piece.data
    return np.frombuffer(piece.data, f"<u{piece.width}").astype(f"<u{width}").tobytes()


def pack_mask(mask: SamplingMask) -> bytes:
    """Compact bytes: counts and ids in byte planes, compressed; about half of what the ids alone take."""
    counts, count_bytes = _planes(mask.counts)
    ids, id_bytes = _planes(mask.ids)
    head = _mask_head.pack(len(mask.counts), len(mask.ids), count_bytes, id_bytes)
    return head + zlib.compress(counts + ids, 1)


def unpack_mask(data: bytes) -> SamplingMask:
    """The mask in such bytes; ValueError if there is none."""
    try:
        rows, size, count_bytes, id_bytes = _mask_head.unpack_from(data)
        planes = zlib.decompress(data[_mask_head.size :])
    except (struct.error, zlib.error) as error:
        raise ValueError(f"a sampling mask that cannot be read: {error}") from None
    split = rows * count_bytes
    if len(planes) != split + size * id_bytes or not 0 < count_bytes <= 4 or not 0 < id_bytes <= 4:
        raise ValueError(f"a sampling mask that cannot be read: {len(planes)} bytes for {rows} rows")
    mask = SamplingMask(_from_planes(planes[:split], rows), _from_planes(planes[split:], size))
    if int(mask.counts.min(initial=0)) < 0 or int(mask.counts.sum(dtype=np.int64)) != size:
        raise ValueError(f"a sampling mask that cannot be read: its counts are not of its {size} ids")
    return mask


def pack_experts(experts: RoutedExperts) -> bytes:
    """Compact bytes: as they are, since deflate gains an eighth at 12 us a token (48 layers, 8 of 128)."""
    return _experts_head.pack(experts.start, experts.layers, experts.top_k, experts.width) + experts.data


def unpack_experts(data: bytes) -> RoutedExperts:
    """The experts in such bytes; ValueError if there are none."""
    try:
        start, layers, top_k, width = _experts_head.unpack_from(data)
    except struct.error as error:
        raise ValueError(f"routed experts that cannot be read: {error}") from None
    size = len(data) - _experts_head.size
    if width not in (1, 2) or not layers * top_k or size % (layers * top_k * width):
        raise ValueError(f"routed experts that cannot be read: {size} bytes for {layers} layers, top {top_k}")
    return RoutedExperts(start=start, layers=layers, top_k=top_k, width=width, data=data[_experts_head.size :])


def _planes(values: IntArray) -> tuple[bytes, int]:
    """The lowest byte of every value, then the next one, as many as the largest needs; and how many these are."""
    width = max(1, (int(values.max(initial=0)).bit_length() + 7) // 8)
    rows = np.ascontiguousarray(values, "<i4").view(np.uint8).reshape(-1, 4)
    return rows.T[:width].tobytes(), width


def _from_planes(planes: bytes, count: int) -> IntArray:
    rows = np.zeros((count, 4), np.uint8)
    if count:
        rows[:, : len(planes) // count] = np.frombuffer(planes, np.uint8).reshape(-1, count).T
    return rows.view("<i4").reshape(count)
