"""Proofs that bytes are the same: checksums of chunks, and digests of files and versions made of these.

Used wherever chunks are written or checked. A chunk has a checksum, made once, where it enters the tree, a file
the digest of those of its chunks, a version that of its files; what was checked chunk by chunk is not read again.
The publisher's threads make checksums while the copy of a version goes on: hashing takes as long as copying, or
longer, so a large version can leave a fifth earlier.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from laminar_py.relay.store.pages import Pages
from laminar_py.relay.wire.messages import CHECKSUM_BYTES, FileEntry

PART_BYTES = 4 * 2**20  # at least, that one task hashes when all is written
RUN_PARTS = 16  # that one task hashes before, while the copy goes on: handing over costs that some 0.1 ms
# As replicas: where cores are short the copy comes first, for the learner stands still meanwhile. Lower still, and
# on fully busy cores a hashing thread would starve while it holds the interpreter's lock, and the copy with it.
NICENESS = 10
MAX_THREADS = 8  # together they hash several times faster than one thread copies


def chunk_checksum(data: bytes | memoryview) -> bytes:
    """[CHECKSUM_BYTES] of a chunk: its BLAKE3, which is faster here than CRC-32 and finds more."""
    return blake3(data).digest(CHECKSUM_BYTES)


def digest_of(checksums: bytes | bytearray) -> str:
    """Digest of a file from [num_chunks * CHECKSUM_BYTES] checksums of its chunks: their BLAKE3."""
    return blake3(checksums).hexdigest()


def read_checksums(path: Path, *, chunk_bytes: int) -> bytes:
    """[num_chunks * CHECKSUM_BYTES] checksums of a file, made from its content."""
    found = bytearray()
    with path.open("rb") as file:
        while data := file.read(chunk_bytes):
            found += chunk_checksum(data)
    return bytes(found)


def file_digest(path: Path, *, chunk_bytes: int) -> str:
    """Digest of a file, made from its content."""
    return digest_of(read_checksums(path, chunk_bytes=chunk_bytes))


def version_digest(files: Sequence[FileEntry]) -> str:
    """Identity of a version: BLAKE3 over `name NUL digest` of its files, sorted by name."""
    total = blake3()
    for entry in sorted(files, key=lambda entry: entry.name):
        total.update(entry.name.encode() + b"\0" + bytes.fromhex(entry.digest))
    return total.hexdigest()


def hashing_threads() -> ThreadPoolExecutor:
    """Half of this process's cores, for the copy and the learner have theirs."""
    num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
    # On Linux niceness is a thread's own.
    return ThreadPoolExecutor(num_threads, "hash", initializer=os.nice, initargs=(NICENESS,))


@dataclass(frozen=True, slots=True)
class _Run:
    """[begin, end) of the file, and the checksums of its chunks."""

    begin: int
    end: int
    checksums: Future[bytes]


class Checksums:
    """Checksums of the chunks of one file, which is written from front to back, but for its header.

    E.g. `Checksums(pages, chunk_bytes=4194304, threads=hashing_threads())`. Queues no more than one task per
    `PART_BYTES` of the file. Invariant: a run of chunks is read only after all of it was written, and never once
    `drop` returned.
    """

    def __init__(self, pages: Pages, *, chunk_bytes: int, threads: Executor) -> None:
        self._pages = pages
        self._chunk_bytes = chunk_bytes
        self._part_bytes = chunk_bytes * -(-PART_BYTES // chunk_bytes)
        self._threads = threads
        self._handed = self._part_bytes  # up to here are `_runs`, but for the first part, which holds the header
        self._runs: list[_Run] = []

    def filled(self, end: int) -> None:
        """Hash what is written up to `end`, but for the header."""
        run_bytes = RUN_PARTS * self._part_bytes
        while self._handed + run_bytes <= end:
            self._hash(self._handed, self._handed + run_bytes)
            self._handed += run_bytes

    def result(self, size: int) -> bytes:
        """[num_chunks * CHECKSUM_BYTES] of the file, of which all `size` bytes are written.

        The caller makes those that no thread has begun.
        """
        for begin in (0, *range(self._handed, size, self._part_bytes)):
            self._hash(begin, min(size, begin + self._part_bytes))
        self._runs.sort(key=lambda run: run.begin)
        here = {run.begin: self._checksums(run.begin, run.end) for run in self._runs if run.checksums.cancel()}
        return b"".join(here[run.begin] if run.begin in here else run.checksums.result() for run in self._runs)

    def drop(self) -> None:
        """Give them up: returns when nobody reads the file for their sake."""
        for run in self._runs:
            run.checksums.cancel()
        wait([run.checksums for run in self._runs])

    def _hash(self, begin: int, end: int) -> None:
        self._runs.append(_Run(begin, end, self._threads.submit(self._checksums, begin, end)))

    def _checksums(self, begin: int, end: int) -> bytes:
        starts = range(begin, end, self._chunk_bytes)
        return b"".join(
            chunk_checksum(self._pages.read(start, min(self._chunk_bytes, end - start))) for start in starts
        )
