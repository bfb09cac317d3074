"""Places of slots: a number that no other slot of this machine has, with its two users, folder and cgroup.

The owner of a number holds a lock on a file while it lives, and lists its cgroups in that file. A process with
another folder for temporary files uses other users and names. A new owner of a number first removes everything
that a killed owner left under it (`tests/sandbox/test_ends.py`).

**Cgroups.** The kernel counts and bounds the memory and the processes of a slot in a cgroup, where we may create
one: below our own cgroup, or beside it. Versions 1 and 2 of cgroups both work.
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

from laminar_contrib.sandbox.interpreter import executable
from laminar_contrib.sandbox.records import SandboxError

FIRST_USER = 0x6C610000  # far above ids of normal users
NUM_LANES, NUM_SLOTS = 4096, 1024  # distinct folders for temporary files, and slots of each
USERS_KEPT = 4096  # from the top of a container's range, if it maps few ids
SETUID_SETGID = 0b11000000
PREFIX = "laminar-sandbox-"
MINE = ("memory", "pids")
END_S, PAUSE_S = 5.0, 0.005  # for processes that were killed to be gone
NUM_OWN = 2  # processes of the slot itself


@dataclass(frozen=True, slots=True)
class CgroupCounts:
    """Numbers of events in a cgroup since we created it, e.g. `CgroupCounts(num_oom_kills=0, num_refused=3)`."""

    num_oom_kills: int
    num_refused: int  # processes

    def since(self, before: "CgroupCounts") -> "CgroupCounts":
        """Return the events between `before` and these counts."""
        return CgroupCounts(self.num_oom_kills - before.num_oom_kills, self.num_refused - before.num_refused)


class SlotCgroup:
    """A cgroup of a slot: one folder for both controllers, or one for each in cgroups version 1."""

    def __init__(self, memory: Path, pids: Path) -> None:
        self.folders = sorted({memory, pids})
        self._memory = memory
        self._pids = pids
        self._old = (memory / "memory.oom_control").exists()  # version 1
        self._own_bytes = 0
        self._limits = (0, 0)

    @property
    def joins(self) -> list[str]:
        """Files into which a process writes its id to join the cgroup."""
        return [str(folder / "cgroup.procs") for folder in self.folders]

    def measure_own_memory(self) -> None:
        """Read the memory that the idle slot uses, so that limits of programs do not include it."""
        name = "memory.usage_in_bytes" if self._old else "memory.current"
        self._own_bytes = int((self._memory / name).read_text())
        self._limits = (0, 0)

    def set_limits(self, *, memory_bytes: int, processes: int) -> None:
        """Set the limits of all programs that start from now on. Raises `OSError` if more memory is in use."""
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
        """Read how many processes were killed for memory, and how many could not start."""
        events = self._memory / ("memory.oom_control" if self._old else "memory.events")
        return CgroupCounts(_count_of(events, "oom_kill"), _count_of(self._pids / "pids.events", "max"))

    def end_all(self) -> None:
        """Kill all processes of the cgroup and wait until they are gone."""
        for folder in self.folders:
            _end_cgroup(folder)


def make_cgroup(name: str) -> "SlotCgroup | None":
    """Create a cgroup of this name. Returns None where we may not create one with both controllers."""
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
    """Kill all processes of a cgroup and remove it.

    Only for cgroups that this module created, maybe in a past run.
    """
    assert folder.name.startswith(PREFIX), folder
    if folder.exists():
        _end_cgroup(folder)
        folder.rmdir()


def _end_cgroup(folder: Path) -> None:
    """Kill all processes of a cgroup and wait until it is empty. Raises `SandboxError` after `END_S`."""
    deadline = time.monotonic() + END_S
    while processes := (folder / "cgroup.procs").read_text().split():
        for process in processes:
            try:
                os.kill(int(process), signal.SIGKILL)
            except ProcessLookupError:
                continue
        if time.monotonic() > deadline:
            raise SandboxError(f"{folder}: processes {', '.join(processes)} do not end")
        time.sleep(PAUSE_S)  # the kernel sends no event for the last exit


def _own_folders() -> dict[str, Path]:
    """Return the folder of our own cgroup for each controller that is mounted here."""
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
    """Create a cgroup with these controllers that we may join. Returns None where the system refuses."""
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
    """A slot number and its resources, ours until `release`, e.g. `SlotPlace.claim()`."""

    def __init__(self, number: int, lock: int) -> None:
        self.number = number
        self.folder = _base() / str(number)
        self._lock = lock
        self._cgroup: SlotCgroup | None = None

    @classmethod
    def claim(cls) -> "SlotPlace":
        """Claim the first free number and remove leftovers of its last owner.

        Raises `SandboxError` if all are taken.
        """
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
        """User ids of the zygote and of its programs; an empty list where we may not change the user."""
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
        """The cgroup of the slot, created at first use; None where we cannot create one."""
        if self._cgroup is None:
            self._cgroup = make_cgroup(self.name)
            folders = [] if self._cgroup is None else self._cgroup.folders
            os.pwrite(self._lock, "".join(f"{folder}\n" for folder in folders).encode(), 0)
        return self._cgroup

    def end_all(self) -> None:
        """Kill every process that still runs under this number after its zygote has ended."""
        if self._cgroup is not None:
            self._cgroup.end_all()
        _end_users(self.users)

    def release(self) -> None:
        """Give the number up and remove its resources. Call it after the slot's processes have ended."""
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
    """Remove folders, processes and cgroups that killed owners left on this machine."""
    numbers = [int(path.stem) for path in _base().glob("*.lock")] if _base().exists() else []
    for number in numbers:
        lock = _try_lock(number)
        if lock is not None:
            SlotPlace(number, lock).release()


def may_change_user() -> bool:
    """Return True if programs can run as users of their own: we are root with SETUID and SETGID capabilities."""
    status = Path("/proc/self/status")
    if os.geteuid() != 0 or not status.exists():
        return False
    line = next(line for line in status.read_text().splitlines() if line.startswith("CapEff:"))
    return int(line.split()[1], 16) & SETUID_SETGID == SETUID_SETGID


def remove_tree(folder: Path) -> None:
    """Remove a folder that a program wrote into, whatever file modes and depths it has."""
    if os.geteuid() != 0:  # root needs no modes, and files of the interpreter's may be linked in there
        subprocess.run(["/bin/chmod", "-R", "u+rwx", str(folder)], check=False, capture_output=True)
    subprocess.run(["/bin/rm", "-rf", "--", str(folder)], check=True, capture_output=True)


def _end_users(users: list[int]) -> None:
    """Kill all processes of a slot's users."""
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
    except (FileNotFoundError, ProcessLookupError):  # the process ended meanwhile
        return False
    return state not in "ZX"  # a zombie has ended; its parent has not reaped it yet


def _base() -> Path:
    """Return the folder of our user's slots. Other users can traverse it."""
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
    """Lock the file of a number and return its descriptor; None if another process holds the lock."""
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
    """Create the folder of our user's slots. Raises `SandboxError` if another user created it."""
    _base().mkdir(mode=0o711, exist_ok=True)
    found = _base().lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise SandboxError(f"{_base()} is not ours alone; remove it")


def first_user() -> int:
    """Return the first user id of slot 0. A container may map few ids, so take them from its largest range."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    extents = [[int(word) for word in line.split()] for line in lines]
    wanted = FIRST_USER + 2 * NUM_SLOTS * _lane()
    if any(first <= wanted < first + number - 2 * NUM_SLOTS for first, _, number in extents):
        return wanted
    first, _, number = max(extents, key=lambda extent: extent[2])
    return first + max(number - USERS_KEPT, number // 2)
