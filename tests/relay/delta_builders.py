"""Chunks of weights, and payloads of which every field is free to lie."""

import struct
from dataclasses import dataclass, replace

import numpy as np
import zstandard

HEADER = struct.Struct("<BBII")
LENGTH = struct.Struct("<I")
NUM_PLANES = {2: 7, 4: 9}  # by width


def weights(n: int, *, width: int, density: float, seed: int = 0) -> tuple[bytes, bytes]:
    """[n] new and base bytes of normal floats, of which about `density` went up or down by a little."""
    rng = np.random.default_rng(seed)
    floats = rng.normal(0, 0.02, n // width + 1).astype("<f4").view("<u4")
    base = floats if width == 4 else (floats >> 16).astype("<u2")  # bf16 is the upper half
    steps = rng.choice([1, -1, 1, -1, 40, -3000], len(base)) * (rng.random(len(base)) < density)
    return (base + steps).astype(base.dtype).tobytes()[:n], base.tobytes()[:n]


@dataclass(frozen=True)
class Forgery:
    """A payload taken apart, e.g. `Forgery.of(payload).bytes() == payload`."""

    form: int
    width: int
    size: int  # bytes of the chunk
    changed: int
    frames: tuple[bytes, ...]
    tail: bytes

    @classmethod
    def of(cls, payload: bytes) -> "Forgery":
        form, width, size, changed = HEADER.unpack_from(payload)
        frames, start = [], HEADER.size
        for _ in range(NUM_PLANES[width]):
            end = start + LENGTH.size + LENGTH.unpack_from(payload, start)[0]
            frames.append(payload[start + LENGTH.size : end])
            start = end
        return cls(form, width, size, changed, tuple(frames), payload[start:])

    def bytes(self) -> bytes:
        header = HEADER.pack(self.form, self.width, self.size, self.changed)
        frames = (LENGTH.pack(len(frame)) + frame for frame in self.frames)
        return b"".join((header, *frames, self.tail))

    def with_frame(self, index: int, frame: bytes) -> "Forgery":
        return replace(self, frames=(*self.frames[:index], frame, *self.frames[index + 1 :]))

    def with_plane(self, index: int, content: bytes) -> "Forgery":
        return self.with_frame(index, zstandard.compress(content, 1))
