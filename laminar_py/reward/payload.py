"""Payload of a scorer: tokens of the responses that it is to score, and the columns that come of them.

Owned by `reward.scorer`. Invariant: a score that names a column is told only once that lies in a segment.
"""

import asyncio
from collections.abc import Mapping

import msgspec

from laminar_py.ledger.segments.reader import PayloadReader
from laminar_py.ledger.segments.writer import SegmentWriter
from laminar_py.records.columns import TokenValues
from laminar_py.records.pieces import ColumnPiece, ColumnRef, PayloadLostError
from laminar_py.records.scoring import PartialResponse, ScoringRequest, Unfinished, Unscored


class ScoredPayload:
    """Reader of responses and writer of columns."""

    def __init__(self, reader: PayloadReader, writer: SegmentWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def complete(self, unscored: Unscored) -> ScoringRequest:
        """The request with its tokens. Raises `PayloadLostError`."""
        return await asyncio.to_thread(self._complete, unscored)

    async def begun(self, unfinished: Unfinished) -> PartialResponse:
        """The beginning of a response with its tokens. Raises `PayloadLostError`."""
        return await asyncio.to_thread(self._begun, unfinished)

    def store(self, trajectory_id: str, columns: Mapping[str, TokenValues]) -> dict[str, ColumnRef]:
        """Write columns; where each lies. Raises `OSError`."""
        pieces = [
            ColumnPiece(trajectory_id=trajectory_id, name=name, values=values) for name, values in columns.items()
        ]
        refs = zip(pieces, self._writer.write_all(pieces), strict=True)
        return {piece.name: ColumnRef(piece.values.dtype, at) for piece, at in refs}

    def _complete(self, unscored: Unscored) -> ScoringRequest:
        response = self._reader.load((one.at for one in unscored.tokens), stores=unscored.stores).response(
            unscored.tokens
        )
        if len(response.ids) != unscored.tokens[-1].end:
            raise PayloadLostError(f"{len(response.ids)} of its {unscored.tokens[-1].end} tokens")
        return msgspec.structs.replace(
            unscored.request,
            response_ids=response.ids,
            logprobs=response.logprobs,
            environment_reward=response.reward,
            roles=response.roles,
        )

    def _begun(self, unfinished: Unfinished) -> PartialResponse:
        loaded = self._reader.load((one.at for one in unfinished.tokens), stores=unfinished.stores)
        return msgspec.structs.replace(unfinished.response, response_ids=loaded.response(unfinished.tokens).ids)
