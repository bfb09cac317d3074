"""Processes that run code of others: how they are started, called and ended, with fences or without.

Rewards and agents have a `HostedProcess` each; a slot of the sandbox starts its zygote by `start_process`.
Invariants: such a process sees none of our environment variables but harmless ones, reads nothing, and prints into
a log; a call of it ends with its answer, its deadline, or the death of the process, which is told with its last
words.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path

from laminar_py.sandbox.inside.wire import CALL, call_frame

PASSED_ON = (  # of our environment variables
    "PATH",
    "LD_LIBRARY_PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "TZ",
    "TMPDIR",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "OMP_NUM_THREADS",
)
MOST_BYTES = 1 << 28  # of an answer: its length comes from a process that runs code of others
TAIL_BYTES = 2000


class ProcessLostError(Exception):
    """A process died, or was ended as a call in it hung, e.g. `ProcessLostError("it died", "MemoryError")`."""

    def __init__(self, why: str, words: str) -> None:
        super().__init__(f"{why}: {words}")
        self.words = words  # the last that it wrote


def start_process(
    command: Sequence[str],
    *,
    control: socket.socket,
    environment: Mapping[str, str],
    log: Path | None,
    cwd: str = ".",
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, with the socket by which it is told what to do.

    It takes milliseconds; in a thread the process could be missed where the caller is cancelled.
    """
    with open(os.devnull if log is None else log, "ab") as output:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=cwd,
            pass_fds=[control.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


@dataclass(frozen=True, slots=True)
class HostedCall:
    """A call under way, whose answer raises `ProcessLostError` where the process dies."""

    answer: "asyncio.Future[bytes]"
    cancel: Callable[[], None]  # have it ended, which is an answer too


class HostedProcess:
    """A module that runs as a process, and answers calls that are numbered bytes (`inside.wire`)."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        log: Path,
    ) -> None:
        self._process = process
        self._reader, self._writer = reader, writer
        self._log = log
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._listening = asyncio.get_running_loop().create_task(self._listen(), name=f"hosted-{process.pid}")
        self.is_lost = False

    @classmethod
    async def start(
        cls, module: str, *, variables: Mapping[str, str], log: Path, switches: Sequence[str] = ()
    ) -> "HostedProcess":
        """Start a module with these environment variables beside harmless ones of ours."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=ours)
            passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
            command = [sys.executable, *switches, "-m", module, str(theirs.fileno())]
            try:
                process = start_process(command, control=theirs, environment={**passed_on, **variables}, log=log)
            except BaseException:
                writer.close()
                raise
        return cls(process, reader, writer, log=log)

    async def call(self, body: bytes, *, limit_s: float) -> bytes:
        """Answer of a call. Raises `TimeoutError` where there is none in time, `ProcessLostError` where it died.

        Either way the process is gone then.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await self.begin(body).answer
        except TimeoutError:
            self.kill("it hung")
            raise

    def begin(self, body: bytes) -> HostedCall:
        """A call without a deadline."""
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self.is_lost:
            answer.set_exception(self._lost("it died"))
        else:
            self._waiting[number] = answer
            self._writer.write(call_frame(number, body))
        return HostedCall(answer, partial(self._cancel, number))

    def kill(self, why: str) -> None:
        """End it and all that it has started, with every call that waits."""
        if self._process.returncode is None:  # its number may be of another otherwise
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.is_lost = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._lost(why))
                answer.exception()  # nobody may wait for it
        self._waiting.clear()

    def _cancel(self, number: int) -> None:
        if number in self._waiting:
            self._writer.write(call_frame(number, b""))

    async def end(self, *, kill: bool = True) -> None:
        """Return once it has ended: killed, or by itself, as its socket has no more calls."""
        if kill:
            self.kill("it was ended")
        elif not self._writer.is_closing():
            self._writer.write_eof()
        await asyncio.to_thread(self._process.wait)
        if not kill:
            await self._listening
        self._listening.cancel()
        self._writer.close()

    async def _listen(self) -> None:
        try:
            while True:
                size, number = CALL.unpack(await self._reader.readexactly(CALL.size))
                if size > MOST_BYTES:
                    raise ConnectionError(f"an answer of {size} bytes")
                body = await self._reader.readexactly(size)
                answer = self._waiting.pop(number, None)
                if answer is not None and not answer.done():
                    answer.set_result(body)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.kill("it died")

    def _lost(self, why: str) -> ProcessLostError:
        return ProcessLostError(why, last_line(self._log))


def last_line(log: Path) -> str:
    """The last words of a process."""
    if not log.is_file():
        return "it wrote nothing"
    with log.open("rb") as file:
        file.seek(-min(TAIL_BYTES, log.stat().st_size), os.SEEK_END)
        lines = file.read(TAIL_BYTES).decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
