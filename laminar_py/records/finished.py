"""Finished trajectories as decisions need them: counts, spans and references, and none of the tokens."""

from typing import Protocol

import msgspec

from laminar_py.records.codec import IntArray
from laminar_py.records.pieces import ColumnRef, PieceRef, TokensRef
from laminar_py.records.returns import Earned
from laminar_py.records.roles import RoleCredit
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason, Kind
from laminar_py.records.tree import packed_tokens


class FinishedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """A finished sample by reference, e.g. 41 tokens of "g3.1", which are one piece of a replica's segment.

    Whoever needs the tokens reads them (`segments.reader`).
    """

    id: str
    prompt_id: str
    group_id: str
    sample_index: int
    kind: Kind
    prompt_ids: IntArray  # [P]
    tokens: tuple[TokensRef, ...]  # end to end over [0, L)
    num_trained: int  # response tokens that something is to be learned of
    spans: tuple[Span, ...]  # cover [0, L)
    finish_reason: FinishReason
    reward: float | None = None
    advantage: float = 0.0
    advantage_scale: float = 1.0  # what a unit of reward is in it
    weight: float = 1.0  # factor on its loss (staleness reweighting)
    earned: Earned | None = None  # where its tokens have rewards of their own
    roles: tuple[RoleCredit, ...] = ()  # where these have rewards, and so advantages, of their own
    columns: dict[str, ColumnRef] = {}  # by name

    @property
    def length(self) -> int:
        """Response tokens, L."""
        return self.tokens[-1].end if self.tokens else 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all its sequences: prompt and response, where that is one."""
        return packed_tokens(len(self.prompt_ids), self.spans)

    @property
    def oldest_version(self) -> int:
        """The lowest version in it, whose age is its staleness."""
        return min(span.version for span in self.spans if span.version is not None)

    @property
    def refs(self) -> list[PieceRef]:
        """Everything that is stored of it."""
        return [*(one.at for one in self.tokens), *(column.at for column in self.columns.values())]


class Packable(Protocol):
    """Numbers by which a trajectory is packed and weighted, with its tokens or without."""

    @property
    def id(self) -> str:
        """Name of the trajectory."""
        ...

    @property
    def group_id(self) -> str:
        """Name of its group."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of all its sequences: prompt and response, where that is one."""
        ...

    @property
    def num_trained(self) -> int:
        """Response tokens that something is to be learned of."""
        ...

    @property
    def advantage(self) -> float:
        """Advantage of the response."""
        ...

    @property
    def earned(self) -> Earned | None:
        """Process rewards in short, where there are some."""
        ...

    @property
    def roles(self) -> tuple[RoleCredit, ...]:
        """Credit by role, where there are several."""
        ...

    @property
    def spans(self) -> tuple[Span, ...]:
        """Spans that cover the response."""
        ...
