"""The private folder of a program: the only folder it may write to, empty at the start of each run."""

import os
import stat
from collections.abc import Iterator
from typing import Protocol

from laminar_py.children import kernel

MOST_ENTRIES = 4096
MOST_DEEP = 256
BLOCK = 512
LOOKS = 20  # walks of a folder that changes meanwhile, before we take it for a trick to hide files


class Home(Protocol):
    """A folder at `path`."""

    path: str

    def reset(self, file_bytes: int) -> bool:
        """Empty the folder and bound its size. Returns True if `path` is a new folder, which needs new rules."""
        ...

    def is_full(self, file_bytes: int) -> bool:
        """Return True if the folder holds more than `file_bytes`. The zygote calls this while a program runs."""
        ...


class MemoryHome:
    """A file system in memory, whose size the kernel bounds. It needs a mount namespace of its own."""

    path = "/tmp"

    def __init__(self, user: int) -> None:
        self._user = user
        self._mounted: tuple[int, int, int] | None = None  # size, mode, time of the last change

    def reset(self, file_bytes: int) -> bool:
        """Mount a new file system if a program has changed the last one."""
        if self._mounted == self._mount_state(file_bytes) and not os.listdir(self.path):
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
        self._mounted = self._mount_state(file_bytes)
        return True

    def is_full(self, file_bytes: int) -> bool:
        """Return False: the kernel itself refuses writes beyond the size."""
        return False

    def _mount_state(self, file_bytes: int) -> tuple[int, int, int]:
        found = os.stat(self.path)
        return file_bytes, found.st_mode, found.st_ctime_ns


class FolderHome:
    """A folder on a shared disk.

    The kernel does not bound its size, so `is_full` measures it while a program runs.
    """

    def __init__(self, path: str, user: int | None) -> None:
        self.path = path
        self._user = user
        self._changed = 0

    def reset(self, file_bytes: int) -> bool:
        """Remove the folder, whatever file modes and depths the program left in it, and create it again."""
        if os.path.exists(self.path):
            if self._changed == os.stat(self.path).st_ctime_ns and not os.listdir(self.path):
                return False
            self._run_as_user("/bin/chmod", "-R", "u+rwx", self.path)
            self._run_as_user("/bin/rm", "-rf", "--", self.path)
            if os.path.exists(self.path):  # empty by now, but its user may not remove it from the parent folder
                os.rmdir(self.path)
        os.mkdir(self.path, 0o700)
        if self._user is not None:
            os.chown(self.path, self._user, self._user)
        self._changed = os.stat(self.path).st_ctime_ns
        return True

    def is_full(self, file_bytes: int) -> bool:
        """Walk the folder and add up its files.

        True also if it is too deep or unreadable: its size is unknown then.
        """
        for _ in range(LOOKS):
            try:
                return self._walk(file_bytes)
            except FileNotFoundError:  # removed or renamed during the walk: walk again, so that all is counted
                continue
            except OSError:
                return True
        return True

    def _walk(self, file_bytes: int) -> bool:
        """Return True if there is too much below the folder. Raises `OSError` if the folder changes meanwhile.

        It walks by descriptors, which stay valid while a program renames a folder.
        """
        size = 0
        for entries, state in enumerate(_walk_entries(self.path, None, 0), start=1):
            size += state.st_blocks * BLOCK
            if size > file_bytes or entries > MOST_ENTRIES:
                return True
        return False

    def _run_as_user(self, *command: str) -> None:
        """Run a command as the user who owns the files in the folder."""
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


def _walk_entries(name: str, parent: int | None, depth: int) -> Iterator[os.stat_result]:
    """Yield the `stat` of each entry below a folder.

    Raises `OSError` if one vanishes, is unreadable or too deep.
    """
    if depth > MOST_DEEP:
        raise OSError(f"more than {MOST_DEEP} folders in each other")
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        with os.scandir(folder) as found:
            for entry in found:
                state = entry.stat(follow_symlinks=False)
                yield state
                if stat.S_ISDIR(state.st_mode):
                    yield from _walk_entries(entry.name, folder, depth + 1)
    finally:
        os.close(folder)
