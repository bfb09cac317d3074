"""The check of law 9 on the record: tokens of environments are not marked as sampled, and are not trained on.

Spans without a version are tokens of environments; the loss leaves them out for that reason alone. The check
reports tokens whose stored and final marks differ, and environment tokens with properties of sampled ones.
`audit.responses` calls it for each response.
"""

from collections.abc import Iterator

import numpy as np

from laminar_py.ledger.segments.payload import Payload
from laminar_py.records.codec import BoolArray
from laminar_py.records.pieces import Piece
from laminar_py.records.spans import Span, clip_spans, sampled_mask, shift_spans


def check_truth(response: Payload, spans: tuple[Span, ...]) -> Iterator[str]:
    """Iterate over faults of environment tokens in a response; `spans` are its final spans."""
    count = len(response.ids)
    sampled = sampled_mask(response.spans, count)
    moved = np.flatnonzero(sampled_mask(spans, count) != sampled)
    if len(moved):
        stored = "sampled by an engine" if sampled[moved[0]] else "written by an environment"
        yield f"token {moved[0]} was stored as {stored}, but not finished as such; {len(moved)} such tokens"
    yield from _overlong(spans)
    if sampled.all():
        return
    strays = np.flatnonzero(~sampled & (response.logprobs != 0))
    if len(strays):
        value = response.logprobs[strays[0]]
        yield _told(strays[0], f"has a log-probability of {value:g}, not 0", count=len(strays))
    mask = response.sampling_mask
    if mask is not None and len(mask.counts) == count:  # else `audit.responses` reports it
        strays = np.flatnonzero(~sampled & (mask.counts > 0))
        if len(strays):
            yield _told(strays[0], "has a sampling mask", count=len(strays))
    for span in spans:
        if span.version is None and span.kv_version is not None:
            yield _told(span.start, f"has a KV cache of version {span.kv_version}", count=span.end - span.start)


def _overlong(spans: tuple[Span, ...]) -> Iterator[str]:
    """Iterate over turns of the model that exceed their environment's limit."""
    start, limit = 0, None
    for span in spans:
        if span.version is None:
            start, limit = span.end, span.turn_limit
        elif limit is not None and span.end - start > limit:
            yield f"the turn from token {start} on exceeds its environment's limit of {limit} tokens"
            limit = None


def _told(place: int | np.intp, what: str, *, count: int) -> str:
    return f"token {place}, which an environment wrote, {what}; {count} such"


def sampled_in(piece: Piece) -> BoolArray:
    """Return [n] whether an engine sampled each token of a piece."""
    own = shift_spans(clip_spans(piece.spans, piece.start), -piece.start)
    return sampled_mask(own, piece.end - piece.start)


def last_sampled(spans: tuple[Span, ...]) -> int:
    """Return the end of the last sampled token, 0 without any."""
    return max((span.end for span in spans if span.version is not None), default=0)
