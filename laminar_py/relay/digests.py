"""Checksums of chunks, and the digests of files and versions that are made of them.

The publisher makes a chunk's checksum once. A file's digest is made from its chunks' checksums, a version's from
its files' digests. So a node that checked each chunk as it came need not read the file again.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from laminar_py.relay.messages import CHECKSUM_BYTES, FileEntry
from laminar_py.relay.pages import Pages

TASK_BYTES = 4 * 2**20  # at least, that one task hashes when the whole file is written
EARLY_TASKS = 16  # so many in one during the copy: starting a task costs the copying thread some 0.1 ms
# Where cores are short the copy must win, since the learner stands still meanwhile. At a still lower priority a
# hashing thread on busy cores would starve while it holds the interpreter's lock, and stop the copy.
NICENESS = 10
MAX_THREADS = 8  # together they hash several times faster than one thread copies


def chunk_checksum(data: bytes | memoryview) -> bytes:
    """[CHECKSUM_BYTES] BLAKE3 of a chunk, which is faster here than CRC-32 and finds more errors."""
    return blake3(data).digest(CHECKSUM_BYTES)


def digest_of(checksums: bytes | bytearray) -> str:
    """Digest of a file: BLAKE3 of its chunks' checksums, [num_chunks * CHECKSUM_BYTES]."""
    return blake3(checksums).hexdigest()


def read_checksums(path: Path, *, chunk_bytes: int) -> bytes:
    """[num_chunks * CHECKSUM_BYTES] checksums of a file, from its content."""
    found = bytearray()
    with path.open("rb") as file:
        while data := file.read(chunk_bytes):
            found += chunk_checksum(data)
    return bytes(found)


def file_digest(path: Path, *, chunk_bytes: int) -> str:
    """Digest of a file, from its content."""
    return digest_of(read_checksums(path, chunk_bytes=chunk_bytes))


def version_digest(files: Sequence[FileEntry]) -> str:
    """Digest of a version: BLAKE3 over `name NUL digest` of its files, sorted by name."""
    total = blake3()
    for entry in sorted(files, key=lambda entry: entry.name):
        total.update(entry.name.encode() + b"\0" + bytes.fromhex(entry.digest))
    return total.hexdigest()


def hashing_threads() -> ThreadPoolExecutor:
    """Start threads for `Checksums`, on half of this process's cores: the copy and the learner need the others."""
    num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
    # Linux has a niceness for each thread.
    return ThreadPoolExecutor(num_threads, "hash", initializer=os.nice, initargs=(NICENESS,))


@dataclass(frozen=True, slots=True)
class _Task:
    """Bytes [begin, end) of the file, and the future checksums of their chunks."""

    begin: int
    end: int
    checksums: Future[bytes]


class Checksums:
    """Makes the checksums of one file on `threads` while the publisher still writes it, front to back.

    The first part is hashed last, since the header is written last. A task reads bytes only after all of them were
    written, and none after `drop` has returned
    (`tests/relay/test_publisher.py::test_nobody_reads_a_file_whose_checksums_were_dropped`).
    """

    def __init__(self, pages: Pages, *, chunk_bytes: int, threads: Executor) -> None:
        self._pages = pages
        self._chunk_bytes = chunk_bytes
        self._task_bytes = chunk_bytes * -(-TASK_BYTES // chunk_bytes)
        self._threads = threads
        self._end = self._task_bytes  # bytes that `_tasks` cover, but for the first part
        self._tasks: list[_Task] = []

    def filled(self, end: int) -> None:
        """Start to hash the bytes that are written up to `end`, but for the first part."""
        early_bytes = EARLY_TASKS * self._task_bytes
        while self._end + early_bytes <= end:
            self._start_task(self._end, self._end + early_bytes)
            self._end += early_bytes

    def result(self, size: int) -> bytes:
        """[num_chunks * CHECKSUM_BYTES] of the file, all `size` bytes of which are written.

        The calling thread does the tasks that no other thread has begun.
        """
        for begin in (0, *range(self._end, size, self._task_bytes)):
            self._start_task(begin, min(size, begin + self._task_bytes))
        self._tasks.sort(key=lambda task: task.begin)
        own = {task.begin: self._hash(task.begin, task.end) for task in self._tasks if task.checksums.cancel()}
        return b"".join(own[task.begin] if task.begin in own else task.checksums.result() for task in self._tasks)

    def drop(self) -> None:
        """Cancel all tasks; returns when none reads the file any more."""
        for task in self._tasks:
            task.checksums.cancel()
        wait([task.checksums for task in self._tasks])

    def _start_task(self, begin: int, end: int) -> None:
        self._tasks.append(_Task(begin, end, self._threads.submit(self._hash, begin, end)))

    def _hash(self, begin: int, end: int) -> bytes:
        starts = range(begin, end, self._chunk_bytes)
        return b"".join(
            chunk_checksum(self._pages.read(start, min(self._chunk_bytes, end - start))) for start in starts
        )
