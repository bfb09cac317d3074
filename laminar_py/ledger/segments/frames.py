"""Bytes of pieces in segments and journals. Pure.

A frame is a head of fixed size (kind, sizes, digest), a description in MessagePack, and the arrays as they are.
Its digest covers description and arrays, so that whoever has a reference can tell that the bytes are those it is
of, and who reads a file from its beginning where the whole frames end. Frames lie end to end.
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
    """A piece as it is written: buffers in a row, how many bytes these are, and the digest."""

    buffers: Sequence[Buffer]
    num_bytes: int
    digest: bytes


def make_frame(piece: AnyPiece) -> Frame:
    """The frame of a piece."""
    if isinstance(piece, Piece):
        same = len(piece.ids) == len(piece.logprobs)
        assert same, f"{piece.trajectory_id}: {len(piece.logprobs)} bytes of logprobs for {len(piece.ids)} of ids"
    description, body = describe(piece), b"".join(arrays_of(piece))
    digest = frame_digest(description, [body])
    head = _HEAD.pack(_KIND, len(description), len(body), digest)
    return Frame([head + description, body], len(head) + len(description) + len(body), digest)


def read_frame(data: memoryview, digest: bytes) -> AnyPiece:
    """The piece in a whole frame. Raises `PayloadLostError` where it is another than the digest is of."""
    try:
        kind, size, length, noted = _HEAD.unpack_from(data)
    except struct.error:
        raise PayloadLostError(f"{len(data)} bytes are no piece") from None
    description, body = data[_HEAD.size : _HEAD.size + size], data[_HEAD.size + size :]
    whole = kind == _KIND and (len(description), len(body)) == (size, length)
    if not whole or not noted == digest == frame_digest(description, [body]):
        raise PayloadLostError("the bytes there are not those that were written")
    return rebuild(description, body)


def whole_frames(data: memoryview) -> Iterator[AnyPiece]:
    """Pieces from the beginning of a file on, as far as its frames are whole."""
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


def describe(piece: AnyPiece) -> bytes:
    """Description of a piece: everything but its arrays."""
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


def arrays_of(piece: AnyPiece) -> list[bytes]:
    """Arrays of a piece, in the order in which they lie."""
    if isinstance(piece, ColumnPiece):
        return [piece.values.data]
    return [piece.ids, piece.logprobs, *filter(None, (piece.mask, piece.experts))]


def rebuild(description: Buffer, body: Buffer) -> AnyPiece:
    """The piece of a description and its arrays. Raises `PayloadLostError` where they are not of one another."""
    try:
        head = _decoder.decode(description)
    except msgspec.DecodeError as error:
        raise PayloadLostError(f"a description that cannot be read: {error}") from None
    if isinstance(head, _ColumnHead):
        return ColumnPiece(
            trajectory_id=head.trajectory_id, name=head.name, values=TokenValues(head.dtype, bytes(body))
        )
    sizes = 4 * head.count, 4 * head.count, max(0, head.mask_bytes), max(0, head.experts_bytes)
    if sum(sizes) != len(body):
        raise PayloadLostError(f"{len(body)} bytes of arrays, {sum(sizes)} are described")
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
    """Digest of a piece, [16]: of its arrays, then the sizes of both, then its description.

    Arrays come first and in one call, with which BLAKE3 takes many of its chunks at a time: half of the seconds.
    """
    body = arrays[0] if len(arrays) == 1 else b"".join(arrays)
    hasher = blake3(body)
    hasher.update(_SIZES.pack(len(description), len(body)) + description)
    return hasher.digest(length=DIGEST_BYTES)
