"""Sealed frames, in which chunks cross a lane: a header and a body each, by AES-256-GCM.

A key serves one lane, one direction and one connection. The nonce is the number of the frame and does not travel,
so a frame opens once and in its place only. A body is bound to its header, which names the chunk. `StoredVersion`
opens the bodies of full chunks, into the pages of the version where these are mapped.
"""

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

TAG_BYTES = 16


class LaneError(Exception):
    """A lane carried bytes that its parent did not send at this place."""


class Sealer:
    """One key of a lane, for one direction; both ends count frames. `sealed=False` leaves bytes as they are."""

    def __init__(self, key: bytes, *, sealed: bool = True) -> None:
        self._cipher = AESGCM(key) if sealed else None
        self._count = 0

    @property
    def tag_bytes(self) -> int:
        """Bytes by which a frame is longer than its data."""
        return 0 if self._cipher is None else TAG_BYTES

    def close(self, data: bytes | memoryview, bound: bytes, frame: memoryview) -> None:
        """Encrypt `data` into `frame`, [len(data) + tag_bytes], bound to its place and to the bytes `bound`."""
        if self._cipher is None:
            frame[:] = data
        else:
            self._cipher.encrypt_into(self._next_nonce(), data, bound, frame)

    def open(self, frame: memoryview, bound: bytes, data: memoryview) -> None:
        """Decrypt `frame` into `data`, [len(frame) - tag_bytes]. Raises `LaneError` if it belongs elsewhere."""
        if self._cipher is None:
            np.copyto(
                np.frombuffer(data, np.uint8), np.frombuffer(frame, np.uint8)
            )  # without the interpreter's lock
            return
        try:
            self._cipher.decrypt_into(self._next_nonce(), frame, bound, data)
        except InvalidTag:
            raise LaneError("a frame does not open: it was changed, repeated or moved") from None

    def _next_nonce(self) -> bytes:
        self._count += 1
        return self._count.to_bytes(12, "big")


UNSEALED = Sealer(b"", sealed=False)


class ChunkBuffer:
    """Memory that a lane uses for one chunk after the other."""

    def __init__(self) -> None:
        self._bytes = memoryview(bytearray())

    def take(self, size: int) -> memoryview:
        """[size] writable bytes; they replace the bytes taken before."""
        if size > len(self._bytes):
            self._bytes = memoryview(bytearray(size))
        return self._bytes[:size]


class ChunkBody:
    """The bytes of a chunk that came on a lane, still sealed: open them once, before the lane's next frame.

    `buffer` is memory for `open`. `ChunkBody(chunk.data)` has bytes that are open already.
    """

    def __init__(
        self,
        frame: memoryview,
        seal: Sealer = UNSEALED,
        bound: bytes = b"",
        *,
        buffer: ChunkBuffer | None = None,
    ) -> None:
        self.size = len(frame) - seal.tag_bytes
        self._frame = frame
        self._seal = seal
        self._bound = bound
        self._buffer = buffer or ChunkBuffer()
        self._is_open = False

    def open(self) -> memoryview:
        """[size] the bytes, which the lane's next frame may replace. Raises `LaneError`."""
        if not self._seal.tag_bytes:
            return self._frame
        data = self._buffer.take(self.size)
        self.open_into(data)
        return data

    def open_into(self, target: memoryview) -> None:
        """Write the bytes into `target`, [size]. Raises `LaneError`; other bytes may then lie there."""
        assert not self._is_open, "a frame opens once"
        self._is_open = True
        self._seal.open(self._frame, self._bound, target)

    def prove_unopened(self) -> None:
        """Prove a frame that nobody opened. Raises `LaneError`."""
        if not self._is_open:
            self.open()
