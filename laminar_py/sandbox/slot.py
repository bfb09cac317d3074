"""A slot: the owner's side of one zygote, which runs one program at a time.

States: cold -> (start) ready -> (run, or a session) ready; from any -> (abandon, when its zygote is lost) cold,
which may be started again. Invariant: `start` leaves nothing running that the slot had before.
"""

import asyncio
import os
import platform
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from laminar_py.sandbox import interpreter
from laminar_py.sandbox.cgroups import CgroupCounts
from laminar_py.sandbox.files import RunFiles, pack
from laminar_py.sandbox.hosted import start_process
from laminar_py.sandbox.inside.limits import SandboxLimits
from laminar_py.sandbox.inside.namespaces import USER
from laminar_py.sandbox.inside.program import ProgramPayload
from laminar_py.sandbox.inside.wire import HEADER, SlotNews, SlotOrder, SlotSetup, frame
from laminar_py.sandbox.labels import Evidence, exit_code, label, read_claim
from laminar_py.sandbox.places import SlotPlace
from laminar_py.sandbox.records import SandboxError, SandboxLabel, SandboxResult, SandboxTier

START_S, END_S = 60.0, 5.0
STARTS = 5  # of a zygote that is lost before it is ready
GRACE_S = 10.0  # for the zygote to end a program whose time is over
MOST_NEWS = 1 << 16  # bytes
COUNTED_USERS = (5, 14)  # kernel that counts processes by user namespace


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
            command, environment = interpreter.command(theirs.fileno()), interpreter.environment(self._home)
            self._process = start_process(command, control=theirs, environment=environment, log=None, cwd="/")
        finally:
            theirs.close()
        users, cgroup = self._place.users, self._place.cgroup
        folder = self._place.folder / "root"
        folder.mkdir(exist_ok=True)
        setup = SlotSetup(
            tier=self.tier.value,
            folder=str(folder),
            readable=[*interpreter.libraries(), *self._programs],
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
