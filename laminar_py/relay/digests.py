"""Checksums of chunks, and the digests of files and versions that are made of them.

The publisher makes a chunk's checksum once. A file's digest is made from its chunks' checksums, a version's from
its files' digests. So a node that checked each chunk as it came need not read the file again.
"""

import os
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor

from blake3 import blake3

from laminar_py.relay.mapped_file import MappedFile
from laminar_py.relay.messages import CHECKSUM_BYTES, FileEntry

TASK_BYTES = 16 * 2**20  # least that one task of a thread hashes
# Where cores are short the learner must win. At a still lower priority a hashing thread on busy cores would starve
# while it holds the interpreter's lock, and stop the learner.
NICENESS = 10
MAX_THREADS = 8


def chunk_checksum(data: bytes | memoryview) -> bytes:
    """[CHECKSUM_BYTES] BLAKE3 of a chunk, which is faster here than CRC-32 and finds more errors."""
    return blake3(data).digest(CHECKSUM_BYTES)


def delta_proof(base: str, payload: bytes | memoryview) -> bytes:
    """[CHECKSUM_BYTES] BLAKE3 of a delta: of its base version's digest and the payload.

    A node whose base is another one than the root's finds it wrong.
    """
    return blake3(bytes.fromhex(base)).update(payload).digest(CHECKSUM_BYTES)


def digest_of(checksums: bytes | bytearray) -> str:
    """Digest of a file: BLAKE3 of its chunks' checksums, [num_chunks * CHECKSUM_BYTES]."""
    return blake3(checksums).hexdigest()


def version_digest(files: Sequence[FileEntry]) -> str:
    """Digest of a version: BLAKE3 over `name NUL digest` of its files, sorted by name."""
    total = blake3()
    for entry in sorted(files, key=lambda entry: entry.name):
        total.update(entry.name.encode() + b"\0" + bytes.fromhex(entry.digest))
    return total.hexdigest()


def hashing_threads(*, processes: int = 1) -> ThreadPoolExecutor:
    """Make threads of low priority for `hash_range`: one for two cores in all `processes`, one each at least."""
    num_threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // (2 * processes)))
    # Linux has a niceness for each thread.
    return ThreadPoolExecutor(num_threads, "hash", initializer=os.nice, initargs=(NICENESS,))


def hash_range(pages: MappedFile, first: int, last: int, *, chunk_bytes: int, threads: Executor) -> bytes:
    """[num_chunks * CHECKSUM_BYTES] checksums of bytes [first, last) of a file, computed on `threads`.

    `first` is the beginning of a chunk.
    """
    task_bytes = chunk_bytes * -(-TASK_BYTES // chunk_bytes)

    def hash_part(begin: int) -> bytes:
        starts = range(begin, min(last, begin + task_bytes), chunk_bytes)
        return b"".join(chunk_checksum(pages.read(start, min(chunk_bytes, last - start))) for start in starts)

    return b"".join(threads.map(hash_part, range(first, last, task_bytes)))
