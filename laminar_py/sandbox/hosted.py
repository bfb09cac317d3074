"""Start, call and end processes that run user code or model code, with fences or without.

Reward functions and agents run in a `HostedProcess` each. A sandbox slot starts its zygote by `start_process`. A
hosted process gets a short list of our environment variables, has no standard input, and prints into a log. A call
ends with an answer, a timeout, or `ProcessLostError` with the last line of the log.
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

INHERITED_VARIABLES = (  # a hosted process sees these of our environment variables, and no keys
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
MOST_BYTES = 1 << 28  # of an answer: an untrusted process sends its length
TAIL_BYTES = 2000


class ProcessLostError(Exception):
    """A process died, or we killed it because a call hung, e.g. `ProcessLostError("it died", "MemoryError")`."""

    def __init__(self, why: str, last_line: str) -> None:
        super().__init__(f"{why}: {last_line}")
        self.last_line = last_line  # of its log


def start_process(
    command: Sequence[str],
    *,
    control: socket.socket,
    environment: Mapping[str, str],
    log: Path | None,
    cwd: str = ".",
) -> "subprocess.Popen[bytes]":
    """Start a process in a session of its own, which inherits the `control` socket and writes into `log`.

    This blocks for milliseconds. In a thread, a cancelled caller could lose track of the new process.
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
    """A call in flight. Its `answer` raises `ProcessLostError` if the process dies."""

    answer: "asyncio.Future[bytes]"
    cancel: Callable[[], None]  # asks the process to end the call; the process still answers


class HostedProcess:
    """A Python module that runs as a process and answers calls. Calls are numbered bytes (`inside.wire`)."""

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
        """Start a module with these environment variables and our `INHERITED_VARIABLES`."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=ours)
            inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
            command = [sys.executable, *switches, "-m", module, str(theirs.fileno())]
            try:
                process = start_process(command, control=theirs, environment={**inherited, **variables}, log=log)
            except BaseException:
                writer.close()
                raise
        return cls(process, reader, writer, log=log)

    async def call(self, body: bytes, *, limit_s: float) -> bytes:
        """Send a call and return its answer.

        Raises `TimeoutError` after `limit_s` seconds, and kills the process then. Raises `ProcessLostError` if the
        process dies first.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await self.begin(body).answer
        except TimeoutError:
            self.kill("it hung")
            raise

    def begin(self, body: bytes) -> HostedCall:
        """Send a call without a timeout, and return it at once."""
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        if self.is_lost:
            answer.set_exception(self._lost("it died"))
        else:
            self._waiting[number] = answer
            self._writer.write(call_frame(number, body))
        return HostedCall(answer, partial(self._cancel, number))

    def kill(self, why: str) -> None:
        """Kill the process and its process group. Every waiting call fails with `ProcessLostError(why)`."""
        if self._process.returncode is None:  # a reaped process id may belong to another process by now
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.is_lost = True
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._lost(why))
                answer.exception()  # mark it as retrieved: a cancelled caller does not await it
        self._waiting.clear()

    def _cancel(self, number: int) -> None:
        if number in self._waiting:
            self._writer.write(call_frame(number, b""))

    async def end(self, *, kill: bool = True) -> None:
        """Wait until the process has ended.

        Kill it first, or else close our side of the socket and let it exit.
        """
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
    """Return the last line of a log that is not blank."""
    if not log.is_file():
        return "it wrote nothing"
    with log.open("rb") as file:
        file.seek(-min(TAIL_BYTES, log.stat().st_size), os.SEEK_END)
        lines = file.read(TAIL_BYTES).decode(errors="replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "it wrote nothing")
