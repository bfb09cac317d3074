"""Edges of a simulation: weights without bytes, tokens that are counted, no record."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from laminar_py.records.codec import IntArray
from laminar_py.records.events import AnyEvent
from laminar_py.records.pieces import ColumnRef, Piece, PieceRef, TokensRef
from laminar_py.records.protocols import PulledVersion
from laminar_py.records.replica import Assignment
from laminar_py.records.trajectory import Prompt, Span

NOWHERE = PieceRef("", 0, 0, b"")


class NoRecord:
    """A recorder that keeps nothing, see `control.book.Recorder`; `see` hears of each event."""

    def __init__(self, see: Callable[[AnyEvent], None]) -> None:
        self._see = see

    def append(self, event: AnyEvent) -> None:
        """Tell of an event, and keep nothing of it."""
        self._see(event)

    def store_prompt(self, prompt: Prompt) -> None:
        """Keep nothing of a prompt."""

    def store_tokens(self, trajectory_id: str, tokens: TokensRef, spans: tuple[Span, ...]) -> None:
        """Keep nothing of tokens."""

    def store_columns(self, trajectory_id: str, columns: Mapping[str, ColumnRef]) -> None:
        """Keep nothing of columns."""


class CountedTokens:
    """A store that knows how many tokens there are, and not which, see `rollout.storing.ResponseStore`."""

    def keep(self, piece: Piece) -> TokensRef:
        """A reference to as many tokens, which lie nowhere."""
        return TokensRef(piece.start, piece.end, NOWHERE)

    def note(self, pieces: Sequence[Piece]) -> None:
        """Keep nothing for salvage: no process dies."""

    def forget(self, trajectory_id: str) -> None:
        """Keep on knowing nothing of a trajectory."""

    async def read(self, assignment: Assignment) -> IntArray:
        """Placeholders for the tokens that an assignment goes on from."""
        return np.zeros(assignment.length, np.int32)

    async def keep_synced(self) -> None:
        """Sync nothing, until cancelled."""
        await asyncio.Event().wait()


class ModelledWeights:
    """Versions in the memory of every host, see `records.protocols.WeightSource`; `publish` adds one."""

    def __init__(self) -> None:
        self.newest = -1
        self._news = asyncio.Event()

    def publish(self, version: int) -> None:
        """Have it on all hosts now."""
        self.newest = version
        self._news.set()
        self._news = asyncio.Event()

    async def latest(self) -> int:
        """The newest version; waits for the first."""
        return await self.wait_newer(-1)

    async def wait_newer(self, version: int) -> int:
        """The newest version, once it is above that."""
        while self.newest <= version:
            await self._news.wait()
        return self.newest

    async def pull(self, version: int | None = None) -> PulledVersion:
        """Any version that there ever was."""
        number = await self.latest() if version is None else version
        return PulledVersion(number, "", f"v{number}")
