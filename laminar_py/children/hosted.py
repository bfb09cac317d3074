"""Start, call and end processes that run user code or model code, with fences or without.

Processes of reward functions (`reward.calls`), the launcher of agents and the zygotes of sandbox slots are each a
`HostedProcess`. A hosted process has no standard input. We copy its output into a log and keep the last megabytes.
A call ends with an answer, a timeout, or `ProcessLostError` with the last line of the log.
"""

import asyncio
import logging
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
from logging.handlers import RotatingFileHandler
from pathlib import Path

from laminar_py.children.wire import CALL, call_frame

INHERITED_VARIABLES = (  # a hosted module sees these of our environment variables, and no keys
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
MOST_BYTES = 1 << 28  # largest answer; an untrusted process states the size itself
LOG_BYTES = 1 << 24  # of a log; a longer log loses its older half
OUTPUT_BYTES = 1 << 20  # read at a time; the largest pipe of Linux holds no more
TAIL_BYTES = 2000


class ProcessLostError(Exception):
    """A process crashed, or we killed it in a call that hung: `ProcessLostError("it crashed", "MemoryError")`."""

    def __init__(self, why: str, last_line: str) -> None:
        super().__init__(f"{why}: {last_line}")
        self.last_line = last_line  # of its log


@dataclass(frozen=True, slots=True)
class HostedCall:
    """A call in flight. Its `answer` raises `ProcessLostError` if the process crashes."""

    answer: "asyncio.Future[bytes]"
    cancel: Callable[[], None]  # asks the process to end the call; the process still answers


class HostedProcess:
    """A process that answers calls. Calls are numbered bytes, which may bring file descriptors (`wire`)."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        control: socket.socket,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        log: Path | None,
    ) -> None:
        self._process = process
        self._control = control
        self._reader, self._writer = reader, writer
        self._log = log
        if process.stdout is not None:
            os.set_blocking(process.stdout.fileno(), False)
            asyncio.get_running_loop().add_reader(process.stdout, self._copy_output)
        self._numbers = count()
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._listening = asyncio.get_running_loop().create_task(self._listen(), name=f"hosted-{process.pid}")
        self._is_closed = False  # our side of the socket
        self.is_lost = False

    @classmethod
    async def start(
        cls, command: Sequence[str], *, environment: Mapping[str, str], log: Path | None = None, cwd: str = "."
    ) -> "HostedProcess":
        """Start `command` in a new session, with the descriptor of its socket to us as an extra last argument.

        Its output is appended to the file `log`; None discards the output. While our event loop is busy, a process
        that prints much waits.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=ours)
            try:
                output = subprocess.DEVNULL if log is None else subprocess.PIPE
                process = _start_process(command, theirs.fileno(), environment=environment, output=output, cwd=cwd)
            except BaseException:
                writer.close()
                raise
        return cls(process, ours, reader, writer, log=log)

    @classmethod
    async def start_module(
        cls, module: str, *, variables: Mapping[str, str], log: Path, switches: Sequence[str] = ()
    ) -> "HostedProcess":
        """Start a Python module with these environment variables and our `INHERITED_VARIABLES`."""
        inherited = {name: os.environ[name] for name in INHERITED_VARIABLES if name in os.environ}
        command = [sys.executable, *switches, "-m", module]
        return await cls.start(command, environment={**inherited, **variables}, log=log)

    @property
    def pid(self) -> int:
        """Process id of the hosted process."""
        return self._process.pid

    async def call(self, body: bytes, *, limit_s: float) -> bytes:
        """Send `body` as a call and return the answer.

        Kills the process and raises `TimeoutError` if there is no answer within `limit_s` seconds. Raises
        `ProcessLostError` if the process crashes first.
        """
        try:
            async with asyncio.timeout(limit_s):
                return await self.begin_call(body).answer
        except TimeoutError:
            self.kill("it hung")
            raise

    def begin_call(self, body: bytes, descriptors: Sequence[int] = ()) -> HostedCall:
        """Send a call and return without waiting. The answer fails with `ProcessLostError` if the process is lost.

        The process receives copies of `descriptors`; a call with descriptors must fit into the socket's buffer.
        """
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        if self.is_lost or self._is_closed:
            self.kill("it crashed")
        elif descriptors:
            try:
                socket.send_fds(self._control, [call_frame(number, body)], descriptors)
            except OSError as error:  # the process has ended
                self.kill(f"it accepts no calls ({error})")
        else:
            self._writer.write(call_frame(number, body))
        return HostedCall(answer, partial(self._cancel, number))

    def kill(self, why: str) -> None:
        """Kill the process and its process group. Every waiting call fails with `ProcessLostError(why)`."""
        if self._process.returncode is None:  # a reaped process id may belong to another process by now
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.is_lost = True
        self._copy_output(last=True)
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(ProcessLostError(why, last_line(self._log) or "it wrote nothing"))
                answer.exception()  # mark it as retrieved: a cancelled caller does not await it
        self._waiting.clear()

    def _copy_output(self, *, last: bool = False) -> None:
        """Append to the log what the process has printed since; after the `last` time, or at its end, close."""
        output = self._process.stdout
        if output is None or output.closed:
            return
        with suppress(BlockingIOError):
            text = os.read(output.fileno(), OUTPUT_BYTES)
            if self._log is not None:
                append_bounded(self._log, text)
            last = last or not text
        if last:
            asyncio.get_running_loop().remove_reader(output)
            output.close()

    def _cancel(self, number: int) -> None:
        """Ask the process to end call `number`, by an empty body, unless the call has its answer."""
        if number in self._waiting and not self._is_closed:
            self._writer.write(call_frame(number, b""))

    def close(self) -> None:
        """Close our side of the socket. The process then ends its work and exits."""
        if not self._is_closed and not self._writer.is_closing():
            self._writer.write_eof()
        self._is_closed = True

    async def end(self, *, patience_s: float = 0.0) -> None:
        """Close our side of the socket, kill the process unless it exits in `patience_s`, and await its exit."""
        self.close()
        if patience_s:
            with suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._process.wait, patience_s)
                await asyncio.wait([self._listening], timeout=patience_s)  # for answers that it sent before
        self.kill("it was ended")
        await asyncio.to_thread(self._process.wait)
        self._listening.cancel()
        self._writer.close()

    async def _listen(self) -> None:
        """Pass each answer of the process to its call; kill the process if its socket closes or sends too much."""
        try:
            while True:
                size, number = CALL.unpack(await self._reader.readexactly(CALL.size))
                if size > MOST_BYTES:
                    self.kill(f"it sent an answer of {size:,} bytes, above {MOST_BYTES:,}")
                    return
                body = await self._reader.readexactly(size)
                answer = self._waiting.pop(number, None)
                if answer is not None and not answer.done():
                    answer.set_result(body)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.kill("it crashed")


def _start_process(
    command: Sequence[str], control: int, *, environment: Mapping[str, str], output: int, cwd: str
) -> "subprocess.Popen[bytes]":
    """Start a process that inherits the descriptor `control`; `output` is `subprocess.PIPE` or `DEVNULL`.

    This blocks for milliseconds. In a thread, a cancelled caller could lose track of the new process.
    """
    return subprocess.Popen(
        [*command, str(control)],
        env=environment,
        cwd=cwd,
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        bufsize=0,
    )


def append_bounded(log: Path, text: bytes) -> None:
    """Append `text` to a log, and keep its size bounded; on a full disk `text` is lost."""
    with suppress(OSError), log.open("ab") as file:
        file.write(text)
    trim_log(log)


def trim_log(log: Path) -> None:
    """Delete the older half of a log above `LOG_BYTES`. Processes may append to it meanwhile."""
    with suppress(OSError), log.open("a+b") as file:
        if file.tell() > LOG_BYTES:
            file.seek(-LOG_BYTES // 2, os.SEEK_END)
            file.readline()  # the rest of a line
            kept = file.read()
            file.truncate(0)
            file.write(b"(earlier lines were deleted)\n" + kept)


def log_to(log: Path, *, force: bool = False) -> None:
    """Have this process log into a file, unless it logs already; above `LOG_BYTES` the file becomes `<log>.1`.

    With `force` the process leaves its earlier logs.
    """
    logging.basicConfig(
        handlers=[RotatingFileHandler(log, maxBytes=LOG_BYTES, backupCount=1)],
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
        force=force,
    )


def last_line(log: Path | None) -> str:
    """Return the last non-blank line of the file `log`; "" if there is no such line or file."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(-min(TAIL_BYTES, log.stat().st_size), os.SEEK_END)
        lines = file.read(TAIL_BYTES).decode(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
