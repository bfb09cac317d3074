"""Difference of a chunk of a new weight version to the same bytes of a base version that a node holds.

Owns the format: the publisher's node encodes a chunk once, every node forwards the payload as it is and applies
it to its own base. Pure: bytes in, bytes out. Invariant: `apply(encode(new, base), base)` is `new` bit for bit,
whatever the bytes mean. The work is done by numpy and zstd, without the interpreter's lock, so threads help.

A payload is empty if nothing changed, else a header and what it measures. All but the tail are zstd frames:

    gaps        [num_changed] u8: unchanged elements before each changed one; `_FAR` or more are `_FAR` here
    far         [num_far] u32 as byte planes: what such a gap has beyond `_FAR`
    falls       [ceil(num_changed / 8)] a bit for each changed element: whether it went down
    magnitudes  width planes of [num_changed] u8: by how much it went, minus one; low bytes first
    tail        the last n % width bytes, as they are

Elements count as integers: one step of the optimizer moves a float by one unit in the last place or by few, so
almost all magnitudes are zero. A sign or an exponent that changes is a large number and as lossless.
"""

import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

Buffer: TypeAlias = bytes | bytearray | memoryview  # contiguous
Bytes: TypeAlias = npt.NDArray[np.uint8]
Elements: TypeAlias = npt.NDArray[np.uint16 | np.uint32]
Positions: TypeAlias = npt.NDArray[np.intp]

_FORMAT = 1
_FAR = 255
_FAR_WIDTH = 4  # bytes of a gap beyond _FAR
_MIN_SPACING = 5  # elements per changed one; denser changes take longer to encode than they save on the wire
_BLOCK_BYTES = 2**18  # of new and of base at a time: what was just compared or copied is still in the cache
_DTYPES: dict[int, np.dtype[np.uint16 | np.uint32]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_HEADER = struct.Struct("<BB3I7I")  # format, width, n, num_changed, num_far, bytes of each section


class DeltaError(ValueError):
    """A payload that does not decode; the message says why."""


class _Zstd(threading.local):
    """Contexts of this thread: neither may be shared, and to make them anew costs a twentieth of a chunk."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(level=1)
        self.decompressor = zstandard.ZstdDecompressor()


_zstd = _Zstd()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """The fixed part of a payload, e.g. of a chunk of bf16:

    `_Header(width=2, num_bytes=4194304, num_changed=26215, num_far=1176, frame_bytes=(24011, 1090, 3287, 26, 9))`.
    """

    width: int  # bytes an element
    num_bytes: int  # of the chunk
    num_changed: int  # elements
    num_far: int
    frame_bytes: tuple[int, ...]  # compressed size of each section

    @property
    def num_elements(self) -> int:
        return self.num_bytes // self.width

    @property
    def tail_bytes(self) -> int:
        return self.num_bytes % self.width

    @property
    def payload_bytes(self) -> int:
        return _HEADER.size + sum(self.frame_bytes) + self.tail_bytes

    @property
    def section_bytes(self) -> tuple[int, ...]:
        """Decompressed size of each section."""
        falls = -(-self.num_changed // 8)
        return (self.num_changed, _FAR_WIDTH * self.num_far, falls, *[self.num_changed] * self.width)

    def pack(self) -> bytes:
        frames = (*self.frame_bytes, 0, 0)[:7]  # elements of two bytes have two planes less
        return _HEADER.pack(_FORMAT, self.width, self.num_bytes, self.num_changed, self.num_far, *frames)


def encode(new: Buffer, base: Buffer, *, width: int) -> bytes | None:
    """The payload that turns `base` [n] into `new` [n], elements of `width` 2 or 4 bytes; n below 4 GiB.

    Empty if nothing changed. None if more than one element in five changed or `new` itself is smaller.
    """
    assert len(new) == len(base) < 2**32, f"{len(new)} new bytes against {len(base)} of the base"
    compared = _compare(_elements(new, width), _elements(base, width))
    if compared is None:
        return None
    positions, steps = compared
    tail = bytes(new[len(new) - len(new) % width :])
    if not len(positions) and tail == base[len(base) - len(tail) :]:
        return b""
    gaps, far = _gaps(positions)
    sections = (gaps.tobytes(), far.view(np.uint8).reshape(-1, _FAR_WIDTH).T.tobytes(), *_values(steps, width))
    frames = [_zstd.compressor.compress(section) for section in sections]
    header = _Header(
        width=width,
        num_bytes=len(new),
        num_changed=len(positions),
        num_far=len(far),
        frame_bytes=tuple(map(len, frames)),
    )
    return b"".join((header.pack(), *frames, tail)) if header.payload_bytes < len(new) else None


def apply(payload: Buffer, base: Buffer, out: memoryview) -> None:
    """Write to `out` [n] what `payload` makes of `base` [n]; the two may be the same memory, which saves the copy.

    Raises `DeltaError`, and has then written nothing. A hostile payload makes it allocate 2 n at most: sizes are
    bounded before anything is decompressed. A damaged payload may still decode: check the result.
    """
    assert len(out) == len(base), f"{len(out)} bytes for a base of {len(base)}"
    if not payload:
        out[:] = base
        return
    header = _read_header(payload, num_bytes=len(base))
    gaps, far, falls, *planes = _decompress(payload, header)
    positions = _positions(gaps, far, header)
    steps = _steps(falls, planes, header)
    _patch(_elements(out, header.width), _elements(base, header.width), positions, steps)
    out[len(out) - header.tail_bytes :] = memoryview(payload)[len(payload) - header.tail_bytes :]


def _elements(data: Buffer, width: int) -> Elements:
    """[n // width] unsigned integers, a view."""
    return np.frombuffer(data, _DTYPES[width], len(data) // width)


def _compare(new: Elements, base: Elements) -> tuple[npt.NDArray[np.uint32], Elements] | None:
    """[num_changed] ascending positions and what was added there; None as soon as they are too many."""
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


def _gaps(positions: npt.NDArray[np.uint32]) -> tuple[Bytes, npt.NDArray[np.uint32]]:
    """[num_changed] gaps before ascending positions and [num_far] what is beyond `_FAR`."""
    gaps = positions.copy()
    gaps[1:] -= positions[:-1] + 1
    far = (gaps[np.flatnonzero(gaps >= _FAR)] - _FAR).astype("<u4")
    return np.minimum(gaps, _FAR).astype(np.uint8), far


def _positions(gaps: Bytes, far: Bytes, header: _Header) -> Positions:
    """[num_changed] ascending positions below `num_elements`. Raises `DeltaError`."""
    is_far = np.flatnonzero(gaps == _FAR)
    if len(is_far) != header.num_far:
        raise DeltaError(f"{len(is_far)} far gaps, the header says {header.num_far}")
    positions = gaps.astype(np.intp)
    positions[1:] += 1
    positions[is_far] += far.reshape(_FAR_WIDTH, -1).T.copy().view("<u4").ravel()
    np.cumsum(positions, out=positions)
    if header.num_changed and positions[-1] >= header.num_elements:
        raise DeltaError(f"a change at element {positions[-1]} of {header.num_elements}")
    return positions


def _values(steps: Elements, width: int) -> list[bytes]:
    """The falls and magnitudes sections of what was added, modulo the range of an element."""
    signed = steps.view(f"<i{width}")
    magnitudes = np.abs(signed).view(steps.dtype) - 1
    planes = [(magnitudes >> 8 * i).astype(np.uint8).tobytes() for i in range(width)]
    return [np.packbits(signed < 0).tobytes(), *planes]


def _steps(falls: Bytes, planes: Sequence[Bytes], header: _Header) -> Elements:
    """[num_changed] what to add to the base: `_values` backwards."""
    steps = planes[0].astype(_DTYPES[header.width])
    for i, plane in enumerate(planes[1:], 1):
        steps |= plane.astype(steps.dtype) << 8 * i
    steps += 1
    falling = np.unpackbits(falls, count=header.num_changed).astype(steps.dtype)
    steps ^= -falling  # with the next line: negate where it fell
    steps += falling
    return steps


def _read_header(payload: Buffer, *, num_bytes: int) -> _Header:
    """A header that fits the chunk and the payload. Raises `DeltaError`."""
    if len(payload) < _HEADER.size:
        raise DeltaError(f"{len(payload)} bytes, less than a header")
    form, width, size, num_changed, num_far, *frames = _HEADER.unpack_from(payload)
    if form != _FORMAT or width not in _DTYPES:
        raise DeltaError(f"format {form} with elements of {width} bytes is unknown")
    header = _Header(
        width=width,
        num_bytes=size,
        num_changed=num_changed,
        num_far=num_far,
        frame_bytes=tuple(frames[: 3 + width]),
    )
    if size != num_bytes:
        raise DeltaError(f"made for {size} bytes, the base has {num_bytes}")
    if header.payload_bytes != len(payload):
        raise DeltaError(f"{len(payload)} bytes, the header says {header.payload_bytes}")
    if num_changed > header.num_elements // _MIN_SPACING or num_far > num_changed:
        raise DeltaError(f"{num_changed} changes, {num_far} of them far, in {header.num_elements} elements")
    return header


def _decompress(payload: Buffer, header: _Header) -> list[Bytes]:
    """The sections. Raises `DeltaError`."""
    left = memoryview(payload)[_HEADER.size :]
    sections = []
    for frame_bytes, size in zip(header.frame_bytes, header.section_bytes, strict=True):
        sections.append(_section(left[:frame_bytes], size))
        left = left[frame_bytes:]
    return sections


def _section(frame: memoryview, size: int) -> Bytes:
    """[size] from a frame that promises so before any memory is taken for it. Raises `DeltaError`."""
    try:
        promised = zstandard.frame_content_size(frame)
        if promised != size:
            raise DeltaError(f"a section of {promised} bytes, the header says {size}")
        return np.frombuffer(_zstd.decompressor.decompress(frame, allow_extra_data=False), np.uint8)
    except zstandard.ZstdError as error:
        raise DeltaError(f"a section that is no zstd frame: {error}") from error
