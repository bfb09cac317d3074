"""Proofs that bytes are the same: checksums of chunks, and digests of files and versions made of these.

Used wherever chunks are written or checked. A chunk has a checksum, made once, where it enters the tree, a file
the digest of those of its chunks, a version that of its files; what was checked chunk by chunk is not read again.
"""

from collections.abc import Sequence
from pathlib import Path

from blake3 import blake3

from laminar_py.relay.wire.messages import CHECKSUM_BYTES, FileEntry


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
