"""The byte format of pieces in segments and journals. Pure.

A frame is a head of fixed size (kind, sizes, digest), a description in MessagePack, and the raw arrays. Frames lie
end to end. The digest covers description and arrays. With it a reader checks a piece against its reference, and
finds where the complete frames of a file end.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
from blake3 import blake3

from laminar_py.records.codec import DIGEST_BYTES
from laminar_py.records.columns import Dtype, TokenValues
from laminar_py.records.credit import RoleCredit
from laminar_py.records.pieces import ColumnPiece, PayloadLostError, Piece
from laminar_py.records.spans import Span

Buffer: TypeAlias = bytes | memoryview
AnyPiece: TypeAlias = Piece | ColumnPiece

_HEAD = struct.Struct("<4sIQ16s")  # kind, bytes of the description, bytes of the arrays, digest
_SIZES = struct.Struct("<IQ")
_KIND = b"LPP1"
_ABSENT = -1


class _TokensHead(msgspec.Struct, frozen=True, kw_only=True, array_like=True, gc=False, tag="tokens"):
    trajectory_id: str
    epoch: int
    start: int
    spans: tuple[Span, ...]
    count: int
    mask_bytes: int
    experts_bytes: int
    used_s: float
    reward: float | None = None
    roles: tuple[RoleCredit, ...] = ()


class _ColumnHead(msgspec.Struct, frozen=True, array_like=True, gc=False, tag="column"):
    trajectory_id: str
    name: str
    dtype: Dtype


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_TokensHead | _ColumnHead] = msgspec.msgpack.Decoder(_TokensHead | _ColumnHead)


@dataclass(frozen=True, slots=True)
class Frame:
    """The bytes of a piece: its buffers in order, their total size, and the digest."""

    buffers: Sequence[Buffer]
    num_bytes: int
    digest: bytes


def make_frame(piece: AnyPiece) -> Frame:
    """Return the frame of a piece."""
    if isinstance(piece, Piece):
        same = len(piece.ids) == len(piece.logprobs)
        assert same, f"{piece.trajectory_id}: {len(piece.logprobs)} bytes of logprobs for {len(piece.ids)} of ids"
    description, body = _describe(piece), b"".join(_arrays_of(piece))
    digest = frame_digest(description, [body])
    head = _HEAD.pack(_KIND, len(description), len(body), digest)
    return Frame([head + description, body], len(head) + len(description) + len(body), digest)


def read_frame(data: memoryview, digest: bytes) -> AnyPiece:
    """Return the piece in a frame. Raises `PayloadLostError` if the frame does not match the digest."""
    try:
        kind, size, length, noted = _HEAD.unpack_from(data)
    except struct.error:
        raise PayloadLostError(f"{len(data)} bytes are not a piece") from None
    description, body = data[_HEAD.size : _HEAD.size + size], data[_HEAD.size + size :]
    whole = kind == _KIND and (len(description), len(body)) == (size, length)
    if not whole or not noted == digest == frame_digest(description, [body]):
        raise PayloadLostError("the stored bytes were changed")
    return rebuild(description, body)


def whole_frames(data: memoryview) -> Iterator[AnyPiece]:
    """Iterate over the pieces of a file, up to its first incomplete frame."""
    place = 0
    while place + _HEAD.size <= len(data):
        _, size, length, digest = _HEAD.unpack_from(data, place)
        end = place + _HEAD.size + size + length
        if end > len(data):
            return
        try:
            piece = read_frame(data[place:end], digest)
        except PayloadLostError:
            return
        yield piece
        place = end


def _describe(piece: AnyPiece) -> bytes:
    """Return the description of a piece: all but its arrays."""
    if isinstance(piece, ColumnPiece):
        return _encoder.encode(_ColumnHead(piece.trajectory_id, piece.name, piece.values.dtype))
    return _encoder.encode(
        _TokensHead(
            trajectory_id=piece.trajectory_id,
            epoch=piece.epoch,
            start=piece.start,
            spans=piece.spans,
            count=piece.end - piece.start,
            mask_bytes=_ABSENT if piece.mask is None else len(piece.mask),
            experts_bytes=_ABSENT if piece.experts is None else len(piece.experts),
            used_s=piece.used_s,
            reward=piece.reward,
            roles=piece.roles,
        )
    )


def _arrays_of(piece: AnyPiece) -> list[bytes]:
    """Return the arrays of a piece, in file order."""
    if isinstance(piece, ColumnPiece):
        return [piece.values.data]
    return [piece.ids, piece.logprobs, *filter(None, (piece.mask, piece.experts))]


def rebuild(description: Buffer, body: Buffer) -> AnyPiece:
    """Build a piece from its description and arrays. Raises `PayloadLostError` if they do not fit."""
    try:
        head = _decoder.decode(description)
    except msgspec.DecodeError as error:
        raise PayloadLostError(f"unreadable description: {error}") from None
    if isinstance(head, _ColumnHead):
        return ColumnPiece(
            trajectory_id=head.trajectory_id, name=head.name, values=TokenValues(head.dtype, bytes(body))
        )
    sizes = 4 * head.count, 4 * head.count, max(0, head.mask_bytes), max(0, head.experts_bytes)
    if sum(sizes) != len(body):
        raise PayloadLostError(f"{len(body)} bytes of arrays instead of {sum(sizes)}")
    arrays, place = [], 0
    for size in sizes:
        arrays.append(bytes(body[place : place + size]))
        place += size
    return Piece(
        trajectory_id=head.trajectory_id,
        epoch=head.epoch,
        start=head.start,
        spans=head.spans,
        ids=arrays[0],
        logprobs=arrays[1],
        mask=None if head.mask_bytes == _ABSENT else arrays[2],
        experts=None if head.experts_bytes == _ABSENT else arrays[3],
        used_s=head.used_s,
        reward=head.reward,
        roles=head.roles,
    )


def frame_digest(description: Buffer, arrays: Sequence[Buffer]) -> bytes:
    """Return the [16] digest of a piece: over its arrays, then both sizes, then its description.

    The arrays come first and in one call, which lets BLAKE3 process many chunks at a time, in half of the time.
    """
    body = arrays[0] if len(arrays) == 1 else b"".join(arrays)
    hasher = blake3(body)
    hasher.update(_SIZES.pack(len(description), len(body)) + description)
    return hasher.digest(length=DIGEST_BYTES)
