"""Deltas: the difference between a chunk in a new version and the same bytes in a base version.

The root encodes each chunk once; every node passes the payload on unchanged and applies it to its own base. Pure:
bytes in, bytes out. `apply(encode(new, base), base)` is `new` bit for bit, whatever the bytes mean
(`tests/relay/test_delta.py::test_a_chunk_comes_back_bit_for_bit`). numpy and zstd do the work without the
interpreter's lock, so threads help.

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
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

Buffer: TypeAlias = bytes | bytearray | memoryview  # contiguous
Elements: TypeAlias = npt.NDArray[np.uint16 | np.uint32]
Positions: TypeAlias = npt.NDArray[np.intp]

_FORMAT = 2
_GAP_WIDTH = 4  # bytes of a gap
_MIN_SPACING = 5  # elements per changed one; denser changes take longer to encode than they save when sent
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


def encode(new: Buffer, base: Buffer, *, width: int) -> bytes | None:
    """Encode the payload that turns `base` into `new`, both [n] bytes, in elements of `width` 2 or 4 bytes.

    Returns `b""` if nothing changed; None if more than one element in five changed, or the payload saves nothing.
    """
    assert len(new) == len(base) < 2**32, f"{len(new)} new bytes against {len(base)} of the base"
    compared = _compare(_elements(new, width), _elements(base, width))
    if compared is None:
        return None
    positions, steps = compared
    tail = bytes(new[len(new) - len(new) % width :])
    if not len(positions) and tail == base[len(base) - len(tail) :]:
        return b""
    positions[1:] -= positions[:-1] + 1  # gaps from here on
    signed = steps.view(f"<i{width}")
    falls = np.packbits(signed < 0).tobytes()
    parts = [_HEADER.pack(_FORMAT, width, len(new), len(positions))]
    for plane in (*_planes(positions), falls, *_planes(np.abs(signed).view(steps.dtype) - 1)):
        frame = _zstd.compressor.compress(plane)
        parts += (_LENGTH.pack(len(frame)), frame)
    payload = b"".join((*parts, tail))
    return payload if len(payload) < len(new) else None


def apply(payload: Buffer, base: Buffer, out: memoryview) -> None:
    """Apply `payload` to `base` [n] and write the result to `out` [n], which may be the memory of `base`.

    Raises `DeltaError` before it writes anything. A hostile payload makes it allocate at most 2 n bytes, since
    sizes are bounded before anything is decompressed. A damaged payload may still decode: check the result.
    """
    assert len(out) == len(base), f"{len(out)} bytes for a base of {len(base)}"
    if not payload:
        out[:] = base
        return
    width, num_changed = _read_header(payload, num_bytes=len(base))
    sizes = [num_changed] * _GAP_WIDTH + [-(-num_changed // 8)] + [num_changed] * width
    planes, tail = _read_planes(memoryview(payload)[_HEADER.size :], sizes)
    if len(tail) != len(base) % width:
        raise DeltaError(f"damaged delta: {len(tail)} bytes after its planes, {len(base) % width} expected")
    positions = _join(planes[:_GAP_WIDTH]).view("<u4").astype(np.intp)
    positions[1:] += 1
    np.cumsum(positions, out=positions)
    if num_changed and positions[-1] >= len(base) // width:
        raise DeltaError(
            f"damaged delta: it changes element {positions[-1]}, but the chunk has {len(base) // width} elements"
        )
    steps = _join(planes[_GAP_WIDTH + 1 :]).view(_DTYPES[width]) + _DTYPES[width].type(1)
    falling = np.unpackbits(np.frombuffer(planes[_GAP_WIDTH], np.uint8), count=num_changed).astype(steps.dtype)
    steps ^= -falling  # with the next line: negate the steps that fell
    steps += falling
    _patch(_elements(out, width), _elements(base, width), positions, steps)
    out[len(out) - len(tail) :] = tail


def _elements(data: Buffer, width: int) -> Elements:
    """[n // width] view of bytes as unsigned integers."""
    return np.frombuffer(data, _DTYPES[width], len(data) // width)


def _compare(new: Elements, base: Elements) -> tuple[npt.NDArray[np.uint32], Elements] | None:
    """Return [num_changed] ascending positions that differ and their differences; None for too many changes."""
    block = _BLOCK_BYTES // new.itemsize
    mask = np.empty(min(block, len(new)), np.bool_)
    positions, steps = [np.empty(0, np.uint32)], [np.empty(0, new.dtype)]
    left = len(new) // _MIN_SPACING
    for start in range(0, len(new), block):
        some, others = new[start : start + block], base[start : start + block]
        changed = np.flatnonzero(np.not_equal(some, others, out=mask[: len(some)]))
        left -= len(changed)
        if left < 0:
            return None
        steps.append(some[changed] - others[changed])
        positions.append((changed + start).astype(np.uint32))
    return np.concatenate(positions), np.concatenate(steps)


def _patch(out: Elements, base: Elements, positions: Positions, steps: Elements) -> None:
    """Copy `base` to `out` and add `steps` at ascending `positions`."""
    block = _BLOCK_BYTES // out.itemsize
    starts = range(0, len(out), block)
    cuts = np.searchsorted(positions, [*starts, len(out)])
    for start, first, last in zip(starts, cuts[:-1], cuts[1:], strict=True):
        np.copyto(out[start : start + block], base[start : start + block])
        out[positions[first:last]] += steps[first:last]


def _planes(values: npt.NDArray[np.generic]) -> list[bytes]:
    """Split [k] integers into planes: the k lowest bytes first, the k highest bytes last."""
    return [plane.tobytes() for plane in values.view(np.uint8).reshape(-1, values.itemsize).T]


def _join(planes: list[bytes]) -> npt.NDArray[np.uint8]:
    """Join planes again: [k * number of planes] bytes of k integers."""
    joined = np.empty((len(planes[0]), len(planes)), np.uint8)
    for place, plane in enumerate(planes):
        joined[:, place] = np.frombuffer(plane, np.uint8)
    return joined.reshape(-1)


def _read_header(payload: Buffer, *, num_bytes: int) -> tuple[int, int]:
    """Return width and number of changes. Raises `DeltaError` if they cannot fit a chunk of `num_bytes`."""
    if len(payload) < _HEADER.size:
        raise DeltaError(f"damaged delta: {len(payload)} bytes, less than a header of {_HEADER.size}")
    form, width, size, num_changed = _HEADER.unpack_from(payload)
    if form != _FORMAT or width not in _DTYPES:
        raise DeltaError(f"unknown delta format {form} with elements of {width} bytes")
    if size != num_bytes:
        raise DeltaError(f"damaged delta: made for {size} bytes, the base has {num_bytes}")
    if num_changed > size // width // _MIN_SPACING:
        raise DeltaError(f"damaged delta: {num_changed} changes in {size // width} elements are too many")
    return width, num_changed


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
