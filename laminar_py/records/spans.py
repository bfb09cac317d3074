"""Arithmetic of spans, which say for every response token under which weights it was generated. Pure.

Used wherever spans meet: a running stream, a trajectory's life, the ledger, the audit. Invariant: what these
functions return is in order, none is empty, and no two neighbours that touch say the same.
"""

import sys
from collections.abc import Iterable

import msgspec
import numpy as np

from laminar_py.records.codec import BoolArray

ANEW = -1  # as what a span `follows`: a context of its own, without the prompt


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens [start, end) and the weights that made them."""

    version: int | None
    start: int
    end: int
    kv_version: int | None = None


class Span(VersionSpan, frozen=True, array_like=True, kw_only=True):
    """Response tokens [start, end) were generated under `version`, e.g. `Span(7, 0, 41)`.

    `kv_version` is set where they attended to a KV cache that older weights had made: the oldest of those.
    Without a version nobody generated them: an environment wrote them, e.g. `Span(None, 41, 60)`. A response is a
    tree where spans follow others than all before them (`records.tree`), e.g. `Span(None, 60, 75, follows=41)`.
    What an environment wrote may limit the turn of the model behind it, e.g. `Span(None, 41, 60, turn_limit=64)`.
    """

    follows: int | None = None  # leading tokens of the response that its first one is behind; None: all before it
    turn_limit: int | None = None  # the most tokens of the turn of the model behind it


_decoder = msgspec.json.Decoder(tuple[Span, ...])
_encoder = msgspec.json.Encoder()


def add_span(spans: list[Span], span: Span) -> None:
    """Append a span; it becomes one with the last if they touch and say the same, and it follows that."""
    last = spans[-1] if spans else None
    if (
        last is not None
        and last.version == span.version
        and last.kv_version == span.kv_version
        and last.turn_limit == span.turn_limit
        and last.end == span.start
        and span.follows is None
    ):
        spans[-1] = msgspec.structs.replace(last, end=span.end)
    else:
        spans.append(span)


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Neighbours that say the same as one, e.g. 7: [0, 3), 7: [3, 5) as 7: [0, 5)."""
    merged: list[Span] = []
    for span in spans:
        add_span(merged, span)
    return tuple(merged)


def clip_spans(spans: Iterable[Span], start: int, end: int = sys.maxsize) -> tuple[Span, ...]:
    """Spans of tokens [start, end) alone."""
    clipped: list[Span] = []
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            follows = span.follows if span.start >= start else None
            add_span(clipped, msgspec.structs.replace(span, start=first, end=last, follows=follows))
    return tuple(clipped)


def replace_spans(spans: Iterable[Span], by: tuple[Span, ...]) -> tuple[Span, ...]:
    """`by` in place of what `spans` say of the same tokens.

    E.g. 7: [0, 5) by 8: [4, 9) makes 7: [0, 4), 8: [4, 9).
    """
    spans = tuple(spans)
    if not by or not spans or spans[-1].end <= by[0].start:
        return merge_spans((*spans, *by))
    return merge_spans((*clip_spans(spans, 0, by[0].start), *by, *clip_spans(spans, by[-1].end)))


def versions_of(spans: Iterable[Span]) -> set[int]:
    """Versions that had a part in these tokens, those behind their KV cache included."""
    return {v for span in spans for v in (span.version, span.kv_version) if v is not None}


def sampled_versions(spans: Iterable[Span]) -> list[int]:
    """Versions of the spans that an engine sampled, in order; none of what an environment wrote."""
    return [span.version for span in spans if span.version is not None]


def num_sampled(spans: Iterable[Span]) -> int:
    """Tokens that an engine sampled."""
    return sum(span.end - span.start for span in spans if span.version is not None)


def sampled_mask(spans: Iterable[Span], length: int) -> BoolArray:
    """[length] True on tokens that an engine sampled."""
    mask = np.zeros(length, np.bool_)
    for span in spans:
        mask[span.start : span.end] = span.version is not None
    return mask


def num_turns(spans: Iterable[Span]) -> int:
    """Turns of the model: stretches of sampled tokens, however many versions each has."""
    turns, sampled = 0, False
    for span in spans:
        turns += span.version is not None and not sampled
        sampled = span.version is not None
    return turns


def shift_spans(spans: Iterable[Span], by: int) -> tuple[Span, ...]:
    """Spans of a stream, moved on by `by` tokens; each follows the one before."""
    return tuple(
        msgspec.structs.replace(span, start=span.start + by, end=span.end + by, follows=None) for span in spans
    )


def covers(spans: Iterable[Span], start: int, end: int) -> bool:
    """True if the spans lie end to end from `start` to `end`, none of them empty."""
    for span in spans:
        if span.start != start or span.end <= start:
            return False
        start = span.end
    return start == end


def encode_spans(spans: tuple[Span, ...]) -> str:
    """JSON such as `[[7,0,41,null,null]]`; a span that limits a turn has a sixth entry."""
    rows = [span if span.turn_limit is not None else msgspec.structs.astuple(span)[:-1] for span in spans]
    return _encoder.encode(rows).decode()


def decode_spans(text: str) -> tuple[Span, ...]:
    """The spans in such JSON; `msgspec.DecodeError` if it is none."""
    return _decoder.decode(text)
