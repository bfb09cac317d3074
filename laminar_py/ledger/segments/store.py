"""The store of a host serves pieces of its segments to readers on other hosts, and never writes.

Each host of a run on several hosts has one (`workers.stores`). Its client is `segments.fetch`; `segments.wire` has
the protocol. The store serves only clients with the run's key, and only regular segment files in its folder
(law 7). Memory, files, threads and time of a request are bounded, and so is the number of requests at a time. The
store closes a connection without an answer if no signed request arrives within `hello_s`.

Each connection has a thread: refused | waiting for its turn -> lost | sending -> waiting for the next request. The
thread ends when the client closes or takes longer than `answer_s`. Bytes go from file to socket without a copy.
"""

import errno
import hmac
import logging
import mmap
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

import laminar_py.ledger.segments.wire as wire
from laminar_py.ledger.segments.wire import AnswerStatus, PieceRequest
from laminar_py.ledger.segments.writer import SEGMENT
from laminar_py.records.codec import decode
from laminar_py.records.pieces import PayloadLostError

log = logging.getLogger(__name__)

LOCAL = "127.0.0.1"
ACCEPT_AGAIN_S = 0.1  # pause after a failed accept, e.g. for lack of file descriptors
_BACKLOG = 128
_AT_ONCE = 64  # buffers per call
_GONE = (errno.ENOENT, errno.ELOOP, errno.ENXIO)  # a missing file, a link, a socket


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds of a store, e.g. `StoreLimits(answers=2)`; `segments.wire` bounds a single request."""

    connections: int = 256
    answers: int = 8  # at a time; further requests wait
    hello_s: float = 10.0  # to receive a whole request
    turn_s: float = 10.0  # to wait for a free answer
    answer_s: float = 120.0  # to send the answer
    idle_s: float = 15.0  # between two requests of a connection


class BadRequestError(Exception):
    """A request is invalid or unsigned; the message says why."""


class PieceStore:
    """Serves the segments in `folder`, e.g. `PieceStore(folder, key=secrets.token_bytes(32))`."""

    def __init__(self, folder: Path, *, key: bytes, limits: StoreLimits | None = None) -> None:
        self._folder = folder
        self._key = wire.check_key(key)
        self._limits = limits or StoreLimits()
        self._turns = threading.BoundedSemaphore(self._limits.answers)
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._closed = False

    def start(self, host: str = LOCAL) -> tuple[str, int]:
        """Serve on a free port, and return host and port. Raises `OSError`."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        threading.Thread(target=self._accept, args=(self._listener,), name="accept", daemon=True).start()
        return host, self._listener.getsockname()[1]

    def close(self) -> None:
        """Close the port and all connections."""
        with self._lock:
            self._closed = True
            ending = [*self._connections, *([] if self._listener is None else [self._listener])]
        for ending_socket in ending:
            with suppress(OSError):  # it may be closed already
                ending_socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads it
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        """Serve each accepted connection in a thread of its own; close a connection above the limit."""
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("a connection was not accepted: %s", error)
                    time.sleep(ACCEPT_AGAIN_S)
                continue
            with self._lock:
                has_room = not self._closed and len(self._connections) < self._limits.connections
                if has_room:
                    self._connections.add(connection)
            if has_room:
                threading.Thread(target=self._serve, args=(connection,), name="serve", daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer requests of a connection until the client closes it or sends an invalid one."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            idle_s = self._limits.hello_s
            while (request := self._receive(connection, idle_s)) is not None:
                self._answer(connection, *request)
                idle_s = self._limits.idle_s
        except BadRequestError as error:
            log.warning("a connection is closed: %s", error)
        except OSError as error:
            log.warning("an answer was cut off: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _receive(self, connection: socket.socket, idle_s: float) -> tuple[bytes, bytes] | None:
        """Receive signature and body of the next request; None if the client sends none within `idle_s`.

        Raises `BadRequestError` for a request that is too large, incomplete, or without the run's signature.
        """
        head = memoryview(bytearray(wire.REQUEST_HEAD.size))
        connection.settimeout(idle_s)
        try:
            begun = connection.recv_into(head)
        except OSError:
            return None
        if not begun:
            return None
        deadline = time.monotonic() + self._limits.hello_s
        try:
            _fill(connection, head[begun:], deadline)
            signature, size = wire.REQUEST_HEAD.unpack(head)
            if size > wire.BODY_BYTES:
                raise BadRequestError(f"{size} bytes; a request has at most {wire.BODY_BYTES}")
            body = bytearray(size)
            _fill(connection, memoryview(body), deadline)
        except OSError as error:
            raise BadRequestError(f"an incomplete request: {error}") from None
        if not hmac.compare_digest(signature, wire.request_signature(self._key, bytes(body))):
            raise BadRequestError("a request without the signature of the run's key")
        return signature, bytes(body)

    def _answer(self, connection: socket.socket, signature: bytes, body: bytes) -> None:
        """Send the requested pieces, or a line that says why not. Raises `OSError`."""
        deadline = time.monotonic() + self._limits.turn_s + self._limits.answer_s
        if not self._turns.acquire(timeout=self._limits.turn_s):
            line = f"{self._limits.answers} answers are being sent; try again"
            self._send(connection, signature, AnswerStatus.REFUSED, line, deadline)
            return
        deadline = time.monotonic() + self._limits.answer_s
        try:
            wanted = check_request(body)
            pieces = map_pieces(self._folder, wanted)
        except PayloadLostError as error:
            self._send(connection, signature, AnswerStatus.LOST, str(error), deadline)
        except BadRequestError as error:
            self._send(connection, signature, AnswerStatus.REFUSED, str(error), deadline)
        except OSError as error:  # e.g. too many open files; the pieces may exist
            log.warning("a request failed: %s", error)
            self._send(connection, signature, AnswerStatus.REFUSED, f"{error.strerror}; try again", deadline)
        else:
            send_all(connection, [self._head(signature, AnswerStatus.PIECES, wanted.num_bytes), *pieces], deadline)
        finally:
            self._turns.release()

    def _send(
        self, connection: socket.socket, signature: bytes, status: AnswerStatus, text: str, deadline: float
    ) -> None:
        line = text.encode()[: wire.LINE_BYTES]
        send_all(connection, [self._head(signature, status, len(line), line), memoryview(line)], deadline)

    def _head(self, signature: bytes, status: AnswerStatus, size: int, line: bytes = b"") -> memoryview:
        signed = wire.answer_signature(self._key, signature, status, size, line)
        return memoryview(wire.ANSWER_HEAD.pack(signed, status, size))


def check_request(body: bytes) -> PieceRequest:
    """Decode and check a request. Raises `BadRequestError`."""
    try:
        wanted = decode(PieceRequest, body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"not a request: {error}") from None
    if max([piece.segment for piece in wanted.pieces]) >= len(wanted.segments):
        raise BadRequestError("not a request: a piece names a missing segment")
    if wanted.num_bytes > wire.ANSWER_BYTES and len(wanted.pieces) > 1:
        raise BadRequestError(
            f"{wanted.num_bytes} bytes; a request for several pieces has at most {wire.ANSWER_BYTES}"
        )
    return wanted


def map_pieces(folder: Path, wanted: PieceRequest) -> list[memoryview]:
    """Map the requested pieces into memory; a mapping outlives the deletion of its file.

    Only system calls may touch the memory. If a file has become shorter, a system call fails with EFAULT, while a
    direct read kills the process. Raises `PayloadLostError` if a piece does not exist, and `OSError` if a file
    cannot be opened for another reason.
    """
    files = [_map(folder, segment) for segment in wanted.segments]
    pieces = []
    for piece in wanted.pieces:
        end = piece.offset + piece.num_bytes
        if end > len(files[piece.segment]):
            raise PayloadLostError(f"{wanted.segments[piece.segment]}: ends before byte {end}")
        pieces.append(files[piece.segment][piece.offset : end])
    return pieces


def _map(folder: Path, segment: str) -> memoryview:
    """Map a segment into memory, read-only.

    Raises `PayloadLostError` if it does not exist or is no regular file, and `OSError` if it cannot be opened. The
    flags refuse a link, and do not block on a pipe, that somebody puts in the segment's place.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(folder / f"{segment}{SEGMENT}", flags)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        raise PayloadLostError(f"{segment}: {error.strerror}") from None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise PayloadLostError(f"{segment}: not a regular file")
        return memoryview(mmap.mmap(file, status.st_size, prot=mmap.PROT_READ) if status.st_size else b"")
    finally:
        os.close(file)


def send_all(connection: socket.socket, pieces: Sequence[memoryview], deadline: float) -> None:
    """Send buffers in order until `deadline`, on the monotonic clock. Raises `OSError`."""
    for first in range(0, len(pieces), _AT_ONCE):
        rest = deque(pieces[first : first + _AT_ONCE])
        while rest:
            _set_deadline(connection, deadline)
            sent = connection.sendmsg(rest)
            while rest and sent >= len(rest[0]):
                sent -= len(rest.popleft())
            if sent:
                rest[0] = rest[0][sent:]


def _fill(connection: socket.socket, buffer: memoryview, deadline: float) -> None:
    """Fill a buffer until `deadline`. Raises `OSError`."""
    while buffer:
        _set_deadline(connection, deadline)
        received = connection.recv_into(buffer)
        if not received:
            raise ConnectionError("the client closed the connection")
        buffer = buffer[received:]


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the client is too slow")
    connection.settimeout(left_s)
