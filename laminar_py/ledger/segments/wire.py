"""The protocol between readers and the stores of other hosts: requests, signatures, bounds, addresses.

    reader -> store  signature and size of a `PieceRequest` in MessagePack, then the request
    store -> reader  signature, `AnswerStatus` and size of the answer, then the bytes of the pieces, or one line

A store writes its address under its name into the run's folder, which all hosts see. Readers look there before
they connect, so a restarted store may have another port.

The key never travels (law 7). On a network without TLS an eavesdropper could use a bearer token to read
everything, and so could a process that takes the port of a crashed store. A signature is valid for its request
only; a replayed request yields only bytes that the eavesdropper has already seen. Answers are signed too, so that
no stranger at the port can declare pieces lost. The bytes of pieces are unsigned, since readers know their
digests. The protocol does not hide the bytes.
"""

import hmac
import struct
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import msgspec

from laminar_py.records.host import write_file
from laminar_py.records.pieces import PieceRef

REQUEST_HEAD = struct.Struct("<32sI")  # signature, bytes of the request
ANSWER_HEAD = struct.Struct("<32sBQ")  # signature, status, bytes that follow

KEY_BYTES = 32  # at least
BODY_BYTES = 128 * 2**10  # per request
MOST_PIECES = 4096  # per request
MOST_SEGMENTS = 32  # per request, which opens as many files
ANSWER_BYTES = 64 * 2**20  # per answer of several pieces; a single piece may have any size
LINE_BYTES = 1000  # per answer without pieces

ADDRESSES = "stores"  # folder of the addresses, in the run's folder

Count = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9_-]{1,64}\.[0-9a-f]{1,16}\.[0-9a-f]{4}\Z")]
"""Name of a segment, as `writer.new_name` makes it; it cannot lead out of a folder."""


class AnswerStatus(IntEnum):
    """Status of an answer."""

    PIECES = 0  # their bytes follow
    LOST = 1  # a line names the missing piece
    REFUSED = 2  # a line says why; nothing is known of the pieces


class Wanted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A byte range of a segment in a request, e.g. of the first: `Wanted(0, 65536, 24012)`."""

    segment: Offset  # place in the request's list
    offset: Offset
    num_bytes: Count


class PieceRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request for pieces, in this order.

    E.g. one piece: `PieceRequest(["replica-3.18f2a4c1b.9e41"], [Wanted(0, 65536, 24012)])`.
    """

    segments: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=MOST_SEGMENTS)]
    pieces: Annotated[list[Wanted], msgspec.Meta(min_length=1, max_length=MOST_PIECES)]

    @property
    def num_bytes(self) -> int:
        """Size of all pieces."""
        return sum([piece.num_bytes for piece in self.pieces])


def make_request(refs: Sequence[PieceRef]) -> PieceRequest:
    """Return a request for these pieces."""
    places: dict[str, int] = {}
    pieces = [Wanted(places.setdefault(ref.segment, len(places)), ref.offset, ref.num_bytes) for ref in refs]
    return PieceRequest(list(places), pieces)


def check_key(key: bytes) -> bytes:
    """Return the key. Raises `ValueError` if it is too short."""
    if len(key) < KEY_BYTES:
        raise ValueError(f"key: {len(key)} bytes; make one of {KEY_BYTES} with secrets.token_bytes({KEY_BYTES})")
    return key


def request_signature(key: bytes, body: bytes) -> bytes:
    """Return the [32] signature of a request's body."""
    return hmac.digest(key, b"laminar request\0" + body, "sha256")


def answer_signature(key: bytes, request: bytes, status: int, size: int, line: bytes = b"") -> bytes:
    """Return the [32] signature of an answer to a request; `line` is its text if it has no pieces."""
    return hmac.digest(key, b"laminar answer\0" + request + struct.pack("<BQ", status, size) + line, "sha256")


def leave_address(folder: Path, store: str, address: tuple[str, int]) -> None:
    """Write the host and port of a store for readers. Raises `OSError`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    unfinished = folder / f"{store}.tmp"
    write_file(unfinished, msgspec.json.encode(address))
    unfinished.replace(folder / store)


def find_address(folder: Path, store: str) -> tuple[str, int]:
    """Read the last host and port of a store. Raises `OSError` if there is none."""
    return msgspec.json.decode((folder / store).read_bytes(), type=tuple[str, int])
