"""Numbers of slots, of which no two on a machine are the same at one time, and what belongs to each.

A number stands for two users, a folder and a cgroup. A file that is locked while its owner lives says so, and
lists the cgroups. Who has another folder for temporary files takes other users and names. Invariant: whoever takes
a number first removes what a killed owner left under it.
"""

import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
import time
from pathlib import Path

from laminar_py.sandbox import cgroups
from laminar_py.sandbox.interpreter import executable
from laminar_py.sandbox.records import SandboxError

FIRST_USER = 0x6C610000  # far from those that systems give out
NUM_LANES, NUM_SLOTS = 4096, 1024  # folders for temporary files that are told apart, and slots of each
USERS_KEPT = 4096  # at the top of what is mapped, in a container that maps few
SETUID_SETGID = 0b11000000


class SlotPlace:
    """A number with its folder, until `release`, e.g. `SlotPlace.take()`."""

    def __init__(self, number: int, lock: int) -> None:
        self.number = number
        self.folder = _base() / str(number)
        self._lock = lock
        self._cgroup: cgroups.SlotCgroup | None = None

    @classmethod
    def take(cls) -> "SlotPlace":
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
        return f"{cgroups.PREFIX}{_lane()}-{self.number}"

    @property
    def cgroup(self) -> "cgroups.SlotCgroup | None":
        """Cgroup of the slot, made at the first call; None where we can make none."""
        if self._cgroup is None:
            self._cgroup = cgroups.make(self.name)
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
                cgroups.remove(Path(line))
        os.ftruncate(self._lock, 0)
        _end_users(self.users)
        if self.folder.exists():
            remove_tree(self.folder)


def sweep() -> None:
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
        deadline = time.monotonic() + cgroups.END_S
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
