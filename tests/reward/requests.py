"""Responses to score, and a server that terms call."""

from contextlib import asynccontextmanager

import msgspec
import numpy as np
from aiohttp import web
from aiohttp.test_utils import TestServer

from laminar_py.ledger.segments.writer import SegmentWriter, tokens_ref
from laminar_py.records.pieces import Piece, TokensRef
from laminar_py.records.scoring import NO_IDS, NO_LOGPROBS, ScoringRequest, Unscored
from laminar_py.records.spans import Span
from laminar_py.records.trajectory import FinishReason


def make_request(response: str, *, index: int = 0, num_tokens: int = 1, **fields: object) -> ScoringRequest:
    """A response "g0.<index>" of so many tokens to a problem whose answer is 7; `fields` of the request differ."""
    request = ScoringRequest(
        trajectory_id=f"g0.{index}",
        prompt="prompt",
        response=response,
        answer="7",
        finish_reason=FinishReason.STOP,
        prompt_ids=np.array([3], np.int32),
        response_ids=np.ones(num_tokens, np.int32),
        logprobs=np.zeros(num_tokens, np.float32),
    )
    return msgspec.structs.replace(request, **fields)


@asynccontextmanager
async def serving(path: str, handler):
    """Base URL of a server that has one path."""
    app = web.Application()
    app.router.add_post(path, handler)
    async with TestServer(app) as server:
        yield f"http://127.0.0.1:{server.port}"


def make_requests(*responses: str) -> list[ScoringRequest]:
    return [make_request(response, index=index) for index, response in enumerate(responses)]


def by_reference(request: ScoringRequest, writer: SegmentWriter, *cuts: int) -> Unscored:
    """The request as it goes to a scorer, its tokens written in pieces that end at `cuts`."""
    tokens = write(writer, request.trajectory_id, request.response_ids, request.logprobs, cuts)
    bare = msgspec.structs.replace(request, response="", response_ids=NO_IDS, logprobs=NO_LOGPROBS)
    return Unscored(request=bare, tokens=tokens)


def write(
    writer: SegmentWriter, name: str, ids: np.ndarray, logprobs: np.ndarray, cuts: tuple[int, ...] = ()
) -> tuple[TokensRef, ...]:
    """References to tokens, in pieces that end at `cuts`."""
    pieces = [
        Piece(
            trajectory_id=name,
            epoch=1,
            start=start,
            spans=(Span(0, start, end),),
            ids=ids[start:end].tobytes(),
            logprobs=logprobs[start:end].tobytes(),
        )
        for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)
    ]
    return tuple(map(tokens_ref, pieces, writer.write_all(pieces)))
