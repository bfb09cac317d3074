"""Talk of readers with the stores of other hosts: requests, signatures, bounds, and what answers mean. Pure.

    client -> store  POST /pieces, a `PieceRequest` in MessagePack, its signature in a header
    store -> client  200 and the pieces' bytes in a row; or 410 and a line that says which piece is lost;
                     or another status and a line: nothing was read, and nothing is known of the pieces

Invariant: the key never travels. On a network without TLS whoever listens would have a bearer token from the first
request on and could read everything with it, and so would any process that takes the port of a store that died. A
signature opens the request that it is of and no other: sent again it gives the same bytes to who has heard them
already. Answers are signed likewise, so that a client takes no stranger at that port for its store, which would
declare lost what is only away. Bytes of pieces need no signature, since readers know their digests; nobody is kept
from listening.
"""

import hmac
import ipaddress
from collections.abc import Sequence
from typing import Annotated

import msgspec

from laminar_py.records.pieces import PieceRef

ROUTE = "/pieces"
SIGNATURE = "X-Laminar-Signature"  # header, of a request and of an answer

KEY_BYTES = 32  # at least
BODY_BYTES = 128 * 2**10  # of a request
MOST_PIECES = 4096  # of a request
MOST_SEGMENTS = 32  # that a request may be of: so many files are open for it
ANSWER_BYTES = 64 * 2**20  # unless it is a single piece, which may have any size
LINE_BYTES = 1000  # of an answer without pieces

LOST = 410

Count = Annotated[int, msgspec.Meta(ge=1, le=2**62)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Name = Annotated[str, msgspec.Meta(pattern=r"\A[a-z0-9_-]{1,64}\.[0-9a-f]{1,16}\.[0-9a-f]{4}\Z")]
"""Name of a segment, as `writer.new_name` makes it: no part of it leads out of a folder."""


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


def request_signature(key: bytes, body: bytes) -> str:
    """Signature of a request's body."""
    return hmac.digest(key, b"laminar request\0" + body, "sha256").hex()


def answer_signature(key: bytes, request: str, status: int, line: bytes = b"") -> str:
    """Signature of an answer to the request of that signature; `line` is its text, where it has no pieces."""
    return hmac.digest(key, f"laminar answer\0{request}\0{status}\0".encode() + line, "sha256").hex()


def is_loopback(host: str) -> bool:
    """True if only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def make_address(host: str, port: int) -> str:
    """Address of a store, e.g. `10.0.0.4:41235`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of an address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)
