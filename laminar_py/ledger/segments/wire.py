"""Talk of readers with the stores of other hosts: requests, signatures, bounds, and where a store is.

    reader -> store  signature and size of a `PieceRequest` in MessagePack, and the request
    store -> reader  signature, `AnswerStatus` and size of the answer; then the bytes of the pieces, or one line

A store leaves its present address in the run's folder, which all hosts see, under its name; readers look there
before they connect. So a store that died may come back at any port.

Invariant: the key never travels. On a network without TLS whoever listens would have a bearer token from the first
request on and could read everything with it, and so would any process that takes the port of a store that died. A
signature opens the request that it is of and no other: sent again it gives the same bytes to who has heard them
already. Answers are signed likewise, so that a client takes no stranger at that port for its store, which would
declare lost what is only away. Bytes of pieces need no signature, since readers know their digests; nobody is kept
from listening.
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
BODY_BYTES = 128 * 2**10  # of a request
MOST_PIECES = 4096  # of a request
MOST_SEGMENTS = 32  # that a request may be of: so many files are open for it
ANSWER_BYTES = 64 * 2**20  # unless it is a single piece, which may have any size
LINE_BYTES = 1000  # of an answer without pieces

ADDRESSES = "stores"  # folder of the addresses in that of the run

Count = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9_-]{1,64}\.[0-9a-f]{1,16}\.[0-9a-f]{4}\Z")]
"""Name of a segment, as `writer.new_name` makes it: no part of it leads out of a folder."""


class AnswerStatus(IntEnum):
    """Meaning of an answer."""

    PIECES = 0  # their bytes follow
    LOST = 1  # a line says which piece is not there
    REFUSED = 2  # a line says why; nothing was read, and nothing is known of the pieces


class Wanted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Bytes of a segment that a request names, e.g. of the first: `Wanted(0, 65536, 24012)`."""

    segment: Offset  # place in the request's list
    offset: Offset
    num_bytes: Count


class PieceRequest(msgspec.Struct, frozen=True, array_like=True):
    """Pieces in the order in which they are to come.

    E.g. one: `PieceRequest(["replica-3.18f2a4c1b.9e41"], [Wanted(0, 65536, 24012)])`.
    """

    segments: Annotated[list[Name], msgspec.Meta(min_length=1, max_length=MOST_SEGMENTS)]
    pieces: Annotated[list[Wanted], msgspec.Meta(min_length=1, max_length=MOST_PIECES)]

    @property
    def num_bytes(self) -> int:
        """Bytes of all pieces."""
        return sum([piece.num_bytes for piece in self.pieces])


def make_request(refs: Sequence[PieceRef]) -> PieceRequest:
    """Request for these pieces."""
    places: dict[str, int] = {}
    pieces = [Wanted(places.setdefault(ref.segment, len(places)), ref.offset, ref.num_bytes) for ref in refs]
    return PieceRequest(list(places), pieces)


def check_key(key: bytes) -> bytes:
    """The key; ValueError where it could be guessed."""
    if len(key) < KEY_BYTES:
        raise ValueError(f"key: {len(key)} bytes; make one of {KEY_BYTES} with secrets.token_bytes({KEY_BYTES})")
    return key


def request_signature(key: bytes, body: bytes) -> bytes:
    """[32] signature of a request's body."""
    return hmac.digest(key, b"laminar request\0" + body, "sha256")


def answer_signature(key: bytes, request: bytes, status: int, size: int, line: bytes = b"") -> bytes:
    """[32] signature of an answer to the request of that signature; `line` is its text, where it has no pieces."""
    return hmac.digest(key, b"laminar answer\0" + request + struct.pack("<BQ", status, size) + line, "sha256")


def leave_address(folder: Path, store: str, address: tuple[str, int]) -> None:
    """Have readers find a store of that name at this host and port. Raises `OSError`."""
    folder.mkdir(mode=0o700, exist_ok=True)
    unfinished = folder / f"{store}.tmp"
    write_file(unfinished, msgspec.json.encode(address))
    unfinished.replace(folder / store)


def find_address(folder: Path, store: str) -> tuple[str, int]:
    """Host and port at which a store serves, or did last. Raises `OSError` where it left none."""
    return msgspec.json.decode((folder / store).read_bytes(), type=tuple[str, int])
