"""A slot: the owner's side of one zygote process, which runs one program at a time.

    cold  -> (start) ready
    ready -> (run, or a session) ready
    any   -> (abandon, when the zygote is lost) cold

A cold slot can start again; `start` first ends every process that the slot had before
(`tests/sandbox/test_ends.py`). A program gets its input and leaves its output in files in memory, so no process
waits on a pipe.
"""

import asyncio
import fcntl
import os
import platform
import signal
import socket
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import TracebackType

import msgspec

from laminar_py.sandbox.hosted import start_process
from laminar_py.sandbox.inside.namespaces import USER
from laminar_py.sandbox.inside.program import ProgramPayload
from laminar_py.sandbox.inside.wire import HEADER, SandboxLimits, SlotNews, SlotOrder, SlotSetup, frame
from laminar_py.sandbox.interpreter import shared_libraries, zygote_command, zygote_environment
from laminar_py.sandbox.places import CgroupCounts, SlotPlace
from laminar_py.sandbox.records import (
    Evidence,
    SandboxError,
    SandboxLabel,
    SandboxResult,
    SandboxTier,
    exit_code,
    label,
    read_claim,
)

START_S, END_S = 60.0, 5.0
STARTS = 5  # of a zygote that is lost before it is ready
GRACE_S = 10.0  # for the zygote to end a program whose time is over
MOST_NEWS = 1 << 16  # bytes
COUNTED_USERS = (5, 14)  # kernel that counts processes by user namespace


class RunFiles:
    """Files in memory of one run, in the order that a zygote expects. The end of a `with` closes them."""

    def __init__(self, payload: bytes, stdin: bytes) -> None:
        self.descriptors = [_file(payload), _file(stdin), *(_file(b"", appends=True) for _ in range(3))]

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def read_output(self, limit: int) -> "ProgramOutput":
        """Read standard output, standard error and report, each up to `limit` bytes."""
        outputs = self.descriptors[2:]
        too_long = any(os.fstat(descriptor).st_size > limit for descriptor in outputs)
        stdout, stderr, report = (os.pread(descriptor, limit, 0) for descriptor in outputs)
        return ProgramOutput(stdout=stdout, stderr=stderr, report=report, too_long=too_long)

    def write_report(self, text: bytes) -> None:
        """Replace the report. A session sends its reports over a socket instead of writing them here."""
        os.ftruncate(self.descriptors[-1], 0)
        os.write(self.descriptors[-1], text)

    def clear(self) -> None:
        """Empty output, errors and report for the next call of a session."""
        for descriptor in self.descriptors[2:]:
            os.ftruncate(descriptor, 0)


class ProgramOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a program, e.g. `ProgramOutput(stdout=b"3", stderr=b"", report=b"{}", too_long=False)`."""

    stdout: bytes
    stderr: bytes
    report: bytes
    too_long: bool


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
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("run", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    if appends:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_APPEND)
    return descriptor


class ZygoteLostError(Exception):
    """The zygote process ended, or it does not answer."""


class SandboxSlot:
    """A slot that runs programs in one tier.

    `home` is the copy of the standard library, if the slot's user cannot read the original. `programs` are folders
    of the host whose files a program may execute.
    """

    def __init__(
        self, place: SlotPlace, *, tier: SandboxTier, home: Path | None, programs: Sequence[str] = ()
    ) -> None:
        self.tier = tier
        self._place = place
        self._home = home
        self._programs = programs
        self._control: socket.socket | None = None
        self._old: socket.socket | None = None  # of an abandoned zygote, until `_end` closes it
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def ready(self) -> bool:
        """True if the slot has a zygote. The zygote may still turn out to be lost."""
        return self._control is not None

    @property
    def alone(self) -> bool:
        """True if programs may not start processes, because this machine cannot count or kill them."""
        if self._place.users or self.tier is SandboxTier.NONE:
            return False
        release = tuple(int(part) for part in platform.release().split(".")[:2])
        counted = self._place.cgroup is not None or release >= COUNTED_USERS
        return self.tier is SandboxTier.LANDLOCK or not counted

    @property
    def weaknesses(self) -> str:
        """How the tier is weaker on this machine than elsewhere, in words; empty if it is not."""
        found = []
        if self._place.cgroup is None:
            found.append("no writable cgroup: memory is bounded for each process alone")
        if not self._place.users and self.tier is SandboxTier.LANDLOCK:
            found.append("not root: programs run as our own user")
        if self.alone:
            found.append("programs may start no process")
        return "; ".join(found)

    async def start(self) -> None:
        """Start a zygote and run a first program in it. Raises `SandboxError` if the fences cannot be put up."""
        lost: BaseException | None = None
        for _ in range(STARTS):
            self.abandon()
            await self._end()
            try:
                async with asyncio.timeout(START_S):
                    return await self._start()
            except (ZygoteLostError, TimeoutError) as error:  # e.g. killed for lack of memory: try again
                lost = error
            except SandboxError:
                self.abandon()
                raise
        self.abandon()
        raise SandboxError(f"slot {self._place.number} does not start: {lost}") from lost

    async def run(
        self, payload: ProgramPayload, *, limits: SandboxLimits, stdin: bytes = b"", packed: bytes = b""
    ) -> SandboxResult:
        """Run a program to its end and return its result. Raises `ZygoteLostError`."""
        with RunFiles(packed or pack(payload, {}), stdin) as files:
            before = self.set_limits(limits)
            self.send_order(SlotOrder(kind="run", limits=limits), files.descriptors)
            try:
                async with asyncio.timeout(limits.wall_s + GRACE_S):
                    news = await self.next_news()
            except TimeoutError as error:
                raise ZygoteLostError("it does not answer") from error
            return self.result(files, limits, before=before, news=news)

    def result(
        self, files: RunFiles, limits: SandboxLimits, *, before: CgroupCounts, news: SlotNews | None
    ) -> SandboxResult:
        """Label a run by its output and its cgroup's counts since `before`.

        `news` is the zygote's message about the end of the run; None after a call of a session that lives on.
        """
        output, counts = files.read_output(limits.output_bytes), self.counts().since(before)
        claim = read_claim(output.report)
        evidence = Evidence(
            status=None if news is None else news.status,
            claim=claim,
            ended="" if news is None else news.ended,
            cpu_s=0.0 if news is None else news.cpu_s,
            num_oom_kills=counts.num_oom_kills,
            num_refused=counts.num_refused,
            too_long=output.too_long,
        )
        named, detail = label(evidence, limits)
        return SandboxResult(
            label=named,
            detail=detail,
            stdout=output.stdout.decode("utf-8", "replace"),
            stderr=output.stderr.decode("utf-8", "replace"),
            exit_code=exit_code(evidence.status),
            elapsed_s=0.0 if news is None else news.elapsed_s,
            cpu_s=claim.cpu_s if news is None else news.cpu_s,
            finished=claim.finished,
            value_json=claim.value_json if named is SandboxLabel.OK else None,
        )

    def set_limits(self, limits: SandboxLimits) -> CgroupCounts:
        """Set the limits of the cgroup and return its counts before a run. Raises `ZygoteLostError`."""
        if self._place.cgroup is not None:
            try:
                self._place.cgroup.limit(memory_bytes=limits.memory_bytes, processes=limits.processes)
            except OSError as error:  # earlier runs still hold more memory than the new limit
                raise ZygoteLostError(f"its cgroup takes no limit: {error}") from error
        return self.counts()

    def counts(self) -> CgroupCounts:
        """Read the counts of the cgroup; zeros without a cgroup."""
        return CgroupCounts(0, 0) if self._place.cgroup is None else self._place.cgroup.counts()

    def send_order(self, order: SlotOrder | SlotSetup, descriptors: Sequence[int] = ()) -> None:
        """Send an order to the zygote. Orders are small and few, so the socket always has room.

        Raises `ZygoteLostError`.
        """
        if self._control is None:
            raise ZygoteLostError("the slot abandoned it")
        try:
            socket.send_fds(self._control, [frame(order)], list(descriptors))
        except OSError as error:
            raise ZygoteLostError(f"it ended: {error}") from error

    async def next_news(self) -> SlotNews:
        """Wait for the next message of the zygote. Raises `ZygoteLostError`."""
        size = int.from_bytes(await self._exactly(HEADER), "big")
        if size > MOST_NEWS:
            raise ZygoteLostError(f"it answered {size} bytes")
        try:
            return msgspec.json.decode(await self._exactly(size), type=SlotNews)
        except msgspec.DecodeError as error:
            raise ZygoteLostError(f"it answered nonsense: {error}") from error

    def abandon(self) -> None:
        """Close the connection to the zygote, which then kills its program and exits.

        The slot is cold afterwards.
        """
        if self._control is not None:
            with suppress(OSError):  # the zygote closed it first
                self._control.shutdown(socket.SHUT_RDWR)  # closed later: another task may be reading from it
            self._old, self._control = self._control, None

    async def close(self) -> None:
        """Abandon the zygote and wait until all processes of the slot have ended."""
        self.abandon()
        await self._end()

    async def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._control = ours
        try:
            command, environment = zygote_command(theirs.fileno()), zygote_environment(self._home)
            self._process = start_process(command, control=theirs, environment=environment, log=None, cwd="/")
        finally:
            theirs.close()
        users, cgroup = self._place.users, self._place.cgroup
        folder = self._place.folder / "root"
        folder.mkdir(exist_ok=True)
        setup = SlotSetup(
            tier=self.tier.value,
            folder=str(folder),
            readable=[*shared_libraries(), *self._programs],
            uids=users,
            cgroups=[] if cgroup is None else cgroup.joins,
            alone=self.alone,
            counted=cgroup is not None,
        )
        self.send_order(setup)
        while (news := await self.next_news()).kind == "map":
            self._map_users(users)
            self.send_order(SlotOrder(kind="mapped"))
        if news.kind != "ready":
            raise SandboxError(f"slot {self._place.number} does not start: {news.detail}")
        if cgroup is not None:
            cgroup.measure()
        result = await self.run(ProgramPayload(program="print('ready')"), limits=SandboxLimits())
        if result.stdout != "ready\n":
            raise SandboxError(f"slot {self._place.number} runs nothing: {result.detail} {result.stderr.strip()}")

    def _map_users(self, users: list[int]) -> None:
        """Write the zygote's user map: its root is our user, or the slot's first user if we are root."""
        assert self._process is not None, "a zygote that asks was started"
        folder = Path("/proc") / str(self._process.pid)
        if not users:
            (folder / "setgroups").write_text("deny")
        for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
            mapped = f"0 {users[0]} 1\n{USER} {users[1]} 1\n" if users else f"0 {own} 1\n"
            (folder / name).write_text(mapped)

    async def _exactly(self, number: int) -> bytes:
        loop, control, text = asyncio.get_running_loop(), self._control, b""
        while len(text) < number:
            if control is None:
                raise ZygoteLostError("the slot abandoned it")
            try:
                more = await loop.sock_recv(control, number - len(text))
            except OSError as error:
                raise ZygoteLostError(f"it ended: {error}") from error
            if not more:
                raise ZygoteLostError("it ended")
            text += more
        return text

    async def _end(self) -> None:
        """Wait until the last zygote and its processes have ended, and kill those that have not."""
        process, self._process = self._process, None
        if process is not None:
            await asyncio.to_thread(_wait, process)
        await asyncio.to_thread(self._place.end_all)
        if self._old is not None:
            self._old.close()
            self._old = None


def _wait(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait()
