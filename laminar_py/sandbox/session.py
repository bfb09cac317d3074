"""A session: pieces of code that share their variables, each run with the limits of a call."""

import asyncio
import socket
import time
from dataclasses import replace

from laminar_py.sandbox.files import RunFiles
from laminar_py.sandbox.inside.limits import SandboxLimits
from laminar_py.sandbox.inside.wire import HEADER, SlotNews, SlotOrder
from laminar_py.sandbox.records import SandboxResult
from laminar_py.sandbox.slot import GRACE_S, SandboxSlot, ZygoteLostError


class SandboxSession:
    """A program that is given its code piece by piece, e.g. `session.run("x = 1")`, then `session.run("x")`.

    Between calls all of it is stopped. A piece that breaks a limit ends it: the next one starts with no variables.
    CPU time is bounded by each process's own limit, which code can raise, and by the wall in any case.
    """

    def __init__(self, slot: SandboxSlot, *, packed: bytes, limits: SandboxLimits) -> None:
        self._slot = slot
        self._packed = packed
        self._limits = limits
        self._files: RunFiles | None = None
        self._calls: socket.socket | None = None
        self._end: asyncio.Task[SlotNews] | None = None

    async def run(self, code: str) -> SandboxResult:
        """Run a piece; the value of an expression at its end is printed.

        Raises `SandboxError` where the sandbox itself fails twice.
        """
        try:
            return await self._run(code)
        except ZygoteLostError:
            await self.close()
            await self._slot.start()
            return await self._run(code)
        except asyncio.CancelledError:
            self._slot.abandon()  # the piece would run on, and its answer be taken for that of the next
            raise

    async def close(self) -> None:
        """End what runs."""
        if self._end is not None and self._files is not None and self._calls is not None:
            self._calls.close()
            try:
                await self._ended()
            except ZygoteLostError:  # it is started again for the next run
                self._slot.abandon()
            self._files.__exit__(None, None, None)
        self._end = self._files = self._calls = None

    async def _run(self, code: str) -> SandboxResult:
        if self._end is None or self._end.done():
            await self.close()
            self._begin()
        else:
            self._slot.send(SlotOrder(kind="resume"))
        files, calls, end = self._files, self._calls, self._end
        assert files is not None, "a session begins with these"
        assert calls is not None
        assert end is not None
        files.clear()
        before, start = self._slot.limit(self._limits), time.monotonic()
        call = asyncio.create_task(_call(calls, code.encode("utf-8", "replace"), files, self._limits.output_bytes))
        try:
            await asyncio.wait({call, end}, timeout=self._limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
            timed_out = not call.done() and not end.done()
            answered = call.done() and call.exception() is None and call.result()
        finally:
            call.cancel()
            await asyncio.wait({call})  # a socket may not be closed while it is read from
        if answered:
            self._slot.send(SlotOrder(kind="pause"))
            result = self._slot.result(files, self._limits, before=before, news=None)
        else:
            news = await self._ended()
            if timed_out:
                news = SlotNews(kind="end", status=news.status, ended="wall", cpu_s=news.cpu_s)
            result = self._slot.result(files, self._limits, before=before, news=news)
        return replace(result, elapsed_s=time.monotonic() - start)

    def _begin(self) -> None:
        self._files = RunFiles(self._packed, b"")
        self._calls, theirs = socket.socketpair()
        self._calls.setblocking(False)
        order = SlotOrder(kind="run", limits=self._limits, session=True)
        self._slot.send(order, [*self._files.descriptors, theirs.fileno()])
        theirs.close()
        self._end = asyncio.create_task(self._slot.news(), name="sandbox-session")

    async def _ended(self) -> SlotNews:
        """End the program and give its last news. Raises `ZygoteLostError`."""
        assert self._end is not None, "a session that began"
        if not self._end.done():
            self._slot.send(SlotOrder(kind="end"))
        try:
            async with asyncio.timeout(GRACE_S):
                return await self._end
        except TimeoutError as error:
            raise ZygoteLostError("it does not answer") from error


async def _call(calls: socket.socket, code: bytes, files: RunFiles, limit: int) -> bool:
    """Send a piece and write its answer where a report lies. False where it is none, or longer than `limit`."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(calls, len(code).to_bytes(HEADER, "big") + code)
    head = await _exactly(calls, HEADER)
    size = int.from_bytes(head, "big")
    if len(head) < HEADER or size > limit:
        return False
    answer = await _exactly(calls, size)
    files.report(answer)
    return len(answer) == size


async def _exactly(calls: socket.socket, number: int) -> bytes:
    """So many bytes, or fewer where the end came first."""
    loop, text = asyncio.get_running_loop(), b""
    while len(text) < number and (more := await loop.sock_recv(calls, number - len(text))):
        text += more
    return text
