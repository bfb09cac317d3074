"""Bytes of records: the MessagePack codec for records that cross a process, and the digests in the ledger.

Arrays travel as raw little-endian bytes. They arrive as read-only views on the received buffer, so decoding a
trajectory copies no token. No record is pickled (law 7).

Responses, prompts and files have digests, and events have a hash chain. The ledger computes the digests when it
writes, and the audit computes each of them again. `ledger.segments` makes the digest of a piece. Every digest is
BLAKE3 cut to 16 bytes: enough against accidents and casual edits.
"""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

T = TypeVar("T")


def _encode_array(value: object) -> bytes:
    """Return the bytes of an array. msgspec calls this for types that it does not know."""
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"cannot encode {type(value).__name__} as MessagePack; use types of msgspec or an array")


def _decode_array(kind: type, value: object) -> object:
    """View bytes as an array of `kind`, e.g. `IntArray`. msgspec calls this for types that it does not know."""
    dtype = get_args(get_args(kind)[1])[0]
    if not isinstance(value, bytes | memoryview):
        raise ValueError(f"expected the bytes of an array of {dtype.__name__}, got {type(value).__name__}")
    return np.frombuffer(value, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoders: dict[object, msgspec.msgpack.Decoder[object]] = {}


def encode(record: object) -> bytes:
    """Encode a record as MessagePack bytes."""
    return _encoder.encode(record)


def decode(kind: type[T], data: bytes | memoryview) -> T:
    """Decode `data` as a record of type `kind`. Raises `msgspec.ValidationError`, which names the wrong field."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
    return decoder.decode(data)  # type: ignore[return-value]


DIGEST_BYTES = 16
CHAIN_START = bytes(DIGEST_BYTES)  # the hash before the first event

# The head of a row has the lengths of its texts, so that no two rows hash the same bytes.
_event_head = struct.Struct("<qddIII").pack
_prompt_head = struct.Struct("<qqIIIq").pack


def response_digest(pieces: Iterable[bytes]) -> str:
    """Hex digest of a whole response, from the digests of its pieces (`PieceRef.digest`) in order."""
    return blake3(b"".join(pieces)).hexdigest(length=DIGEST_BYTES)


def event_hash(
    previous: bytes, *, seq: int, wall: float, mono: float, host: str, kind: str, subject: str, body: bytes
) -> bytes:
    """Hash of one row of the event log, chained to `previous`, the hash of the row before."""
    head = _event_head(seq, wall, mono, len(host), len(kind), len(subject))
    return blake3(previous + head + f"{host}{kind}{subject}".encode() + body).digest(length=DIGEST_BYTES)


def prompt_digest(id: str, text: str, ids: bytes, answer: str, task: str, fields: bytes) -> bytes:
    """Digest of one prompt from the columns of its row in the ledger."""
    head = _prompt_head(len(id), len(text), len(ids), len(answer), len(task), len(fields))
    row = b"".join((head, f"{id}{text}".encode(), ids, f"{answer}{task}".encode(), fields))
    return blake3(row).digest(length=DIGEST_BYTES)


def file_digest(path: Path) -> str:
    """Hex digest of a file's bytes. Maps the file instead of reading it into memory. Raises `OSError`."""
    return blake3().update_mmap(path).hexdigest(length=DIGEST_BYTES)
