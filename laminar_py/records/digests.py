"""Digests that bind the ledger together: of responses, stored pieces, prompts, and the chain of events.

Called by the ledger's writer, by `control.lifecycle` when a response is finished, and by the audit, which
computes each of them again. All are BLAKE3 cut to 16 bytes: enough against accident and casual edits.
"""

import struct
from pathlib import Path

from blake3 import blake3

from laminar_py.records.codec import FloatArray, IntArray

DIGEST_BYTES = 16
CHAIN_START = bytes(DIGEST_BYTES)

_event_head = struct.Struct("<qddIII").pack
_segment_head = struct.Struct("<qqIIIqq").pack
_column_head = struct.Struct("<qIIq").pack
_prompt_head = struct.Struct("<qqIIIq").pack


def response_digest(ids: IntArray | bytes, logprobs: FloatArray | bytes) -> str:
    """Hex digest of a whole response: token ids [L] and their log-probabilities [L], or the bytes of both."""
    assert len(ids) == len(logprobs), f"{len(ids)} ids but {len(logprobs)} log-probabilities"
    return blake3(bytes(ids) + bytes(logprobs)).hexdigest(length=DIGEST_BYTES)


def event_hash(
    previous: bytes, *, seq: int, wall: float, mono: float, host: str, kind: str, subject: str, body: bytes
) -> bytes:
    """Hash of one row of the event log, chained to the row before it."""
    head = _event_head(seq, wall, mono, len(host), len(kind), len(subject))
    return blake3(previous + head + f"{host}{kind}{subject}".encode() + body).digest(length=DIGEST_BYTES)


def segment_digest(
    trajectory: int,
    start: int,
    spans: str,
    ids: bytes,
    logprobs: bytes,
    mask: bytes | None = None,
    experts: bytes | None = None,
) -> bytes:
    """Digest of one stored piece of a response, as its row has it."""
    masked, routed = -1 if mask is None else len(mask), -1 if experts is None else len(experts)
    head = _segment_head(trajectory, start, len(spans), len(ids), len(logprobs), masked, routed)
    whole = b"".join((head, spans.encode(), ids, logprobs, mask or b"", experts or b""))
    return blake3(whole).digest(length=DIGEST_BYTES)


def column_digest(trajectory: int, name: str, dtype: str, data: bytes) -> bytes:
    """Digest of one stored column of a response, as its row has it."""
    head = _column_head(trajectory, len(name), len(dtype), len(data))
    return blake3(head + f"{name}{dtype}".encode() + data).digest(length=DIGEST_BYTES)


def prompt_digest(id: str, text: str, ids: bytes, answer: str, task: str, fields: bytes) -> bytes:
    """Digest of one stored prompt, as its row has it."""
    head = _prompt_head(len(id), len(text), len(ids), len(answer), len(task), len(fields))
    whole = b"".join((head, f"{id}{text}".encode(), ids, f"{answer}{task}".encode(), fields))
    return blake3(whole).digest(length=DIGEST_BYTES)


def file_digest(path: Path) -> str:
    """Hex digest of a file, which is not read into memory. Raises `OSError`."""
    return blake3().update_mmap(path).hexdigest(length=DIGEST_BYTES)
