"""The store of a host: gives pieces of its segments to readers on others, and never writes.

Started on each host of a run that spans several (`workers.stores`); its client is `segments.fetch`, what both say
to each other is in `segments.wire`. Invariants: bytes are given to nobody without the key, and of nothing but
regular files of segments in its folder; what a request may take of memory, files, threads and time is bounded, and
so are requests at a time. A connection on which nobody has shown the key in `hello_s` is closed without a word,
and so is one on which anything but a signed request comes.

Each connection has a thread: refused | waiting for its turn -> lost | sending -> waiting for the next request. A
client that goes away, or takes longer than `answer_s`, ends it. Bytes go from the files to the socket without a
copy in between.
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

from laminar_py.ledger.segments import wire
from laminar_py.ledger.segments.wire import AnswerStatus, PieceRequest
from laminar_py.ledger.segments.writer import SEGMENT
from laminar_py.records.codec import decode
from laminar_py.records.pieces import PayloadLostError

log = logging.getLogger(__name__)

LOCAL = "127.0.0.1"
ACCEPT_AGAIN_S = 0.1  # after a connection that could not be taken, for want of files, say
_BACKLOG = 128
_AT_ONCE = 64  # buffers of one call
_GONE = (errno.ENOENT, errno.ELOOP, errno.ENXIO)  # of a file that is not there, a link, a socket


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds of a store, e.g. `StoreLimits(answers=2)`; those of one request are in `segments.wire`."""

    connections: int = 256
    answers: int = 8  # at a time; others wait
    hello_s: float = 10.0  # for a request to come in whole
    turn_s: float = 10.0  # that it waits for its turn
    answer_s: float = 120.0  # for its bytes to leave
    idle_s: float = 15.0  # that a connection may be without a request


class BadRequestError(Exception):
    """A request that is not answered with pieces; the message says why."""


class PieceStore:
    """Server of the segments in `folder`, e.g. `PieceStore(folder, key=secrets.token_bytes(32))`."""

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
        """Serve on a free port; host and port. Raises `OSError`."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        threading.Thread(target=self._accept, args=(self._listener,), name="accept", daemon=True).start()
        return host, self._listener.getsockname()[1]

    def close(self) -> None:
        """Give the port back; connections end."""
        with self._lock:
            self._closed = True
            ending = [*self._connections, *([] if self._listener is None else [self._listener])]
        for one in ending:
            with suppress(OSError):  # it has ended by itself
                one.shutdown(socket.SHUT_RDWR)  # which wakes the thread that waits for it
        if self._listener is not None:
            self._listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if not self._closed:
                    log.warning("no connection taken: %s", error)
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
        """Answer one request after the other, until the client goes, or is none."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            idle_s = self._limits.hello_s
            while (request := self._receive(connection, idle_s)) is not None:
                self._answer(connection, *request)
                idle_s = self._limits.idle_s
        except BadRequestError as error:
            log.warning("a connection is closed: %s", error)
        except OSError as error:
            log.warning("an answer ended before its end: %s", error)
        finally:
            with self._lock:
                self._connections.discard(connection)
            connection.close()

    def _receive(self, connection: socket.socket, idle_s: float) -> tuple[bytes, bytes] | None:
        """Signature and body of the next request of somebody who has the key; None where none comes.

        Raises `BadRequestError`, and `OSError` where it does not come in whole.
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
            raise BadRequestError(f"no whole request: {error}") from None
        if not hmac.compare_digest(signature, wire.request_signature(self._key, bytes(body))):
            raise BadRequestError("a request that is not signed with the run's key")
        return signature, bytes(body)

    def _answer(self, connection: socket.socket, signature: bytes, body: bytes) -> None:
        """Send pieces, or a line. Raises `OSError`."""
        deadline = time.monotonic() + self._limits.turn_s + self._limits.answer_s
        if not self._turns.acquire(timeout=self._limits.turn_s):
            line = f"{self._limits.answers} answers are under way; ask again"
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
        except OSError as error:  # too many open files, say: the pieces may well be there
            log.warning("no answer: %s", error)
            self._send(connection, signature, AnswerStatus.REFUSED, f"{error.strerror}; ask again", deadline)
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
    """Pieces that a body asks for. Raises `BadRequestError`."""
    try:
        wanted = decode(PieceRequest, body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(f"no request: {error}") from None
    if max([piece.segment for piece in wanted.pieces]) >= len(wanted.segments):
        raise BadRequestError("no request: a piece is of a segment that is not named")
    if wanted.num_bytes > wire.ANSWER_BYTES and len(wanted.pieces) > 1:
        raise BadRequestError(f"{wanted.num_bytes} bytes; several pieces have at most {wire.ANSWER_BYTES}")
    return wanted


def map_pieces(folder: Path, wanted: PieceRequest) -> list[memoryview]:
    """Pieces as the files have them, in memory that is the kernel's; they stay there also if files are deleted.

    None of it may be touched but by system calls, which say EFAULT where a file has become shorter: a process that
    reads there itself is killed. Raises `PayloadLostError` where a piece is not there, and `OSError` that says
    nothing of the pieces.
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
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(folder / f"{segment}{SEGMENT}", flags)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        raise PayloadLostError(f"{segment}: {error.strerror}") from None
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise PayloadLostError(f"{segment}: no regular file")
        return memoryview(mmap.mmap(file, found.st_size, prot=mmap.PROT_READ) if found.st_size else b"")
    finally:
        os.close(file)


def send_all(connection: socket.socket, pieces: Sequence[memoryview], deadline: float) -> None:
    """Send buffers one after the other until `deadline`, on the monotonic clock. Raises `OSError`."""
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
    """Receive all of a buffer until `deadline`. Raises `OSError`."""
    while buffer:
        _set_deadline(connection, deadline)
        received = connection.recv_into(buffer)
        if not received:
            raise ConnectionError("the client has gone")
        buffer = buffer[received:]


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the client is too slow")
    connection.settimeout(left_s)
