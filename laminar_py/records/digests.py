"""Digests that bind the record together: of responses, prompts, files, and the chain of events.

Called by the ledger's writer, by `ledger.trajectory` when a response is finished, and by the audit, which computes
each of them again; those of pieces are made where they are written (`segments.frames`). All are BLAKE3 cut to 16
bytes: enough against accident and casual edits.
"""

import struct
from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

DIGEST_BYTES = 16
CHAIN_START = bytes(DIGEST_BYTES)

_event_head = struct.Struct("<qddIII").pack
_prompt_head = struct.Struct("<qqIIIq").pack


def response_digest(pieces: Iterable[bytes]) -> str:
    """Hex digest of a whole response, by the digests of its pieces in their order."""
    return blake3(b"".join(pieces)).hexdigest(length=DIGEST_BYTES)


def event_hash(
    previous: bytes, *, seq: int, wall: float, mono: float, host: str, kind: str, subject: str, body: bytes
) -> bytes:
    """Hash of one row of the event log, chained to the row before it."""
    head = _event_head(seq, wall, mono, len(host), len(kind), len(subject))
    return blake3(previous + head + f"{host}{kind}{subject}".encode() + body).digest(length=DIGEST_BYTES)


def prompt_digest(id: str, text: str, ids: bytes, answer: str, task: str, fields: bytes) -> bytes:
    """Digest of one stored prompt, as its row has it."""
    head = _prompt_head(len(id), len(text), len(ids), len(answer), len(task), len(fields))
    whole = b"".join((head, f"{id}{text}".encode(), ids, f"{answer}{task}".encode(), fields))
    return blake3(whole).digest(length=DIGEST_BYTES)


def file_digest(path: Path) -> str:
    """Hex digest of a file, which is not read into memory. Raises `OSError`."""
    return blake3().update_mmap(path).hexdigest(length=DIGEST_BYTES)
