"""Deltas: the difference between a chunk in a new version and the same bytes in a base version.

The root encodes each chunk once; every node passes the payload on unchanged and applies it to its own base. Pure:
bytes in, bytes out. `apply(encode(new, base), out)` makes `new` of `out`, the base, bit for bit, whatever the
bytes mean (`tests/relay/test_delta.py::test_a_chunk_comes_back_bit_for_bit`). numpy and zstd do the work without
the interpreter's lock, so threads help.

A payload is empty if nothing changed. Else it is a header, a zstd frame behind its length for each of these
planes, and the last n % width bytes in full:

    gaps        4 planes of [num_changed] u8: unchanged elements before each changed one; low bytes first
    falls       [ceil(num_changed / 8)] a bit for each changed element: whether it went down
    magnitudes  width planes of [num_changed] u8: by how much it changed, minus one; low bytes first

Elements count as integers. One step of the optimizer moves a float by one or few units in the last place, so
almost all high bytes are zero and compress well. A changed sign or exponent is a large number, and lossless too.
"""

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

Buffer: TypeAlias = bytes | bytearray | memoryview  # contiguous
Elements: TypeAlias = npt.NDArray[np.uint16 | np.uint32]
Positions: TypeAlias = npt.NDArray[np.intp]

_FORMAT = 2
_GAP_WIDTH = 4  # bytes of a gap
MIN_SPACING = 5  # elements per changed one; denser changes take longer to encode than they save when sent
_BLOCK_BYTES = 2**18  # of new and of base at a time, so that the next pass still finds them in the cache
_DTYPES: dict[int, np.dtype[np.uint16 | np.uint32]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_HEADER = struct.Struct("<BBII")  # format, width, n, num_changed
_LENGTH = struct.Struct("<I")  # of a frame


class DeltaError(ValueError):
    """A payload does not decode; the message says why."""


class _Zstd(threading.local):
    """The zstd contexts of one thread. Threads may not share them; a new pair costs a twentieth of a chunk."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


@dataclass(frozen=True, slots=True)
class Difference:
    """The changed elements of a chunk, e.g. `compare(new, base, width=2)`; elements count as integers."""

    places: Positions  # [k] changed elements, ascending
    steps: Elements  # [k] new value minus old, modulo 2**bits
    tail: bytes  # the last n % width bytes of the new chunk


def compare(new: Buffer, base: Buffer, *, width: int) -> Difference | None:
    """Compare chunks, both [n] bytes, in elements of `width` 2 or 4 bytes; None if over one in five changed."""
    assert len(new) == len(base) < 2**32, f"{len(new)} new bytes against {len(base)} of the base"
    others = elements(base, width)
    values = elements(new, width)
    mask = np.empty(min(block := _BLOCK_BYTES // width, len(values)), np.bool_)
    places, steps = [np.empty(0, np.intp)], [np.empty(0, values.dtype)]
    left = len(values) // MIN_SPACING
    for start in range(0, len(values), block):
        some, old = values[start : start + block], others[start : start + block]
        changed = np.flatnonzero(np.not_equal(some, old, out=mask[: len(some)]))
        left -= len(changed)
        if left < 0:
            return None
        steps.append(some[changed] - old[changed])
        places.append(changed + start)
    return Difference(np.concatenate(places), np.concatenate(steps), bytes(new[len(new) - len(new) % width :]))


def pack(difference: Difference, num_bytes: int) -> bytes:
    """Encode a difference of chunks of `num_bytes`."""
    steps, tail = difference.steps, difference.tail
    width, num_changed = steps.itemsize, len(steps)
    gaps = difference.places.astype("<u4")
    gaps[1:] -= gaps[:-1] + 1
    signed = steps.view(f"<i{width}")
    falls = np.packbits(signed < 0).tobytes()
    parts = [_HEADER.pack(_FORMAT, width, num_bytes, num_changed)]
    for plane in (*_planes(gaps), falls, *_planes(np.abs(signed).view(steps.dtype) - 1)):
        frame = _zstd.compressor.compress(plane)
        parts += (_LENGTH.pack(len(frame)), frame)
    return b"".join((*parts, tail))


def encode(new: Buffer, base: Buffer, *, width: int) -> bytes | None:
    """Encode the payload that turns `base` into `new`, see `compare`; None also if the payload saves nothing.

    Returns `b""` if nothing changed.
    """
    difference = compare(new, base, width=width)
    return None if difference is None else pack_or_none(difference, base)


def pack_or_none(difference: Difference, base: Buffer) -> bytes | None:
    """Encode a difference from `base` [n]; `b""` if nothing changed, None if the payload saves nothing."""
    if not len(difference.places) and difference.tail == base[len(base) - len(difference.tail) :]:
        return b""
    payload = pack(difference, len(base))
    return payload if len(payload) < len(base) else None


def unpack(payload: Buffer, base: Buffer, *, width: int) -> Difference:
    """Decode a payload against `base` [n], in elements of `width` bytes. Raises `DeltaError`.

    A hostile payload makes it allocate at most 2 n bytes, since sizes are bounded before anything is decompressed.
    """
    if not payload:
        nothing = np.empty(0, np.intp), np.empty(0, _DTYPES[width])
        return Difference(*nothing, bytes(base[len(base) - len(base) % width :]))
    num_changed = _read_header(payload, num_bytes=len(base), width=width)
    sizes = [num_changed] * _GAP_WIDTH + [-(-num_changed // 8)] + [num_changed] * width
    planes, tail = _read_planes(memoryview(payload)[_HEADER.size :], sizes)
    if len(tail) != len(base) % width:
        raise DeltaError(f"damaged delta: {len(tail)} bytes after its planes, {len(base) % width} expected")
    places = _join(planes[:_GAP_WIDTH], np.dtype(np.intp))
    places[1:] += 1
    np.cumsum(places, out=places)
    if num_changed and places[-1] >= len(base) // width:
        raise DeltaError(
            f"damaged delta: it changes element {places[-1]}, but the chunk has {len(base) // width} elements"
        )
    steps = _join(planes[_GAP_WIDTH + 1 :], _DTYPES[width])
    steps += 1
    falling = np.unpackbits(np.frombuffer(planes[_GAP_WIDTH], np.uint8), count=num_changed).astype(steps.dtype)
    steps ^= -falling  # with the next line: negate the steps that fell
    steps += falling
    return Difference(places, steps, bytes(tail))


def apply(payload: Buffer, out: memoryview, *, width: int) -> None:
    """Turn `out` [n], which holds the base, into the new chunk; only changed elements are read and written.

    Raises `DeltaError` before it writes anything. A damaged payload may still decode: check the result.
    """
    difference = unpack(payload, out, width=width)
    elements(out, width)[difference.places] += difference.steps
    out[len(out) - len(difference.tail) :] = difference.tail


def elements(data: Buffer, width: int) -> Elements:
    """[n // width] view of bytes as unsigned integers."""
    return np.frombuffer(data, _DTYPES[width], len(data) // width)


def _planes(values: npt.NDArray[np.generic]) -> list[bytes]:
    """Split [k] integers into planes: the k lowest bytes first, the k highest bytes last."""
    return [plane.tobytes() for plane in values.view(np.uint8).reshape(-1, values.itemsize).T]


def _join(planes: list[bytes], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Join planes again: [k] integers of `dtype`. Most high planes are zero, and cost one look."""
    lowest, *higher = (np.frombuffer(plane, np.uint8) for plane in planes)
    joined = lowest.astype(dtype)
    for place, plane in enumerate(higher, 1):
        if plane.any():
            joined |= plane.astype(dtype) << dtype.type(8 * place)
    return joined


def _read_header(payload: Buffer, *, num_bytes: int, width: int) -> int:
    """Return the number of changes. Raises `DeltaError` if it cannot fit `num_bytes`, or for another width."""
    if len(payload) < _HEADER.size:
        raise DeltaError(f"damaged delta: {len(payload)} bytes, less than a header of {_HEADER.size}")
    form, its_width, size, num_changed = _HEADER.unpack_from(payload)
    if form != _FORMAT or its_width != width:
        raise DeltaError(f"unknown delta format {form} with elements of {its_width} bytes, not {width}")
    if size != num_bytes:
        raise DeltaError(f"damaged delta: made for {size} bytes, the base has {num_bytes}")
    if num_changed > size // width // MIN_SPACING:
        raise DeltaError(f"damaged delta: {num_changed} changes in {size // width} elements are too many")
    return int(num_changed)


def _read_planes(left: memoryview, sizes: Sequence[int]) -> tuple[list[bytes], memoryview]:
    """Decompress planes of `sizes` bytes from `left`; return them and the rest. Raises `DeltaError`.

    Checks the size in each frame's header before any memory is taken for the frame.
    """
    planes = []
    for size in sizes:
        if len(left) < _LENGTH.size or len(left) - _LENGTH.size < (length := _LENGTH.unpack_from(left)[0]):
            raise DeltaError(f"damaged delta: a plane is cut off after {len(left)} bytes")
        frame, left = left[_LENGTH.size : _LENGTH.size + length], left[_LENGTH.size + length :]
        try:
            promised = zstandard.frame_content_size(frame)
            if promised != size:
                raise DeltaError(f"damaged delta: a plane has {promised} bytes, the header says {size}")
            planes.append(_zstd.decompressor.decompress(frame, allow_extra_data=False))
        except zstandard.ZstdError as error:
            raise DeltaError(f"damaged delta: a plane is no zstd frame: {error}") from error
    return planes, left
