"""Numbers of slots, of which no two on a machine are the same at one time, and what belongs to each.

A number stands for two users, a folder and a cgroup. A file that is locked while its owner lives says so, and
lists the cgroups. Who has another folder for temporary files takes other users and names. Invariant: whoever takes
a number first removes what a killed owner left under it.
"""

import fcntl
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from laminar_py.sandbox.interpreter import executable
from laminar_py.sandbox.records import SandboxError

FIRST_USER = 0x6C610000  # far from those that systems give out
NUM_LANES, NUM_SLOTS = 4096, 1024  # folders for temporary files that are told apart, and slots of each
USERS_KEPT = 4096  # at the top of what is mapped, in a container that maps few
SETUID_SETGID = 0b11000000
PREFIX = "laminar-sandbox-"
MINE = ("memory", "pids")
END_S, PAUSE_S = 5.0, 0.005  # for processes that were killed to be gone
NUM_OWN = 2  # processes of the slot itself


@dataclass(frozen=True, slots=True)
class CgroupCounts:
    """Events of a slot since its cgroup was made, e.g. `CgroupCounts(0, 3)`."""

    num_oom_kills: int
    num_refused: int  # processes

    def since(self, before: "CgroupCounts") -> "CgroupCounts":
        """Events after `before`."""
        return CgroupCounts(self.num_oom_kills - before.num_oom_kills, self.num_refused - before.num_refused)


class SlotCgroup:
    """Folders of a cgroup: one for both controllers, or in version 1 one for each."""

    def __init__(self, memory: Path, pids: Path) -> None:
        self.folders = sorted({memory, pids})
        self._memory = memory
        self._pids = pids
        self._old = (memory / "memory.oom_control").exists()  # version 1
        self._own_bytes = 0
        self._limits = (0, 0)

    @property
    def joins(self) -> list[str]:
        """Files by which a process joins."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def measure(self) -> None:
        """Take what is used now as the slot's own, which no program pays for."""
        name = "memory.usage_in_bytes" if self._old else "memory.current"
        self._own_bytes = int((self._memory / name).read_text())
        self._limits = (0, 0)

    def limit(self, *, memory_bytes: int, processes: int) -> None:
        """Bounds for programs from here on."""
        if (memory_bytes, processes) == self._limits:
            return
        total = str(memory_bytes + self._own_bytes)
        hard = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes") if self._old else ("memory.max",)
        files = [self._memory / name for name in hard if (self._memory / name).exists()]
        for file in reversed(files):  # the second may not be below the first
            file.write_text("-1" if self._old else total)
        for file in files:
            file.write_text(total)
        if not self._old and (swap := self._memory / "memory.swap.max").exists():
            swap.write_text("0")
        (self._pids / "pids.max").write_text(str(processes + NUM_OWN))
        self._limits = (memory_bytes, processes)

    def counts(self) -> CgroupCounts:
        """Events up to now."""
        events = self._memory / ("memory.oom_control" if self._old else "memory.events")
        return CgroupCounts(_count_of(events, "oom_kill"), _count_of(self._pids / "pids.events", "max"))

    def end_all(self) -> None:
        """Wait until nothing runs in it, and end what does."""
        for folder in self.folders:
            _end_cgroup(folder)


def make_cgroup(name: str) -> "SlotCgroup | None":
    """A cgroup of this name, or None where we may make none with both controllers."""
    own = _own_folders()
    if not own.keys() >= set(MINE):
        return None
    if own["memory"] != own["pids"]:
        memory, pids = (_try_cgroup(own[kind] / name, kind) for kind in MINE)
    else:
        above = (own["memory"], own["memory"].parent)
        memory = pids = next((found for folder in above if (found := _try_cgroup(folder / name, *MINE))), None)
    if memory is None or pids is None:
        for folder in (memory, pids):
            if folder is not None:
                remove_cgroup(folder)
        return None
    return SlotCgroup(memory, pids)


def remove_cgroup(folder: Path) -> None:
    """End all in a cgroup and remove it; for those that this module made, here or in a run that was killed."""
    assert folder.name.startswith(PREFIX), folder
    if folder.exists():
        _end_cgroup(folder)
        folder.rmdir()


def _end_cgroup(folder: Path) -> None:
    deadline = time.monotonic() + END_S
    while processes := (folder / "cgroup.procs").read_text().split():
        for process in processes:
            try:
                os.kill(int(process), signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise SandboxError(f"{folder}: processes {', '.join(processes)} do not end")
        time.sleep(PAUSE_S)  # nothing tells of the last one's end


def _own_folders() -> dict[str, Path]:
    """Folder of our own cgroup by controller, as far as it is mounted where we can see it."""
    paths: dict[str, str] = {}
    for line in _lines("/proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)
    found: dict[str, Path] = {}
    for line in _lines("/proc/self/mountinfo"):
        left, right = line.split(" - ")
        root, point = left.split()[3:5]
        system, _, options = right.split()
        kinds = {"cgroup": [kind for kind in MINE if kind in options.split(",")], "cgroup2": [""]}.get(system, [])
        for kind in kinds:
            path = paths.get(kind, "")
            if path.startswith(root):
                found[kind] = Path(point) / os.path.relpath(path, root)
    if "" in found and not found.keys() & set(MINE):
        found |= dict.fromkeys(MINE, found[""])
    return found


def _try_cgroup(folder: Path, *kinds: str) -> Path | None:
    """Make a cgroup that has these controllers and that we may join; None where that is refused."""
    try:
        folder.mkdir(exist_ok=True)
    except OSError:  # read-only, not ours, or no such thing
        return None
    wanted = {"memory": ("memory.limit_in_bytes", "memory.max"), "pids": ("pids.max",)}
    controlled = all(any(os.access(folder / name, os.W_OK) for name in wanted[kind]) for kind in kinds)
    if controlled and os.access(folder.parent / "cgroup.procs", os.W_OK):  # version 2 asks for that too
        return folder
    folder.rmdir()
    return None


def _count_of(file: Path, name: str) -> int:
    words = file.read_text().split()
    return int(words[words.index(name) + 1]) if name in words else 0


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []


class SlotPlace:
    """A number with its folder, until `release`, e.g. `SlotPlace.claim()`."""

    def __init__(self, number: int, lock: int) -> None:
        self.number = number
        self.folder = _base() / str(number)
        self._lock = lock
        self._cgroup: SlotCgroup | None = None

    @classmethod
    def claim(cls) -> "SlotPlace":
        """The first number that is free, cleared."""
        for number in range(NUM_SLOTS):
            lock = _try_lock(number)
            if lock is not None:
                place = cls(number, lock)
                place._clear()
                place.folder.mkdir(mode=0o711)
                place.folder.chmod(0o711)
                return place
        raise SandboxError(f"all {NUM_SLOTS} slots of {_base()} are taken")

    @property
    def users(self) -> list[int]:
        """Users on this machine of the zygote and of its programs; none where we cannot become others."""
        if not may_change_user():
            return []
        first = first_user() + 2 * self.number
        return [first, first + 1]

    @property
    def name(self) -> str:
        """Name of its cgroup."""
        return f"{PREFIX}{_lane()}-{self.number}"

    @property
    def cgroup(self) -> SlotCgroup | None:
        """Cgroup of the slot, made at the first call; None where we can make none."""
        if self._cgroup is None:
            self._cgroup = make_cgroup(self.name)
            folders = [] if self._cgroup is None else self._cgroup.folders
            os.pwrite(self._lock, "".join(f"{folder}\n" for folder in folders).encode(), 0)
        return self._cgroup

    def end_all(self) -> None:
        """End what may still run under this number, after its zygote."""
        if self._cgroup is not None:
            self._cgroup.end_all()
        _end_users(self.users)

    def release(self) -> None:
        """Remove all of it; to be called when the slot's processes have ended."""
        self._clear()
        _lock_file(self.number).unlink()
        os.close(self._lock)
        if not any(_base().iterdir()):
            shutil.rmtree(_base(), ignore_errors=True)  # another may be taking a number there now

    def _clear(self) -> None:
        size = os.fstat(self._lock).st_size
        for line in os.pread(self._lock, size, 0).decode().splitlines():
            if Path(line).name == self.name:
                remove_cgroup(Path(line))
        os.ftruncate(self._lock, 0)
        _end_users(self.users)
        if self.folder.exists():
            remove_tree(self.folder)


def sweep_places() -> None:
    """Remove what owners that were killed left on this machine."""
    numbers = [int(path.stem) for path in _base().glob("*.lock")] if _base().exists() else []
    for number in numbers:
        lock = _try_lock(number)
        if lock is not None:
            SlotPlace(number, lock).release()


def may_change_user() -> bool:
    """True where programs can run as users of their own: as root that holds the two capabilities for it."""
    status = Path("/proc/self/status")
    if os.geteuid() != 0 or not status.exists():
        return False
    line = next(line for line in status.read_text().splitlines() if line.startswith("CapEff:"))
    return int(line.split()[1], 16) & SETUID_SETGID == SETUID_SETGID


def remove_tree(folder: Path) -> None:
    """Remove a folder that a program wrote into, whatever modes and depths that left."""
    if os.geteuid() != 0:  # root needs no modes, and files of the interpreter's may be linked in there
        subprocess.run(["/bin/chmod", "-R", "u+rwx", str(folder)], check=False, capture_output=True)
    subprocess.run(["/bin/rm", "-rf", "--", str(folder)], check=True, capture_output=True)


def _end_users(users: list[int]) -> None:
    """End all processes of a slot's users."""
    code = "import os, sys; user = int(sys.argv[1]); os.setresuid(user, user, user); os.kill(-1, 9)"
    for user in users:
        assert user >= USERS_KEPT, "as root this would end the whole machine"
        deadline = time.monotonic() + END_S
        while any(_runs_as(process, user) for process in os.listdir("/proc") if process.isdigit()):
            subprocess.run([executable(), "-I", "-S", "-c", code, str(user)], check=False, capture_output=True)
            if time.monotonic() > deadline:
                raise SandboxError(f"processes of user {user} do not end")


def _runs_as(process: str, user: int) -> bool:
    folder = Path("/proc") / process
    try:
        if folder.stat().st_uid != user:
            return False
        state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        return False
    return state not in "ZX"  # ended, and left to whoever adopted it


def _base() -> Path:
    """Folder of all slots of our user, where users of slots can get to."""
    folder = Path(tempfile.gettempdir())
    if not all(above.stat().st_mode & 0o001 for above in (folder, *folder.parents)):
        folder = Path("/tmp")
    return folder / f"laminar-sandbox-{os.geteuid()}"


def _lane() -> int:
    found = _base().stat()
    return hash((found.st_dev, found.st_ino)) % NUM_LANES


def _lock_file(number: int) -> Path:
    return _base() / f"{number}.lock"


def _try_lock(number: int) -> int | None:
    """Descriptor of a number's file, locked; None where another holds it."""
    while True:
        _make_base()
        try:
            lock = os.open(_lock_file(number), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileNotFoundError:  # another removed the folder just now
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_nlink:
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        os.close(lock)  # its last owner removed the file between the two


def _make_base() -> None:
    """The folder of all slots of our user, refused if somebody else made it."""
    _base().mkdir(mode=0o711, exist_ok=True)
    found = _base().lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise SandboxError(f"{_base()} is not ours alone; remove it")


def first_user() -> int:
    """First user of slot 0, within those that exist where we are."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    extents = [[int(word) for word in line.split()] for line in lines]
    wanted = FIRST_USER + 2 * NUM_SLOTS * _lane()
    if any(first <= wanted < first + number - 2 * NUM_SLOTS for first, _, number in extents):
        return wanted
    first, _, number = max(extents, key=lambda extent: extent[2])
    return first + max(number - USERS_KEPT, number // 2)
