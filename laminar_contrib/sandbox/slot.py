"""A slot: the owner's side of one zygote process, which runs one program at a time.

    cold  -> (start) ready
    ready -> (run, or a session) ready
    any   -> (abandon, when the zygote is lost) cold

A cold slot can start again; `start` first ends the zygote that the slot had before
(`tests/sandbox/test_ends.py`). A program gets its input and leaves its output in files in memory, so no process
waits on a pipe.
"""

import asyncio
import fcntl
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import count
from pathlib import Path, PurePosixPath

import msgspec

from laminar_contrib.sandbox.inside.messages import (
    HEADER,
    SandboxLimits,
    SlotCommand,
    SlotNews,
    SlotPause,
    SlotSetup,
)
from laminar_contrib.sandbox.inside.program import ProgramPayload
from laminar_contrib.sandbox.records import (
    SandboxError,
    SandboxLabel,
    SandboxResult,
    SandboxTier,
    exit_code,
    label,
    read_claim,
)
from laminar_py.children import HostedCall, HostedProcess, ProcessLostError

START_S, END_S = 60.0, 5.0
STARTS = 5  # of a zygote that is lost before it is ready
GRACE_S = 10.0  # for the zygote to end a program whose time is over
START = """
import sys
sys.path.append(sys.argv[1])
from laminar_contrib.sandbox.inside.zygote import main
sys.path.remove(sys.argv[1])
main()
"""
ZYGOTE = (  # nothing but the standard library, nothing written beside it; a virtual environment is only a link
    *(str(Path(sys.executable).resolve()), "-P", "-s", "-S", "-B", "-c", START),
    str(Path(__file__).parent.parent.parent),
)
VARIABLES = {"LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "2"}  # of a zygote: none of ours


class RunFiles:
    """Files in memory of one run, in the order that a zygote expects."""

    def __init__(self, payload: bytes, stdin: bytes) -> None:
        self.descriptors = [_file(payload), _file(stdin), *(_file(b"", appends=True) for _ in range(3))]

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def read_output(self, limit: int) -> tuple[list[bytes], bool]:
        """Read standard output, standard error and report, up to `limit` bytes each, and True if any is longer."""
        outputs = self.descriptors[2:]
        too_long = any(os.fstat(descriptor).st_size > limit for descriptor in outputs)
        return [os.pread(descriptor, limit, 0) for descriptor in outputs], too_long

    def write_report(self, text: bytes) -> None:
        """Replace the report. A session sends its reports over a socket instead of writing them here."""
        os.ftruncate(self.descriptors[-1], 0)
        os.write(self.descriptors[-1], text)

    def clear(self) -> None:
        """Empty output, errors and report for the next call of a session."""
        for descriptor in self.descriptors[2:]:
            os.ftruncate(descriptor, 0)


def pack(payload: ProgramPayload, files: Mapping[str, bytes]) -> bytes:
    """Encode a payload and its files for the child process.

    Raises `ValueError` for a file name that leads out of the folder, or a text that cannot be encoded.
    """
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"files={name!r}: name a file below the program's folder, without '..'")
    text = msgspec.json.encode(replace(payload, files={name: len(content) for name, content in files.items()}))
    return b"".join([len(text).to_bytes(HEADER, "big"), text, *files.values()])


def _file(content: bytes, *, appends: bool = False) -> int:
    """Create a file in memory with this content and return its descriptor."""
    descriptor = os.memfd_create("run", os.MFD_CLOEXEC)
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    if appends:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


class SandboxSlot:
    """A slot that runs programs in one tier. `folder` is the pool's, and `name` the slot's own in it."""

    def __init__(self, folder: Path, name: str, *, tier: SandboxTier) -> None:
        self.tier = tier
        self._folder = folder
        self._name = name
        self._numbers = count()  # of zygotes: the home of an abandoned one may still be in use
        self._zygote: HostedProcess | None = None
        self._old: HostedProcess | None = None  # an abandoned zygote, until `_abandon_and_wait` has ended it
        self._starting = asyncio.Lock()
        self._closed = False

    @property
    def ready(self) -> bool:
        """True if the slot has a zygote. The zygote may still turn out to be lost."""
        return self._zygote is not None

    async def start(self) -> None:
        """Start a zygote and run a first program in it.

        Raises `SandboxError` if the fences cannot be put up, or if the slot is closed.
        """
        lost: BaseException | None = None
        async with self._starting:
            for _ in range(STARTS):
                await self._abandon_and_wait()
                if self._closed:
                    raise SandboxError("the pool is closed")
                try:
                    async with asyncio.timeout(START_S):
                        return await self._start()
                except (ProcessLostError, TimeoutError) as error:  # e.g. killed for lack of memory: try again
                    lost = error
                except SandboxError:
                    await self._abandon_and_wait()
                    raise
            await self._abandon_and_wait()
        raise SandboxError(f"slot {self._name} does not start: {lost}") from lost

    async def run(
        self, payload: ProgramPayload, *, limits: SandboxLimits, stdin: bytes = b"", packed: bytes = b""
    ) -> SandboxResult:
        """Run a program to its end and return its result. Raises `ProcessLostError`."""
        with closing(RunFiles(packed or pack(payload, {}), stdin)) as files:
            call = self.send_command(SlotCommand(limits=limits), files.descriptors)
            try:
                async with asyncio.timeout(limits.wall_s + GRACE_S):
                    news = await read_news(call)
            except TimeoutError as error:
                raise ProcessLostError(
                    "the sandbox's zygote does not answer", "its program exceeded wall_s"
                ) from error
            return self.result(files, limits, news=news)

    def result(self, files: RunFiles, limits: SandboxLimits, *, news: SlotNews | None) -> SandboxResult:
        """Label a run by its output and the zygote's message.

        `news` is the zygote's message about the end of the run; None after a call of a session that lives on.
        """
        (stdout, stderr, report), too_long = files.read_output(limits.output_bytes)
        claim = read_claim(report)
        status = None if news is None else news.status
        named, detail = label(
            limits,
            claim,
            status=status,
            ended="" if news is None else news.ended,
            cpu_s=0.0 if news is None else news.cpu_s,
            too_long=too_long,
        )
        return SandboxResult(
            label=named,
            detail=detail,
            stdout=stdout.decode("utf-8", "replace"),
            stderr=stderr.decode("utf-8", "replace"),
            exit_code=exit_code(status),
            elapsed_s=0.0 if news is None else news.elapsed_s,
            cpu_s=claim.cpu_s if news is None else news.cpu_s,
            value_json=claim.value_json if named is SandboxLabel.OK else None,
        )

    def send_command(
        self, command: SlotCommand | SlotPause | SlotSetup, descriptors: Sequence[int] = ()
    ) -> HostedCall:
        """Send a command to the zygote. Raises `ProcessLostError` if the slot has abandoned it."""
        if self._zygote is None:
            raise ProcessLostError("the slot abandoned it", "it ends")
        return self._zygote.begin_call(msgspec.json.encode(command), descriptors)

    def abandon(self) -> None:
        """Close the connection to the zygote, which then kills its program and exits.

        The slot is cold afterwards.
        """
        if self._zygote is not None:
            self._zygote.close()
            self._old, self._zygote = self._zygote, None

    async def close(self) -> None:
        """Abandon the zygote and wait until all processes of the slot have ended. The slot starts no more."""
        self._closed = True
        self.abandon()  # ends a start, too
        async with self._starting:
            await self._abandon_and_wait()

    async def _start(self) -> None:
        """Start the slot's zygote, and run a trial program in it.

        Raises `ProcessLostError`, and `SandboxError` if the fences cannot be made or the trial fails.
        """
        self._zygote = await HostedProcess.start(ZYGOTE, environment=VARIABLES, cwd="/")
        home = self._folder / f"{self._name}-{next(self._numbers)}"
        news = await read_news(
            self.send_command(SlotSetup(home=str(home), walls=self.tier is not SandboxTier.NONE))
        )
        if news.kind != "ready":
            raise SandboxError(news.detail)
        result = await self.run(ProgramPayload(program="print('ready')"), limits=SandboxLimits())
        if result.stdout != "ready\n":
            raise SandboxError(f"its trial program failed: {result.detail} {result.stderr.strip()}")

    async def _abandon_and_wait(self) -> None:
        """Abandon the zygote and wait until it has ended; kill it after `END_S`."""
        self.abandon()
        old, self._old = self._old, None
        if old is not None:
            await old.end(patience_s=END_S)


async def read_news(call: HostedCall) -> SlotNews:
    """Wait for the zygote's answer to a command. Raises `ProcessLostError`."""
    return msgspec.json.decode(await call.answer, type=SlotNews)
