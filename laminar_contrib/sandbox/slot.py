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
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path, PurePosixPath

import msgspec

from laminar_contrib.sandbox.inside.messages import HEADER, SandboxLimits, SlotCommand, SlotNews, SlotSetup
from laminar_contrib.sandbox.inside.namespaces import USER
from laminar_contrib.sandbox.inside.program import ProgramPayload
from laminar_contrib.sandbox.interpreter import shared_libraries, zygote_command, zygote_environment
from laminar_contrib.sandbox.places import CgroupCounts, SlotPlace
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
COUNTED_USERS = (5, 14)  # kernel that counts processes by user namespace


class RunFiles:
    """Files in memory of one run, in the order that a zygote expects."""

    def __init__(self, payload: bytes, stdin: bytes) -> None:
        self.descriptors = [_file(payload), _file(stdin), *(_file(b"", appends=True) for _ in range(3))]

    def close(self) -> None:
        """Close all descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    def read_output(self, limit: int) -> tuple[list[bytes], bool]:
        """Read standard output, standard error and report, each up to `limit` bytes; True if one is longer."""
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
        self._zygote: HostedProcess | None = None
        self._old: HostedProcess | None = None  # an abandoned zygote, until `_end` has ended it

    @property
    def ready(self) -> bool:
        """True if the slot has a zygote. The zygote may still turn out to be lost."""
        return self._zygote is not None

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
            except (ProcessLostError, TimeoutError) as error:  # e.g. killed for lack of memory: try again
                lost = error
            except SandboxError:
                self.abandon()
                raise
        self.abandon()
        raise SandboxError(f"slot {self._place.number} does not start: {lost}") from lost

    async def run(
        self, payload: ProgramPayload, *, limits: SandboxLimits, stdin: bytes = b"", packed: bytes = b""
    ) -> SandboxResult:
        """Run a program to its end and return its result. Raises `ProcessLostError`."""
        with closing(RunFiles(packed or pack(payload, {}), stdin)) as files:
            before = self.set_limits(limits)
            call = self.send_command(SlotCommand(kind="run", limits=limits), files.descriptors)
            try:
                async with asyncio.timeout(limits.wall_s + GRACE_S):
                    news = await read_news(call)
            except TimeoutError as error:
                raise ProcessLostError(
                    "the sandbox's zygote does not answer", "its program exceeded wall_s"
                ) from error
            return self.result(files, limits, before=before, news=news)

    def result(
        self, files: RunFiles, limits: SandboxLimits, *, before: CgroupCounts, news: SlotNews | None
    ) -> SandboxResult:
        """Label a run by its output and its cgroup's counts since `before`.

        `news` is the zygote's message about the end of the run; None after a call of a session that lives on.
        """
        (stdout, stderr, report), too_long = files.read_output(limits.output_bytes)
        counts, claim = self.counts().since(before), read_claim(report)
        status = None if news is None else news.status
        named, detail = label(
            limits,
            claim,
            status=status,
            ended="" if news is None else news.ended,
            cpu_s=0.0 if news is None else news.cpu_s,
            num_oom_kills=counts.num_oom_kills,
            num_refused=counts.num_refused,
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
            finished=claim.finished,
            value_json=claim.value_json if named is SandboxLabel.OK else None,
        )

    def set_limits(self, limits: SandboxLimits) -> CgroupCounts:
        """Set the limits of the cgroup and return its counts before a run. Raises `ProcessLostError`."""
        if self._place.cgroup is not None:
            try:
                self._place.cgroup.set_limits(memory_bytes=limits.memory_bytes, processes=limits.processes)
            except OSError as error:  # earlier runs still hold more memory than the new limit
                raise ProcessLostError("its cgroup takes no limit", str(error)) from error
        return self.counts()

    def counts(self) -> CgroupCounts:
        """Read the counts of the cgroup; zeros without a cgroup."""
        return CgroupCounts(0, 0) if self._place.cgroup is None else self._place.cgroup.counts()

    def send_command(self, command: SlotCommand | SlotSetup, descriptors: Sequence[int] = ()) -> HostedCall:
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
        """Abandon the zygote and wait until all processes of the slot have ended."""
        self.abandon()
        await self._end()

    async def _start(self) -> None:
        """Start the slot's zygote, set up its tier, and run a trial program in it.

        Raises `ProcessLostError`, and `SandboxError` if the tier cannot be set up or the trial fails.
        """
        environment = zygote_environment(self._home)
        self._zygote = zygote = await HostedProcess.start(zygote_command(), environment=environment, cwd="/")
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
        news = await read_news(self.send_command(setup))
        while news.kind == "map":
            _map_users(zygote.pid, users)
            news = await read_news(self.send_command(SlotCommand(kind="mapped")))
        if news.kind != "ready":
            raise SandboxError(f"slot {self._place.number} does not start: {news.detail}")
        if cgroup is not None:
            cgroup.measure_own_memory()
        result = await self.run(ProgramPayload(program="print('ready')"), limits=SandboxLimits())
        if result.stdout != "ready\n":
            raise SandboxError(f"slot {self._place.number} runs nothing: {result.detail} {result.stderr.strip()}")

    async def _end(self) -> None:
        """Wait until the last zygote and its processes have ended; kill them after `END_S`."""
        old, self._old = self._old, None
        if old is not None:
            await old.end(patience_s=END_S)
        await asyncio.to_thread(self._place.end_all)


async def read_news(call: HostedCall) -> SlotNews:
    """Wait for the zygote's answer to a command. Raises `ProcessLostError`."""
    return msgspec.json.decode(await call.answer, type=SlotNews)


def _map_users(zygote: int, users: list[int]) -> None:
    """Write the user map of a zygote's process: its root is our user, or the slot's first user if we are root."""
    folder = Path("/proc") / str(zygote)
    if not users:
        (folder / "setgroups").write_text("deny")
    for name, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        mapped = f"0 {users[0]} 1\n{USER} {users[1]} 1\n" if users else f"0 {own} 1\n"
        (folder / name).write_text(mapped)
