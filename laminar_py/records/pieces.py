"""Pieces of responses as they are stored, and references to them, which are all that decisions need.

Replicas, scorers and the reference model write pieces to segments (`segments.writer`), the files of a host;
controller and ledger know where each lies, how much it is, and its digest. L is the number of response tokens.
"""

import msgspec

from laminar_py.records.columns import Dtype, TokenValues
from laminar_py.records.roles import RoleCredit
from laminar_py.records.spans import Span


class Piece(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Response tokens [start, start + n) of a trajectory, as an engine gave them under one assignment.

    E.g. 41 tokens of "g3.1" under version 7: `spans=(Span(7, 0, 41),)`, 164 bytes of ids. `spans` may begin before
    `start`: then they replace what was said of those tokens. Tokens of an environment are among them as it wrote
    them, with a log-probability of 0 and no rows of a mask.
    """

    trajectory_id: str
    epoch: int
    start: int
    spans: tuple[Span, ...]
    ids: bytes  # [n] little-endian int32
    logprobs: bytes  # [n] little-endian float32
    mask: bytes | None = None  # sampling mask of n rows, as `recordings.pack_mask` has it; None: not recorded
    experts: bytes | None = None  # as `recordings.pack_experts` has them, of positions of their own; n may be 0
    used_s: float = 0.0  # of generation until its end, on all replicas
    reward: float | None = None  # of the environment, where that ended the trajectory with one
    roles: tuple[RoleCredit, ...] = ()  # of whose rewards that is the sum

    @property
    def end(self) -> int:
        """Tokens of the response with it."""
        return self.start + len(self.ids) // 4


class ColumnPiece(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A column of one response, e.g. its process rewards: `ColumnPiece(trajectory_id="g3.1", name=..., ...)`."""

    trajectory_id: str
    name: str
    values: TokenValues  # [L]


class PieceRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Place, size and digest of a piece, e.g. `PieceRef("replica-3.18f2a", 65536, 24012, digest)`."""

    segment: str  # file that it is in, by its name
    offset: int
    num_bytes: int
    digest: bytes  # [16] BLAKE3


COUNTED = PieceRef("(counted)", 0, 0, b"")
"""Reference of tokens that a simulation has counted; no file of segments has that name."""


class TokensRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reference to response tokens [start, end); the piece has experts alone where both are the same."""

    start: int
    end: int
    at: PieceRef
    routed: int = 0  # leading positions whose experts are recorded with it; 0: none are


class ColumnRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reference to a column of one response."""

    dtype: Dtype
    at: PieceRef


class PayloadLostError(Exception):
    """A piece that cannot be read: its host, its file or its bytes are gone. The message says which."""
