"""A slot: the owner's side of one zygote, which runs one program at a time.

States: cold -> (start) ready -> (run, or a session) ready; from any -> (abandon, when its zygote is lost) cold,
which may be started again. Invariant: `start` leaves nothing running that the slot had before.
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
    """Descriptors of one run, in the order that a zygote takes them; closed at the end of a `with`."""

    def __init__(self, payload: bytes, stdin: bytes) -> None:
        self.descriptors = [_file(payload), _file(stdin), *(_file(b"", appends=True) for _ in range(3))]

    def __enter__(self) -> "RunFiles":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of them."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def left(self, limit: int) -> "Left":
        """Output, errors and report, each up to `limit` bytes."""
        outputs = self.descriptors[2:]
        too_long = any(os.fstat(descriptor).st_size > limit for descriptor in outputs)
        stdout, stderr, report = (os.pread(descriptor, limit, 0) for descriptor in outputs)
        return Left(stdout=stdout, stderr=stderr, report=report, too_long=too_long)

    def report(self, text: bytes) -> None:
        """Put down what came by another way as the report."""
        os.ftruncate(self.descriptors[-1], 0)
        os.write(self.descriptors[-1], text)

    def clear(self) -> None:
        """Empty the outputs for the next call of a session."""
        for descriptor in self.descriptors[2:]:
            os.ftruncate(descriptor, 0)


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a program left, e.g. `Left(stdout=b"3", stderr=b"", report=b"{}", too_long=False)`."""

    stdout: bytes
    stderr: bytes
    report: bytes
    too_long: bool


def pack(payload: ProgramPayload, files: Mapping[str, bytes]) -> bytes:
    """ProgramPayload and files as a child reads them.

    Raises `ValueError` for a name that leads out of the folder, or a text that cannot be encoded.
    """
    for name in files:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
            raise ValueError(f"files={name!r}: name a file below the program's folder, without '..'")
    text = msgspec.json.encode(replace(payload, files={name: len(content) for name, content in files.items()}))
    return b"".join([len(text).to_bytes(HEADER, "big"), text, *files.values()])


def _file(content: bytes, *, appends: bool = False) -> int:
    """Descriptor of a file without a name that holds this."""
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
    """The zygote ended, or answers no more."""


class SandboxSlot:
    """Slot in a tier; `home` is where the standard library was copied for its user, if it had to be.

    `programs` are folders whose files may be run, too.
    """

    def __init__(
        self, place: SlotPlace, *, tier: SandboxTier, home: Path | None, programs: Sequence[str] = ()
    ) -> None:
        self.tier = tier
        self._place = place
        self._home = home
        self._programs = programs
        self._control: socket.socket | None = None
        self._old: socket.socket | None = None  # of a zygote that was given up
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def ready(self) -> bool:
        """True where a program can be run; it may still turn out that the zygote is lost."""
        return self._control is not None

    @property
    def alone(self) -> bool:
        """True where programs may start no process, since nothing here could count or end them."""
        if self._place.users or self.tier is SandboxTier.NONE:
            return False
        release = tuple(int(part) for part in platform.release().split(".")[:2])
        counted = self._place.cgroup is not None or release >= COUNTED_USERS
        return self.tier is SandboxTier.LANDLOCK or not counted

    @property
    def weaknesses(self) -> str:
        """How the tier is weaker here than it could be."""
        found = []
        if self._place.cgroup is None:
            found.append("no writable cgroup: memory is bounded for each process alone")
        if not self._place.users and self.tier is SandboxTier.LANDLOCK:
            found.append("not root: programs run as our own user")
        if self.alone:
            found.append("programs may start no process")
        return "; ".join(found)

    async def start(self) -> None:
        """Start a zygote and try it. Raises `SandboxError` where it cannot have its fences."""
        lost: BaseException | None = None
        for _ in range(STARTS):
            self.abandon()
            await self._end()
            try:
                async with asyncio.timeout(START_S):
                    return await self._start()
            except (ZygoteLostError, TimeoutError) as error:  # killed meanwhile, perhaps
                lost = error
            except SandboxError:
                self.abandon()
                raise
        self.abandon()
        raise SandboxError(f"slot {self._place.number} does not start: {lost}") from lost

    async def run(
        self, payload: ProgramPayload, *, limits: SandboxLimits, stdin: bytes = b"", packed: bytes = b""
    ) -> SandboxResult:
        """Run a program to its end. Raises `ZygoteLostError`."""
        with RunFiles(packed or pack(payload, {}), stdin) as files:
            before = self.limit(limits)
            self.send(SlotOrder(kind="run", limits=limits), files.descriptors)
            try:
                async with asyncio.timeout(limits.wall_s + GRACE_S):
                    news = await self.news()
            except TimeoutError as error:
                raise ZygoteLostError("it does not answer") from error
            return self.result(files, limits, before=before, news=news)

    def result(
        self, files: RunFiles, limits: SandboxLimits, *, before: CgroupCounts, news: SlotNews | None
    ) -> SandboxResult:
        """Result of a run, or the call of a session that lives on, of which there are no `news`."""
        left, counts = files.left(limits.output_bytes), self.counts().since(before)
        claim = read_claim(left.report)
        evidence = Evidence(
            status=None if news is None else news.status,
            claim=claim,
            ended="" if news is None else news.ended,
            cpu_s=0.0 if news is None else news.cpu_s,
            num_oom_kills=counts.num_oom_kills,
            num_refused=counts.num_refused,
            too_long=left.too_long,
        )
        named, detail = label(evidence, limits)
        return SandboxResult(
            label=named,
            detail=detail,
            stdout=left.stdout.decode("utf-8", "replace"),
            stderr=left.stderr.decode("utf-8", "replace"),
            exit_code=exit_code(evidence.status),
            elapsed_s=0.0 if news is None else news.elapsed_s,
            cpu_s=claim.cpu_s if news is None else news.cpu_s,
            finished=claim.finished,
            value_json=claim.value_json if named is SandboxLabel.OK else None,
        )

    def limit(self, limits: SandboxLimits) -> CgroupCounts:
        """Set the cgroup's bounds, and give its counts before a run."""
        if self._place.cgroup is not None:
            try:
                self._place.cgroup.limit(memory_bytes=limits.memory_bytes, processes=limits.processes)
            except OSError as error:  # more is still held of runs before than it may use now
                raise ZygoteLostError(f"its cgroup takes no limit: {error}") from error
        return self.counts()

    def counts(self) -> CgroupCounts:
        """Events of the cgroup."""
        return CgroupCounts(0, 0) if self._place.cgroup is None else self._place.cgroup.counts()

    def send(self, order: SlotOrder | SlotSetup, descriptors: Sequence[int] = ()) -> None:
        """Give an order, which the socket has always room for. Raises `ZygoteLostError`."""
        if self._control is None:
            raise ZygoteLostError("it was given up")
        try:
            socket.send_fds(self._control, [frame(order)], list(descriptors))
        except OSError as error:
            raise ZygoteLostError(f"it ended: {error}") from error

    async def news(self) -> SlotNews:
        """The next answer. Raises `ZygoteLostError`."""
        size = int.from_bytes(await self._exactly(HEADER), "big")
        if size > MOST_NEWS:
            raise ZygoteLostError(f"it answered {size} bytes")
        try:
            return msgspec.json.decode(await self._exactly(size), type=SlotNews)
        except msgspec.DecodeError as error:
            raise ZygoteLostError(f"it answered nonsense: {error}") from error

    def abandon(self) -> None:
        """Let go of the zygote, which ends with all that it runs; the slot is cold then."""
        if self._control is not None:
            with suppress(OSError):  # the zygote was faster
                self._control.shutdown(socket.SHUT_RDWR)  # closed later, since it may be read from now
            self._old, self._control = self._control, None

    async def close(self) -> None:
        """End for good."""
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
        self.send(setup)
        while (news := await self.news()).kind == "map":
            self._map_users(users)
            self.send(SlotOrder(kind="mapped"))
        if news.kind != "ready":
            raise SandboxError(f"slot {self._place.number} does not start: {news.detail}")
        if cgroup is not None:
            cgroup.measure()
        result = await self.run(ProgramPayload(program="print('ready')"), limits=SandboxLimits())
        if result.stdout != "ready\n":
            raise SandboxError(f"slot {self._place.number} runs nothing: {result.detail} {result.stderr.strip()}")

    def _map_users(self, users: list[int]) -> None:
        """Users of the zygote's namespace: ours as its root, or as root those of the slot."""
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
                raise ZygoteLostError("it was given up")
            try:
                more = await loop.sock_recv(control, number - len(text))
            except OSError as error:
                raise ZygoteLostError(f"it ended: {error}") from error
            if not more:
                raise ZygoteLostError("it ended")
            text += more
        return text

    async def _end(self) -> None:
        """Wait until the last zygote and all below it are gone, and end what does not go."""
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
