"""Files in shared memory that one process writes over from version to version, mapped all the time.

Used by the publisher, and by stores for arriving versions: a copy into pages that are there costs what any copy in
memory costs, fresh pages cost several times that. Invariant: a file is written over only while no other process
has it open or mapped.
"""

import fcntl
import logging
import mmap
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

WRITE_BYTES = 2**20  # at once where a file grows; the processor's cache holds it


def allow_many_files() -> None:
    """Let this process have as many files open as it may: versions of a large model have hundreds each."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Pages:
    """A file, new or kept, e.g. `Pages(folder / "model-00001.safetensors")`.

    Threads may read while one writes elsewhere in it; `cut`, `keep` and `close` are for when nobody does.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._mapping: mmap.mmap | None = None
        self._unlock: Callable[[], None] | None = None

    @property
    def inode(self) -> int:
        """Number in the file system, whatever the name is by now."""
        return os.fstat(self._descriptor).st_ino

    @property
    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._descriptor).st_size

    @property
    def is_deleted(self) -> bool:
        """True if the file has no name any more; its memory is free once it is closed here."""
        return os.fstat(self._descriptor).st_nlink == 0

    @property
    def is_unused(self) -> bool:
        """True if nobody else has it open or mapped: only then does the kernel grant a lease for writing."""
        # Whoever opens it in between makes the kernel send a signal, whose default, SIGIO, ends the process.
        fcntl.fcntl(self._descriptor, fcntl.F_SETSIG, signal.SIGURG)
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    @property
    def is_locked(self) -> bool:
        """True if a device may write into what is mapped by itself."""
        return self._unlock is not None

    def mapped(self, position: int, size: int) -> memoryview | None:
        """[size] that part of the file, to be written, if all of it is mapped."""
        if self._mapping is None or position + size > len(self._mapping):
            return None
        return memoryview(self._mapping)[position : position + size]

    def read(self, position: int, size: int) -> memoryview | bytes:
        """[size] what was written there."""
        view = self.mapped(position, size)
        return os.pread(self._descriptor, size, position) if view is None else view

    def write(self, position: int, data: npt.NDArray[np.uint8]) -> None:
        """Put `data` there. Raises `OSError` on a full file system, where the file grows."""
        mapped = 0 if self._mapping is None else min(len(data), max(0, len(self._mapping) - position))
        if mapped:
            assert self._mapping is not None, "there is something mapped"
            np.copyto(np.frombuffer(self._mapping, np.uint8, mapped, position), data[:mapped])
        if mapped == len(data):
            return
        rest, position = data[mapped:].data, position + mapped
        while rest:
            written = os.pwrite(self._descriptor, rest[:WRITE_BYTES], position)
            rest, position = rest[written:], position + written

    def cut(self, size: int) -> None:
        """Give it its final size."""
        if self._mapping is not None and len(self._mapping) > size:
            self._unmap()  # pages beyond the end must not be touched
        os.ftruncate(self._descriptor, size)

    def keep(self) -> None:
        """Map all of it for the next time, with every page at hand; where that fails it is written unmapped."""
        size = self.size
        if self._mapping is not None and len(self._mapping) == size:
            return
        self._unmap()
        try:
            self._mapping = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            log.warning("cannot map %d bytes of a version, so the next will be written slower: %s", size, error)

    def locked(self, unlock: Callable[[], None]) -> None:
        """Note that what is mapped was locked for a device; `unlock` is called before it is unmapped."""
        self._unlock = unlock

    def close(self) -> None:
        """Let go of it."""
        self._unmap()
        os.close(self._descriptor)

    def _unmap(self) -> None:
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        self._mapping = None  # unmapped with the last view of it, which the traceback of an error may still hold


class KeptPages:
    """The files of a store that one process keeps open, from version to version, under whatever names.

    Not for two threads at once. Letting go of pages takes 0.1 s for a gigabyte, so that of deleted files waits for
    `sweep`; until then no other file gets their inodes.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Pages] = {}  # by inode

    def open(self, path: Path) -> Pages:
        """The pages of a file, new or kept."""
        pages = self._kept.get(path.stat().st_ino) if path.exists() else None
        if pages is None:
            pages = Pages(path)
            self._kept[pages.inode] = pages
        return pages

    def sweep(self) -> None:
        """Let go of files that were deleted, by whomever."""
        for inode, pages in list(self._kept.items()):
            if pages.is_deleted:
                self._kept.pop(inode).close()

    def close(self) -> None:
        """Let go of all."""
        while self._kept:
            self._kept.popitem()[1].close()
