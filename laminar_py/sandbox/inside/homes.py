"""The folder that is a program's own: the one place that it may write to, empty at the start of each run."""

import os
import stat
from collections.abc import Iterator
from typing import Protocol

from laminar_py.sandbox.inside import kernel

MOST_ENTRIES = 4096
MOST_DEEP = 256
BLOCK = 512
LOOKS = 20  # at a folder in which names are moved about, before the program is taken to do so to hide them


class Home(Protocol):
    """A folder at `path`."""

    path: str

    def freshen(self, file_bytes: int) -> bool:
        """Empty it and bound its size, where needed; True where `path` is another folder than before."""
        ...

    def full(self, file_bytes: int) -> bool:
        """True where more lies in it than it may hold; asked while a program runs."""
        ...


class MemoryHome:
    """A file system of its own in memory, whose size the kernel bounds; for the root of a mount namespace."""

    path = "/tmp"

    def __init__(self, user: int) -> None:
        self._user = user
        self._mounted: tuple[int, int, int] | None = None  # size, mode, time of the last change

    def freshen(self, file_bytes: int) -> bool:
        """Mount another one if anything was left or done in the last."""
        if self._mounted == self._state(file_bytes) and not os.listdir(self.path):
            return False
        if self._mounted is not None:
            kernel.unmount(self.path)
        kernel.mount(
            "tmpfs",
            self.path,
            "tmpfs",
            flags=kernel.MS_NOSUID | kernel.MS_NODEV,
            data=f"size={file_bytes},nr_inodes={MOST_ENTRIES},mode=0700,uid={self._user},gid={self._user}",
        )
        self._mounted = self._state(file_bytes)
        return True

    def full(self, file_bytes: int) -> bool:
        """Never: the kernel refuses what would be too much."""
        return False

    def _state(self, file_bytes: int) -> tuple[int, int, int]:
        found = os.stat(self.path)
        return file_bytes, found.st_mode, found.st_ctime_ns


class FolderHome:
    """A folder on a disk that others use too; it is looked at while a program runs, since nothing bounds it."""

    def __init__(self, path: str, user: int | None) -> None:
        self.path = path
        self._user = user
        self._changed = 0

    def freshen(self, file_bytes: int) -> bool:
        """Remove it with all that is in it, whatever modes and depths a program gave that, and make it again."""
        if os.path.exists(self.path):
            if self._changed == os.stat(self.path).st_ctime_ns and not os.listdir(self.path):
                return False
            self._run("/bin/chmod", "-R", "u+rwx", self.path)
            self._run("/bin/rm", "-rf", "--", self.path)
            if os.path.exists(self.path):  # empty, in a folder that its owner may not write to
                os.rmdir(self.path)
        os.mkdir(self.path, 0o700)
        if self._user is not None:
            os.chown(self.path, self._user, self._user)
        self._changed = os.stat(self.path).st_ctime_ns
        return True

    def full(self, file_bytes: int) -> bool:
        """Walk it; True also where it is too deep, or closed by the program: no limit could hold for that."""
        for _ in range(LOOKS):
            try:
                return self._walk(file_bytes)
            except FileNotFoundError:  # removed meanwhile, or renamed: it must not go uncounted
                continue
            except OSError:
                return True
        return True

    def _walk(self, file_bytes: int) -> bool:
        """Walk by descriptors, which a folder keeps while it is renamed. Raises `OSError`."""
        size = 0
        for entries, state in enumerate(_below(self.path, None, 0), start=1):
            size += state.st_blocks * BLOCK
            if size > file_bytes or entries > MOST_ENTRIES:
                return True
        return False

    def _run(self, *command: str) -> None:
        """Run a command as the owner of what is in the folder."""
        child = os.fork()
        if child == 0:
            try:
                if self._user is not None:
                    os.setresgid(self._user, self._user, self._user)
                    os.setresuid(self._user, self._user, self._user)
                os.execv(command[0], command)
            finally:
                os._exit(127)
        os.waitpid(child, 0)


def _below(name: str, parent: int | None, depth: int) -> Iterator[os.stat_result]:
    """States of all that lies below a folder. Raises `OSError` where it vanishes, is closed or too deep."""
    if depth > MOST_DEEP:
        raise OSError(f"more than {MOST_DEEP} folders in each other")
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with os.scandir(folder) as found:
            for entry in found:
                state = entry.stat(follow_symlinks=False)
                yield state
                if stat.S_ISDIR(state.st_mode):
                    yield from _below(entry.name, folder, depth + 1)
    finally:
        os.close(folder)
