"""The private folder of a program: the only folder it may write to, empty at the start of each run.

The kernel does not bound the size of the folder, so the zygote measures it while a program runs. It measures files
that have a name: a program can hold further files that it has unlinked, until it ends.
"""

import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator

MOST_ENTRIES = 4096
MOST_DEEP = 256
BLOCK = 512
LOOKS = 20  # walks of a folder that changes meanwhile, before we take it for a trick to hide files


class Home:
    """The folder at `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._changed = 0  # time of the last change of the empty folder

    def reset(self) -> bool:
        """Empty the folder, whatever modes and depths the program left. Returns True if it is a new folder."""
        if os.path.exists(self.path):
            if self._changed == os.stat(self.path).st_ctime_ns and not os.listdir(self.path):
                return False
            self._delete()
        os.makedirs(self.path, 0o700)
        self._changed = os.stat(self.path).st_ctime_ns
        return True

    def remove(self) -> None:
        """Remove the folder, and the folder above it if that is empty then."""
        self._delete()
        with contextlib.suppress(OSError):
            os.rmdir(os.path.dirname(self.path))

    def _delete(self) -> None:
        subprocess.run(["/bin/chmod", "-R", "u+rwx", self.path], check=False, capture_output=True)
        subprocess.run(["/bin/rm", "-rf", "--", self.path], check=True, capture_output=True)

    def is_full(self, file_bytes: int) -> bool:
        """Return True if the folder holds more than `file_bytes`, or is too deep or unreadable to measure."""
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


def _walk_entries(name: str, parent: int | None, depth: int) -> Iterator[os.stat_result]:
    """Yield the `stat` of each entry below a folder.

    Raises `OSError` if one vanishes, is unreadable or too deep.
    """
    if depth > MOST_DEEP:
        raise OSError(f"nested more than {MOST_DEEP} folders deep")
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
