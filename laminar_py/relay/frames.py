"""The frames of a lane, which carry chunks: a header and a body, sealed with AES-256-GCM.

A key serves one lane, one direction and one connection. The nonce is the number of the frame and does not travel,
so a frame opens once and in its place only. A body is bound to its header, which names the chunk. `LaneReader`
opens headers; `StoredVersion` opens bodies, into the pages of the version where these are mapped.
"""

import socket
import struct
from collections.abc import Callable

import msgspec
import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from laminar_py.records import codec
from laminar_py.relay.messages import NO_DATA, Chunk
from laminar_py.relay.sockets import read_record

TAG_BYTES = 16
HEADER_BYTES = 512  # the two lengths, the `Chunk` without its data as a record, and zeros
LENGTHS = struct.Struct("!II")  # bytes of the record, and of the body without its tag


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


class LaneWriter:
    """Sends chunks on a connected lane."""

    def __init__(self, connection: socket.socket, seal: Sealer) -> None:
        self._connection = connection
        self._seal = seal
        self._buffer = ChunkBuffer()

    def send(self, chunk: Chunk) -> None:
        """Send a chunk; wait until the kernel has it. Raises `OSError` if the lane is broken."""
        size = len(chunk.data)
        record = codec.encode(msgspec.structs.replace(chunk, data=NO_DATA))
        header = (LENGTHS.pack(len(record), size) + record).ljust(HEADER_BYTES, b"\0")
        assert len(header) == HEADER_BYTES, f"the record of a chunk has {len(record)} bytes"
        if not self._seal.tag_bytes:
            self._connection.sendall(header, socket.MSG_MORE)
            self._connection.sendall(chunk.data)
            return
        head = HEADER_BYTES + TAG_BYTES
        frame = self._buffer.take(head + size + TAG_BYTES)
        self._seal.close(header, b"", frame[:head])
        self._seal.close(chunk.data, header, frame[head:])
        self._connection.sendall(frame)


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

    def finish(self) -> None:
        """Prove a frame that nobody opened. Raises `LaneError`."""
        if not self._is_open:
            self.open()


class LaneReader:
    """Receives chunks; `fill` reads from the lane until a buffer is full."""

    def __init__(self, fill: Callable[[memoryview], None], seal: Sealer, *, most_bytes: int) -> None:
        self._fill = fill
        self._seal = seal
        self._most_bytes = most_bytes
        self._frame = ChunkBuffer()
        self._opened = ChunkBuffer()  # used only by bodies that have no other place
        self._last = ChunkBody(NO_DATA)

    def receive(self) -> tuple[Chunk, ChunkBody]:
        """Wait for the next chunk; its body is good until the next call. Raises `LaneError`, `OSError`."""
        self._last.finish()
        head = self._frame.take(HEADER_BYTES + self._seal.tag_bytes)
        self._fill(head)
        header = memoryview(bytearray(HEADER_BYTES))
        self._seal.open(head, b"", header)
        record_bytes, size = LENGTHS.unpack_from(header)
        if size > self._most_bytes:
            raise LaneError(f"a chunk of {size} bytes, above the {self._most_bytes} of this node")
        chunk = read_record(Chunk, header[LENGTHS.size :][:record_bytes], "a lane")
        if chunk is None or chunk.data:
            raise LaneError("a header without the record of a chunk")
        frame = self._frame.take(size + self._seal.tag_bytes)
        self._fill(frame)
        self._last = ChunkBody(frame, self._seal, bytes(header), buffer=self._opened)
        return chunk, self._last
