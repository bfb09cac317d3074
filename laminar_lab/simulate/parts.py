"""Edges of a simulation: tokens that are counted, and a recorder that may have a ledger behind it."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from laminar_py.engines.emulated import Responses
from laminar_py.ledger import Ledger, Machine
from laminar_py.ledger.segments import Known, Payload, Salvaged, continuations, salvaged
from laminar_py.records import GenerateRequest, Prompt
from laminar_py.records.events import AnyEvent
from laminar_py.records.pieces import COUNTED, ColumnRef, Piece, TokensRef
from laminar_py.records.replica import Assignment
from laminar_py.records.spans import Span


class HeardRecorder:
    """A recorder whose events `see` hears too, see `control.book.Recorder`; without a ledger it keeps no log."""

    def __init__(self, ledger: Ledger | None, *, see: Callable[[AnyEvent], None]) -> None:
        self._ledger = ledger
        self._see = see
        self.machine = Machine() if ledger is None else ledger.machine

    def append(self, event: AnyEvent) -> None:
        """Record an event."""
        self._see(event)
        if self._ledger is not None:
            self._ledger.append(event)
        else:
            self.machine.apply(0, event, wall=0.0, mono=0.0)

    def store_prompt(self, prompt: Prompt) -> None:
        """Keep a prompt."""
        if self._ledger is not None:
            self._ledger.store_prompt(prompt)

    def store_tokens(self, trajectory_id: str, tokens: TokensRef, spans: tuple[Span, ...]) -> None:
        """Keep how many tokens there are, and under which versions."""
        (self._ledger or self.machine).store_tokens(trajectory_id, tokens, spans)

    def store_columns(self, trajectory_id: str, columns: Mapping[str, ColumnRef]) -> None:
        """Keep where columns lie."""
        (self._ledger or self.machine).store_columns(trajectory_id, columns)

    def together(self) -> AbstractContextManager[None]:
        """See `ledger.Ledger.together`."""
        return contextlib.nullcontext() if self._ledger is None else self._ledger.together()


class CountedTokens:
    """A store that counts tokens, of which `responses` knows the ids, see `rollout.storing.ResponseStore`."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._journal: dict[str, list[Piece]] = {}

    def keep(self, piece: Piece) -> TokensRef:
        """A reference to as many tokens, which lie nowhere."""
        return TokensRef(piece.start, piece.end, COUNTED)

    def journal(self, pieces: Sequence[Piece]) -> None:
        """Keep for salvage what running trajectories have got."""
        for piece in pieces:
            self._journal.setdefault(piece.trajectory_id, []).append(piece)

    def forget(self, trajectory_id: str) -> None:
        """Note that a trajectory has left, and all of it was told."""
        self._journal.pop(trajectory_id, None)

    def salvage(self, running: Mapping[str, Known]) -> list[Salvaged]:
        """Tokens of these that the journal has and nobody was told, once their replica has died."""
        pieces = (piece for noted in self._journal.values() for piece in noted)
        return [salvaged(piece, COUNTED) for piece in continuations(pieces, running)]

    async def read(self, assignment: Assignment) -> Payload:
        """Tokens that an assignment goes on from, under whatever versions."""
        request = GenerateRequest(
            rid=assignment.trajectory_id,
            group_id=assignment.group_id,
            prompt_ids=assignment.prompt_ids,
            prefix_ids=np.empty(0, np.int32),
            sampling=assignment.sampling,
        )
        ids, spans = self._responses.made(request, assignment.length)
        return Payload(ids=ids, logprobs=np.zeros(len(ids), np.float32), spans=spans)

    async def keep_synced(self) -> None:
        """Sync nothing, until cancelled."""
        await asyncio.Event().wait()
