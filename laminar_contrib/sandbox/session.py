"""A session: a program that runs pieces of code one by one. The pieces share their variables."""

import asyncio
import signal
import socket
import time
from contextlib import closing
from dataclasses import dataclass, replace

from laminar_contrib.sandbox.inside.messages import HEADER, SandboxLimits, SlotCommand, SlotNews, SlotPause
from laminar_contrib.sandbox.records import SandboxLabel, SandboxResult
from laminar_contrib.sandbox.slot import GRACE_S, RunFiles, SandboxSlot, read_news
from laminar_py.children import HostedCall, ProcessLostError

OWN_END_S = 0.2  # a program that closed its socket by itself has exited after so long


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveProgram:
    """The running program of a session."""

    files: RunFiles
    reader: asyncio.StreamReader  # reads their answers
    writer: asyncio.StreamWriter  # sends pieces of code
    run: HostedCall
    end: asyncio.Task[SlotNews]  # of the run


class SandboxSession:
    """A program that runs its code piece by piece, e.g. `session.run("x = 1")`, then `session.run("x")`.

    The zygote stops the program between calls, its threads included. A piece that breaks a limit ends the program,
    and the next piece starts without variables. The kernel bounds the CPU time, but code can raise that limit; the
    limit on wall time of a call always holds.
    """

    def __init__(self, slot: SandboxSlot, *, packed: bytes, limits: SandboxLimits) -> None:
        self._slot = slot
        self._packed = packed
        self._limits = limits
        self._live: LiveProgram | None = None

    async def run(self, code: str) -> SandboxResult:
        """Run a piece of code and print the value of an expression at its end.

        If the zygote is lost, the piece runs again in a new one, unless variables were lost with it: then the
        result has the label `crash`. Raises `SandboxError` if the sandbox itself fails twice.
        """
        ended = self._live is None or (self._live.end.done() and not self._live.end.exception())
        fresh = ended or not self._slot.ready  # a cancelled call abandoned the zygote; its caller knows
        try:
            return await self._run(code)
        except ProcessLostError:
            await self.close()
            await self._slot.start()
            if fresh:
                return await self._run(code)
            detail = "its sandbox was ended: the variables are lost, and the piece may have run in part"
            return SandboxResult(label=SandboxLabel.CRASH, detail=detail, exit_code=-signal.SIGKILL)
        except asyncio.CancelledError:
            self._slot.abandon()  # else the next call would read the answer of this piece
            raise

    async def close(self) -> None:
        """End the program."""
        live, self._live = self._live, None
        if live is not None:
            with closing(live.files):
                live.writer.close()
                try:
                    await self._ended(live)
                except ProcessLostError:  # the slot starts a new zygote for the next run
                    self._slot.abandon()

    async def _run(self, code: str) -> SandboxResult:
        """Run a piece of code in the session's program.

        A program that exits or exceeds `wall_s` is ended; the next call starts a new one. Raises
        `ProcessLostError` if the zygote is gone.
        """
        live = await self._program()
        files, end = live.files, live.end
        files.clear()
        self._slot.send_command(SlotPause(paused=False))
        start = time.monotonic()
        call = asyncio.create_task(_call(live, code.encode("utf-8", "replace"), self._limits.output_bytes))
        try:
            await asyncio.wait({call, end}, timeout=self._limits.wall_s, return_when=asyncio.FIRST_COMPLETED)
            timed_out = not call.done() and not end.done()
            answered = call.done() and call.exception() is None and call.result()
        finally:
            call.cancel()
            await asyncio.wait({call})
        if answered:
            self._slot.send_command(SlotPause(paused=True))
            result = self._slot.result(files, self._limits, news=None)
        else:
            if not timed_out:  # the program seems to exit by itself: let its own status be the result
                await asyncio.wait({end}, timeout=OWN_END_S)
            news = await self._ended(live)
            if timed_out:
                news = SlotNews(kind="end", status=news.status, ended="wall", cpu_s=news.cpu_s)
            result = self._slot.result(files, self._limits, news=news)
        return replace(result, elapsed_s=time.monotonic() - start)

    async def _program(self) -> LiveProgram:
        """Return the program; start a new one if the last has ended. Raises `ProcessLostError`."""
        if self._live is not None:
            if not self._live.end.done():
                return self._live
            if self._live.end.exception():
                self._live.end.result()
        await self.close()
        self._live = await self._begin()
        return self._live

    async def _begin(self) -> LiveProgram:
        """Start a program and connect to it by a socket pair. Raises `ProcessLostError`."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=ours)
            files = RunFiles(self._packed, b"")
            command = SlotCommand(limits=self._limits, session=True)
            try:
                run = self._slot.send_command(command, [*files.descriptors, theirs.fileno()])
            except ProcessLostError:
                writer.close()
                files.close()
                raise
        end = asyncio.create_task(read_news(run), name="sandbox-session")
        return LiveProgram(files=files, reader=reader, writer=writer, run=run, end=end)

    async def _ended(self, live: LiveProgram) -> SlotNews:
        """End the program and return the zygote's message about it. Raises `ProcessLostError`."""
        if not live.end.done():
            live.run.cancel()
        await asyncio.wait({live.end}, timeout=GRACE_S)
        if not live.end.done():
            raise ProcessLostError(
                f"the sandbox's zygote sent no exit status within {GRACE_S:g} s",
                "its program was cancelled before",
            )
        return live.end.result()


async def _call(live: LiveProgram, code: bytes, limit: int) -> bool:
    """Send a piece of code and write the program's answer into the report file.

    Returns False if the answer is incomplete or longer than `limit` bytes.
    """
    live.writer.write(len(code).to_bytes(HEADER, "big") + code)
    try:
        size = int.from_bytes(await live.reader.readexactly(HEADER), "big")
        if size > limit:
            return False
        live.files.write_report(await live.reader.readexactly(size))
    except (asyncio.IncompleteReadError, ConnectionError):
        return False
    return True
