"""Files in shared memory that one process writes over from version to version, mapped all the time.

Used by the publisher, and by stores for arriving versions: a copy into pages that are there costs what any copy in
memory costs, fresh pages cost several times that. Invariant: a file is written over only while no other process
has it open or mapped.
"""

import fcntl
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

WRITE_BYTES = 2**20  # at once where a file grows; the processor's cache holds it


class Pages:
    """One file, new or kept, e.g. `Pages(folder / "model-00001.safetensors")`."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._mapping: mmap.mmap | None = None

    @property
    def inode(self) -> int:
        """Its number in the file system, whatever its name is by now."""
        return os.fstat(self._descriptor).st_ino

    @property
    def is_deleted(self) -> bool:
        """Whether it has no name any more; its memory is free once it is closed here."""
        return os.fstat(self._descriptor).st_nlink == 0

    @property
    def is_unused(self) -> bool:
        """Whether nobody else has it open or mapped: only then does the kernel grant a lease for writing."""
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(self._descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return False
        return True

    def write(self, position: int, data: npt.NDArray[np.uint8]) -> None:
        """Put `data` there. Raises `OSError` on a full file system, where the file grows."""
        mapped = 0 if self._mapping is None else min(len(data), max(0, len(self._mapping) - position))
        if mapped:
            assert self._mapping is not None, "there is something mapped"
            np.copyto(np.frombuffer(self._mapping, np.uint8, mapped, position), data[:mapped])
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
        """Map all of it for the next time, with every page at hand."""
        size = os.fstat(self._descriptor).st_size
        if self._mapping is None or len(self._mapping) != size:
            self._unmap()
            self._mapping = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def close(self) -> None:
        """Let go of it."""
        self._unmap()
        os.close(self._descriptor)

    def _unmap(self) -> None:
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
