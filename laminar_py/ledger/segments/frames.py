"""The byte format of pieces in segments and journals. Pure.

A frame is a head of fixed size (kind, sizes, digest), a description in MessagePack, and the arrays. Frames lie
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
from laminar_py.records.columns import TokenValues
from laminar_py.records.pieces import ColumnPiece, PayloadLostError, Piece

Buffer: TypeAlias = bytes | memoryview
AnyPiece: TypeAlias = Piece | ColumnPiece

_HEAD = struct.Struct("<4sIQ16s")  # kind, bytes of the description, bytes of the arrays, digest
_SIZES = struct.Struct("<IQ")
_KIND = b"LPP1"
_ARRAYS = "ids", "logprobs", "mask", "experts"  # arrays of a `Piece`, in file order

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[tuple[AnyPiece, list[int | None]]] = msgspec.msgpack.Decoder(
    tuple[AnyPiece, list[int | None]]
)


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
    description, body = _split(piece)
    digest = frame_digest(description, body)
    head = _HEAD.pack(_KIND, len(description), len(body), digest)
    return Frame([head + description, body], len(head) + len(description) + len(body), digest)


def read_frame(data: memoryview, digest: bytes) -> AnyPiece:
    """Return the piece in a frame. Raises `PayloadLostError` if it does not match the reference's `digest`."""
    try:
        kind, size, length, noted = _HEAD.unpack_from(data)
    except struct.error:
        raise PayloadLostError(f"{len(data)} bytes are not a piece") from None
    description, body = data[_HEAD.size : _HEAD.size + size], data[_HEAD.size + size :]
    is_whole = kind == _KIND and (len(description), len(body)) == (size, length)
    if not is_whole or not noted == digest == frame_digest(description, body):
        raise PayloadLostError("the stored bytes differ from the digest of their reference")
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


def _split(piece: AnyPiece) -> tuple[bytes, bytes]:
    """Split a piece into its description (the piece without arrays, and their sizes) and its arrays."""
    if isinstance(piece, ColumnPiece):
        arrays: list[bytes | None] = [piece.values.data]
        bare: AnyPiece = msgspec.structs.replace(piece, values=TokenValues(piece.values.dtype, b""))
    else:
        arrays = [getattr(piece, name) for name in _ARRAYS]
        bare = msgspec.structs.replace(piece, ids=b"", logprobs=b"", mask=None, experts=None)
    sizes = [None if array is None else len(array) for array in arrays]
    return _encoder.encode((bare, sizes)), b"".join(filter(None, arrays))


def rebuild(description: Buffer, body: Buffer) -> AnyPiece:
    """Build a piece from its description and arrays. Raises `PayloadLostError` if one is damaged."""
    try:
        bare, sizes = _decoder.decode(description)
    except msgspec.DecodeError as error:
        raise PayloadLostError(f"the description of a piece cannot be read: {error}") from None
    if sum(size or 0 for size in sizes) != len(body):
        raise PayloadLostError(f"{len(body)} bytes of arrays instead of {sum(size or 0 for size in sizes)}")
    arrays, place = list[bytes | None](), 0
    for size in sizes:
        arrays.append(None if size is None else bytes(body[place : place + size]))
        place += size or 0
    if isinstance(bare, ColumnPiece):
        return msgspec.structs.replace(bare, values=TokenValues(bare.values.dtype, arrays[0] or b""))
    return msgspec.structs.replace(bare, **dict(zip(_ARRAYS, arrays, strict=True)))


def frame_digest(description: Buffer, body: Buffer) -> bytes:
    """Return the [16] digest of a piece: over its arrays, then both sizes, then its description.

    The arrays come first and in one call, which lets BLAKE3 process many chunks at a time, in half of the time.
    """
    hasher = blake3(body)
    hasher.update(_SIZES.pack(len(description), len(body)) + description)
    return hasher.digest(length=DIGEST_BYTES)
