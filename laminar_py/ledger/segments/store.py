"""The store of a host: gives pieces of its segments to readers on others, and never writes.

Started on each host of a run that spans several (`workers.stores`); its client is `segments.fetch`, what both say
to each other is in `segments.wire`. Invariants: bytes are given to nobody without the key, and of nothing but
regular files of segments in its folder; what a request may take of memory, files, threads and time is bounded, and
so are requests at a time. A connection on which nobody has shown the key in `hello_s` is closed. A bad request is
answered with one line.

State of a request: refused | waiting for its turn -> lost | sending -> done. A client that goes away, or takes
longer than `answer_s`, ends it. Bytes go from the files to the socket without a copy in between, in a thread, past
aiohttp: by its means half of the time would be Python's.
"""

import asyncio
import errno
import hmac
import logging
import mmap
import os
import socket
import stat
import time
from asyncio import TimerHandle
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from laminar_py.ledger.segments import wire
from laminar_py.ledger.segments.wire import PieceRequest
from laminar_py.ledger.segments.writer import SEGMENT
from laminar_py.records.codec import decode
from laminar_py.records.pieces import PayloadLostError

log = logging.getLogger(__name__)

LOCAL = "127.0.0.1"
CLOSE_S = 2.0  # for answers that are under way at the end
PORT_PAUSE_S = 0.1  # between two tries for a port that is taken
_BACKLOG = 128
_AT_ONCE = 64  # buffers of one call
_GONE = (errno.ENOENT, errno.ELOOP, errno.ENXIO)  # of a file that is not there, a link, a socket

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds of a store, e.g. `StoreLimits(answers=2)`; those of one request are in `segments.wire`."""

    connections: int = 256
    answers: int = 8  # at a time; others wait
    hello_s: float = 10.0  # for a request to come in whole
    turn_s: float = 10.0  # that it waits for its turn
    answer_s: float = 120.0  # for its bytes to leave
    idle_s: float = 15.0  # that a connection may be without a request


class PieceStore:
    """Server of the segments in `folder`, e.g. `PieceStore(folder, key=secrets.token_bytes(32))`."""

    def __init__(self, folder: Path, *, key: bytes, limits: StoreLimits | None = None) -> None:
        self._folder = folder
        self._key = wire.check_key(key)
        self._limits = limits or StoreLimits()
        self._threads = ThreadPoolExecutor(self._limits.answers, thread_name_prefix="answer")
        self._turns = asyncio.Semaphore(self._limits.answers)
        self._door: _Door | None = None
        self._runner: web.ServerRunner | None = None
        self.address = ""

    async def start(self, listener: socket.socket) -> None:
        """Serve on a socket of `listen`."""
        host, port = listener.getsockname()[:2]
        self.address = wire.make_address(host, port)
        self._door = _Door(self._handle, self._limits)
        self._runner = web.ServerRunner(self._door, shutdown_timeout=CLOSE_S)
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=_BACKLOG).start()

    async def close(self) -> None:
        """Give the port back; connections end."""
        if self._runner is not None:
            await self._runner.cleanup()
        self._threads.shutdown()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer of one request, whatever it is."""
        signature = request.headers.get(wire.SIGNATURE, "")
        try:
            wanted = await self._admit(request, signature)
        except BadRequestError as error:
            answer = web.Response(status=error.status, text=error.line)
            answer.force_close()  # there may be more to come of it
            return answer
        assert self._door is not None, "requests come after the start"
        self._door.welcome(request.protocol)
        try:
            async with asyncio.timeout(self._limits.turn_s):
                await self._turns.acquire()
        except TimeoutError:
            return self._line(503, f"{self._limits.answers} answers are under way; ask again", signature)
        try:
            return await self._answer(request, wanted, signature)
        finally:
            self._turns.release()

    async def _admit(self, request: web.BaseRequest, signature: str) -> PieceRequest:
        """The pieces that a request asks for. Raises `BadRequestError`."""
        if request.path != wire.ROUTE or request.method != "POST":
            raise BadRequestError(404, f"nothing here but POST {wire.ROUTE}")
        size = request.content_length
        if size is None:
            raise BadRequestError(411, "say how long the request is")
        if size > wire.BODY_BYTES:
            raise BadRequestError(413, f"{size} bytes; a request has at most {wire.BODY_BYTES}")
        try:
            async with asyncio.timeout(self._limits.hello_s):
                body = await request.read()
        except TimeoutError:
            raise BadRequestError(408, f"not whole after {self._limits.hello_s:g} s") from None
        right = wire.request_signature(self._key, body)
        if not hmac.compare_digest(signature.encode("utf-8", "surrogateescape"), right.encode()):
            raise BadRequestError(401, f"{wire.SIGNATURE} is not of this request and the run's key")
        return check_request(body)

    async def _answer(self, request: web.BaseRequest, wanted: PieceRequest, signature: str) -> web.StreamResponse:
        try:
            pieces = map_pieces(self._folder, wanted)
        except PayloadLostError as error:
            return self._line(wire.LOST, str(error), signature)
        except OSError as error:  # too many open files, say: the pieces may well be there
            log.warning("no answer: %s", error)
            return self._line(503, f"{error.strerror}; ask again", signature)
        answer = web.StreamResponse(headers=self._signed(signature, 200))
        answer.content_length = wanted.num_bytes
        await answer.prepare(request)
        await answer.write(b"")  # the head, which is all that leaves by way of aiohttp
        transport = request.transport
        if transport is None or transport.get_write_buffer_size():  # gone, or asks and does not read
            raise ConnectionResetError("the client takes no answer")
        await self._send(pieces, transport)
        return answer

    async def _send(self, pieces: list[memoryview], transport: asyncio.Transport) -> None:
        """Send bytes in a thread, which waits for the disk and the client."""
        connection = transport.get_extra_info("socket").dup()
        sending = self._threads.submit(send_all, connection, pieces, time.monotonic() + self._limits.answer_s)
        sending.add_done_callback(lambda _: connection.close())
        try:
            await asyncio.wrap_future(sending)
        except asyncio.CancelledError:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)  # or the thread would go on
            raise
        except OSError as error:
            log.warning("an answer ended before its end: %s", error)
            transport.abort()

    def _line(self, status: int, line: str, signature: str) -> web.Response:
        text = line[: wire.LINE_BYTES].encode()
        return web.Response(
            status=status,
            body=text,
            headers=self._signed(signature, status, text),
            content_type="text/plain",
            charset="utf-8",
        )

    def _signed(self, signature: str, status: int, line: bytes = b"") -> dict[str, str]:
        return {wire.SIGNATURE: wire.answer_signature(self._key, signature, status, line)}


async def listen(host: str = LOCAL, port: int = 0, *, patience_s: float = 0.0) -> socket.socket:
    """A socket for a store; port 0: any. A port that is taken is waited for.

    Raises `OSError`, of number EADDRINUSE where the port is still taken then.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    while True:
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or loop.time() >= deadline:
                raise
        await asyncio.sleep(PORT_PAUSE_S)  # nobody tells when a port is free


def check_request(body: bytes) -> PieceRequest:
    """Pieces that a body asks for. Raises `BadRequestError`."""
    try:
        wanted = decode(PieceRequest, body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(400, f"no request: {error}") from None
    if max([piece.segment for piece in wanted.pieces]) >= len(wanted.segments):
        raise BadRequestError(400, "no request: a piece is of a segment that is not named")
    if wanted.num_bytes > wire.ANSWER_BYTES and len(wanted.pieces) > 1:
        raise BadRequestError(413, f"{wanted.num_bytes} bytes; several pieces have at most {wire.ANSWER_BYTES}")
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
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the client is too slow")
            connection.settimeout(left_s)
            sent = connection.sendmsg(rest)
            while rest and sent >= len(rest[0]):
                sent -= len(rest.popleft())
            if sent:
                rest[0] = rest[0][sent:]


class BadRequestError(Exception):
    """A request that is answered with one line."""

    def __init__(self, status: int, line: str) -> None:
        super().__init__(line)
        self.status, self.line = status, line


class _Door(web.Server):
    """Server that counts connections, and closes those on which nobody shows the key."""

    def __init__(self, handle: Handler, limits: StoreLimits) -> None:
        super().__init__(handle, access_log=None, keepalive_timeout=limits.idle_s)
        self._limits = limits
        self._guests: dict[RequestHandler, TimerHandle] = {}

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        """Let a connection in, unless there are too many."""
        super().connection_made(handler, transport)
        wait_s = self._limits.hello_s if len(self._guests) < self._limits.connections else 0.0
        self._guests[handler] = asyncio.get_running_loop().call_later(wait_s, transport.abort)

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        """Forget a connection."""
        if (timer := self._guests.pop(handler, None)) is not None:
            timer.cancel()
        super().connection_lost(handler, exc)

    def welcome(self, handler: RequestHandler) -> None:
        """Let a connection stay, which has shown the key."""
        if handler in self._guests:
            self._guests[handler].cancel()
