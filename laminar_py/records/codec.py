"""MessagePack codec of every record that crosses a process. Owns how arrays travel; no pickle anywhere.

A field annotated `IntArray` or `FloatArray` travels as raw little-endian bytes and arrives as a read-only
view on the received buffer, so decoding a trajectory copies no token.
"""

from typing import TypeAlias, TypeVar, get_args

import msgspec
import numpy as np
import numpy.typing as npt

IntArray: TypeAlias = npt.NDArray[np.int32]
FloatArray: TypeAlias = npt.NDArray[np.float32]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

T = TypeVar("T")


def _encode_array(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    raise TypeError(f"cannot encode {type(value).__name__}")


def _decode_array(kind: type, value: object) -> object:
    dtype = get_args(get_args(kind)[1])[0]
    if not isinstance(value, bytes | memoryview):
        raise ValueError(f"array field holds {type(value).__name__}")
    return np.frombuffer(value, dtype=dtype)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
_decoders: dict[object, msgspec.msgpack.Decoder[object]] = {}


def encode(record: object) -> bytes:
    """MessagePack bytes of a record."""
    return _encoder.encode(record)


def decode(kind: type[T], data: bytes | memoryview) -> T:
    """The record of type `kind` in `data`; `msgspec.ValidationError` names the field that does not fit."""
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind, dec_hook=_decode_array)
    return decoder.decode(data)  # type: ignore[return-value]
