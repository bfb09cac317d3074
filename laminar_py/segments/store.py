"""The store of a host: gives pieces of its segments to readers on others, and never writes.

Started on each host of a run that spans several (`workers.stores`); its client is `segments.fetch`, what both say
to each other is in `segments.wire`. Invariants: bytes are given to nobody without the key, and of nothing but
regular files of segments in its folder; what a request may take of memory, files, threads and time is bounded, and
so are requests at a time. A connection on which nobody has shown the key in `hello_s` is closed. A bad request is
answered with one line.

State of a request: refused | waiting for its turn -> lost | sending -> done; a client that goes away, or is
slower than `answer_s`, ends it.
"""

import asyncio
import errno
import hmac
import logging
import os
import socket
import stat
import threading
from asyncio import TimerHandle
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from laminar_py.records.codec import decode
from laminar_py.records.pieces import PayloadLostError
from laminar_py.segments import wire
from laminar_py.segments.wire import Wanted
from laminar_py.segments.writer import SEGMENT

log = logging.getLogger(__name__)

LOCAL = "127.0.0.1"
BLOCK_BYTES = 2**18  # read at a time, and in memory for one answer
CLOSE_S = 2.0  # for answers that are under way at the end
PORT_PAUSE_S = 0.1  # between two tries for a port that is taken
_BACKLOG = 128
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

    async def _admit(self, request: web.BaseRequest, signature: str) -> list[Wanted]:
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

    async def _answer(
        self, request: web.BaseRequest, wanted: Sequence[Wanted], signature: str
    ) -> web.StreamResponse:
        pieces = OpenPieces(self._folder, wanted)
        try:
            try:
                pieces.open()
            except PayloadLostError as error:
                return self._line(wire.LOST, str(error), signature)
            except OSError as error:  # too many open files, say: the pieces may well be there
                log.warning("no answer: %s", error)
                return self._line(503, f"{error.strerror}; ask again", signature)
            answer = web.StreamResponse(headers=self._signed(signature, 200))
            answer.content_length = pieces.num_bytes
            try:
                async with asyncio.timeout(self._limits.answer_s):
                    await answer.prepare(request)
                    for block in pieces.blocks():
                        data = pieces.cached(block)
                        await answer.write(data or await asyncio.to_thread(pieces.read, block))
            except (OSError, TimeoutError) as error:  # the client is gone or slow, or the disk fails
                log.warning("an answer of %d bytes ended before its end: %r", pieces.num_bytes, error)
                if request.transport is not None:
                    request.transport.abort()
            return answer
        finally:
            asyncio.get_running_loop().run_in_executor(None, pieces.close)  # after a read that is under way

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


def check_request(body: bytes) -> list[Wanted]:
    """The pieces that a body asks for. Raises `BadRequestError`."""
    try:
        wanted: list[Wanted] = decode(wire.Request, body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequestError(400, f"no request: {error}") from None
    segments = len({one.segment for one in wanted})
    if segments > wire.MOST_SEGMENTS:
        raise BadRequestError(413, f"{segments} segments; a request is of at most {wire.MOST_SEGMENTS}")
    size = sum(one.num_bytes for one in wanted)
    if size > wire.ANSWER_BYTES and len(wanted) > 1:
        raise BadRequestError(413, f"{size} bytes are asked for; several pieces have at most {wire.ANSWER_BYTES}")
    return wanted


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of an open file."""

    file: int
    offset: int
    num_bytes: int


class OpenPieces:
    """Pieces of one answer, from files that are open until `close`, also if they are deleted meanwhile.

    `open` and `read` are called in threads, one at a time, and wait for the disk.
    """

    def __init__(self, folder: Path, wanted: Sequence[Wanted]) -> None:
        self.num_bytes = sum(one.num_bytes for one in wanted)
        self._folder = folder
        self._wanted = wanted
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()  # a read goes on when whoever waits for it does not any more

    def open(self) -> None:
        """Open all files. Raises `PayloadLostError` where one is not there, or too short, and `OSError`."""
        with self._lock:
            sizes: dict[str, int] = {}
            for one in self._wanted:
                if one.segment not in self._files:
                    self._files[one.segment], sizes[one.segment] = _open(self._folder, one.segment)
                if one.offset + one.num_bytes > sizes[one.segment]:
                    end = one.offset + one.num_bytes
                    raise PayloadLostError(f"{one.segment}: ends before byte {end}")

    def blocks(self) -> Iterator[list[FileRange]]:
        """FileRangees in their order, of at most `BLOCK_BYTES` together."""
        block, room = list[FileRange](), BLOCK_BYTES
        for one in self._wanted:
            file, offset, left = self._files[one.segment], one.offset, one.num_bytes
            while left:
                size = min(left, room)
                block.append(FileRange(file, offset, size))
                offset, left, room = offset + size, left - size, room - size
                if not room:
                    yield block
                    block, room = [], BLOCK_BYTES
        if block:
            yield block

    def cached(self, block: Sequence[FileRange]) -> bytearray | None:
        """Bytes of a block that the kernel has in memory; None where it would have to wait for the disk."""
        try:
            return self.read(block, os.RWF_NOWAIT)
        except OSError:  # some are on disk, or the file system cannot tell
            return None

    def read(self, block: Sequence[FileRange], flags: int = 0) -> bytearray:
        """Bytes of a block. Raises `OSError`, also where a file has become shorter."""
        data = bytearray(sum(range_.num_bytes for range_ in block))
        view, place = memoryview(data), 0
        with self._lock:
            for range_ in block:
                end = place + range_.num_bytes
                if os.preadv(range_.file, [view[place:end]], range_.offset, flags) != range_.num_bytes:
                    raise OSError(errno.EIO, "a segment has become shorter")
                place = end
        return data

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            while self._files:
                os.close(self._files.popitem()[1])


def _open(folder: Path, segment: str) -> tuple[int, int]:
    """A segment's file and its size. Raises `PayloadLostError`, or `OSError` that says nothing of the segment."""
    try:
        file = os.open(folder / f"{segment}{SEGMENT}", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        raise PayloadLostError(f"{segment}: {error.strerror}") from None
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        os.close(file)
        raise PayloadLostError(f"{segment}: no regular file")
    return file, found.st_size


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
