"""Files in shared memory that one process overwrites from version to version and keeps mapped.

The publisher and `VersionStore` use them. A copy into pages that exist costs as much as any copy in memory; fresh
pages cost several times that. A process overwrites a file only while no other process has it open or mapped
(`tests/relay/test_publisher.py::test_pages_that_a_process_still_maps_are_left_to_it`).
"""

import fcntl
import logging
import mmap
import os
import resource
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

log = logging.getLogger(__name__)

WRITE_BYTES = 2**20  # at once where a file grows; fits the processor's cache
POPULATE_BYTES = 4 * 2**20  # whose pages are mapped at once
_MADV_POPULATE_WRITE = 23


def allow_many_files() -> None:
    """Raise this process's limit of open files: versions of a large model have hundreds of files each."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class MappedFile:
    """A file, new or existing, e.g. `MappedFile(folder / "model-00001.safetensors")`.

    Threads may read one part of it while one thread writes another. Call `set_size`, `keep_mapped` and `close`
    while no thread reads or writes.
    """

    def __init__(self, path: Path | int) -> None:
        """`path` may also be the descriptor of an open file, which the process then shares with another."""
        opened = path if isinstance(path, int) else os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.descriptor = opened
        self._mapping: mmap.mmap | None = None
        self._num_mapped = 0  # bytes of the mapping whose pages exist; the file may be shorter than the mapping
        self._is_being_mapped = False
        self.is_arriving = False  # threads write to it, so `MappedFiles.sweep` leaves it open
        self._unlock: Callable[[], None] | None = None

    @property
    def inode(self) -> int:
        """The file's number in the file system, which a rename does not change."""
        return os.fstat(self.descriptor).st_ino

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self.descriptor).st_size

    @property
    def is_deleted(self) -> bool:
        """True if the file has no name any more; `close` then frees its memory."""
        return os.fstat(self.descriptor).st_nlink == 0

    @property
    def is_unused(self) -> bool:
        """True if no other process has it open or mapped: only then does the kernel grant a write lease.

        False also during `keep_mapped`.
        """
        if self._is_being_mapped:
            return False
        # If another process opens the file in between, the kernel signals this one. The default, SIGIO, would end
        # it.
        fcntl.fcntl(self.descriptor, fcntl.F_SETSIG, signal.SIGURG)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self.descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    @property
    def is_page_locked(self) -> bool:
        """True if a GPU may write into the mapping by itself."""
        return self._unlock is not None

    def mapped_view(self, position: int, size: int) -> memoryview | None:
        """[size] writable view into the file; None if not all of these bytes are mapped."""
        if self._mapping is None or position + size > self._num_mapped:
            return None
        return memoryview(self._mapping)[position : position + size]

    def read(self, position: int, size: int) -> memoryview | bytes:
        """[size] bytes of the file from `position` on."""
        view = self.mapped_view(position, size)
        return os.pread(self.descriptor, size, position) if view is None else view

    def write(self, position: int, data: npt.NDArray[np.uint8]) -> None:
        """Write `data` at `position`. Raises `OSError` where the file would grow on a full file system."""
        mapped = min(len(data), max(0, self._num_mapped - position))
        if mapped:
            assert self._mapping is not None, "no part of the file is mapped"
            np.copyto(np.frombuffer(self._mapping, np.uint8, mapped, position), data[:mapped])
        if mapped == len(data):
            return
        rest, position = data[mapped:].data, position + mapped
        while rest:
            written = os.pwrite(self.descriptor, rest[:WRITE_BYTES], position)
            rest, position = rest[written:], position + written

    def set_size(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""
        if self._num_mapped > size and self.is_page_locked:
            self._unmap()
        self._num_mapped = min(self._num_mapped, size)  # pages beyond the end must not be touched
        os.ftruncate(self.descriptor, size)

    def free(self, begin: int, end: int) -> None:
        """Give back whole pages within bytes [begin, end) of the file, which then read as zeros.

        Does nothing in a file system without holes.
        """
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end:
            with suppress(OSError), mmap.mmap(self.descriptor, end) as mapping:
                mapping.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def keep_mapped(self) -> None:
        """Map all of the file for the next version. Where that fails, the next version is written unmapped."""
        size = self.size
        if self._num_mapped == size:
            return
        self._is_being_mapped = True
        try:
            if self._mapping is None or len(self._mapping) < size:
                self._unmap()
                self._mapping = mmap.mmap(self.descriptor, size)
            # Piece by piece, since the call keeps the interpreter's lock for as long as it maps pages.
            for begin in range(self._num_mapped // POPULATE_BYTES * POPULATE_BYTES, size, POPULATE_BYTES):
                with suppress(OSError):  # before Linux 5.14 the next version's writes map the pages
                    self._mapping.madvise(_MADV_POPULATE_WRITE, begin, min(POPULATE_BYTES, size - begin))
            self._num_mapped = size
        except OSError as error:
            log.warning("cannot map %d bytes of a version, so the next version is written slower: %s", size, error)
        finally:
            self._is_being_mapped = False

    def set_page_locked(self, unlock: Callable[[], None]) -> None:
        """Note that the mapping was page-locked for a GPU; `unlock` is called before it is unmapped."""
        self._unlock = unlock

    def close(self) -> None:
        """Unmap and close the file."""
        self._unmap()
        os.close(self.descriptor)

    def _unmap(self) -> None:
        """Undo the page-lock, if there is one, and drop the mapping."""
        if self._unlock is not None:
            self._unlock()
            self._unlock = None
        self._num_mapped = 0
        self._mapping = None  # unmapped with the last view of it, which the traceback of an error may still hold


class MappedFiles:
    """Files of a store that a process keeps open from version to version, also under new names.

    `sweep` closes deleted files later, since it takes 0.1 s to free a gigabyte. Until then no other file gets
    their inodes.
    """

    def __init__(self) -> None:
        self._open: dict[int, MappedFile] = {}  # by inode
        self._lock = threading.Lock()

    def open(self, path: Path) -> MappedFile:
        """Return the open file at `path`; open it if it is not open yet, and make it if it does not exist."""
        with self._lock:
            pages = self._open.get(path.stat().st_ino) if path.exists() else None
            if pages is None:
                pages = MappedFile(path)
                self._open[pages.inode] = pages
            return pages

    def has(self, inode: int) -> bool:
        """True if the file with this number is open."""
        return inode in self._open

    def get(self, inode: int) -> MappedFile:
        """Return the open file with this number."""
        return self._open[inode]

    def adopt(self, descriptor: int) -> None:
        """Keep a file that another process has opened, by a descriptor that was received."""
        pages = MappedFile(descriptor)
        with self._lock:
            self._open[pages.inode] = pages

    def sweep(self) -> None:
        """Close files that any process has deleted."""
        with self._lock:
            deleted = [
                self._open.pop(inode)
                for inode, pages in list(self._open.items())
                if pages.is_deleted and not pages.is_arriving
            ]
        for pages in deleted:
            pages.close()

    def close(self) -> None:
        """Close all files."""
        while self._open:
            self._open.popitem()[1].close()
