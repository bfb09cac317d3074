"""Spans: which weights generated each response token, and which tokens each token followed. Pure.

The running stream, the ledger, the packer and the audit share this arithmetic. Every tuple of spans that a
function here returns is in order and has no empty span; equal neighbours are merged.

Response tokens are numbered in the order of their arrival. Usually a token follows all tokens before it, and the
response is one sequence behind its prompt. A span that `follows` fewer tokens starts a branch: the conversation
continued from an earlier place, or started with an empty context. A learner sees one sequence for each leaf of the
tree. It trains on each token in exactly one sequence, which owns (`own`) the token; other sequences have the token
as context (`tests/records/test_spans.py`).
"""

import sys
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from laminar_py.records.codec import BoolArray, IntArray

NEW_CONVERSATION = -1  # value of `Span.follows`: the span starts an empty context, without the prompt


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens [start, end) and the weights that generated them; `Span` explains the fields."""

    version: int | None
    start: int
    end: int
    kv_version: int | None = None


class Span(VersionSpan, frozen=True, array_like=True, kw_only=True):
    """Weights `version` generated response tokens [start, end), e.g. `Span(7, 0, 41)`.

    `kv_version` is the oldest version in the KV cache that the tokens attended to, if it is older than `version`.
    An environment wrote a span without a version, e.g. `Span(None, 41, 60)`. A span that follows fewer tokens than
    all before it makes the response a tree, e.g. `Span(None, 60, 75, follows=41)`. An environment may limit the
    model's next turn, e.g. `Span(None, 41, 60, turn_limit=64)`, or `stop=("Observation:",)`.
    """

    follows: int | None = None  # number of leading response tokens before the span; None: all tokens before it
    turn_limit: int | None = None  # cap on the tokens of the model's next turn
    stop: tuple[str, ...] = ()  # stop strings of the model's next turn


_decoder = msgspec.json.Decoder(tuple[Span, ...])
_encoder = msgspec.json.Encoder()


def add_span(spans: list[Span], span: Span) -> None:
    """Append a span to the list `spans`, or extend the last span if the two touch and are otherwise equal."""
    last = spans[-1] if spans else None
    if (
        last is not None
        and last.version == span.version
        and last.kv_version == span.kv_version
        and (last.turn_limit, last.stop) == (span.turn_limit, span.stop)
        and last.end == span.start
        and span.follows is None
    ):
        spans[-1] = msgspec.structs.replace(last, end=span.end)
    else:
        spans.append(span)


def merge_spans(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Merge touching spans that are otherwise equal, e.g. version 7: [0, 3), [3, 5) to 7: [0, 5)."""
    merged: list[Span] = []
    for span in spans:
        add_span(merged, span)
    return tuple(merged)


def clip_spans(spans: Iterable[Span], start: int, end: int = sys.maxsize) -> tuple[Span, ...]:
    """Return the parts of the spans within tokens [start, end); a span that is cut at `start` loses `follows`."""
    clipped: list[Span] = []
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            follows = span.follows if span.start >= start else None
            add_span(clipped, msgspec.structs.replace(span, start=first, end=last, follows=follows))
    return tuple(clipped)


def replace_spans(spans: Iterable[Span], by: tuple[Span, ...]) -> tuple[Span, ...]:
    """Replace the spans of the tokens that `by` covers, or append `by` if it lies behind all spans.

    E.g. version 7: [0, 5) replaced by 8: [4, 9) gives 7: [0, 4), 8: [4, 9).
    """
    spans = tuple(spans)
    if not by or not spans or spans[-1].end <= by[0].start:
        return merge_spans((*spans, *by))
    return merge_spans((*clip_spans(spans, 0, by[0].start), *by, *clip_spans(spans, by[-1].end)))


def shift_spans(spans: Iterable[Span], by: int) -> tuple[Span, ...]:
    """Move the spans of one stream by `by` tokens, and clear `follows`: they follow all tokens before them."""
    return tuple(
        msgspec.structs.replace(span, start=span.start + by, end=span.end + by, follows=None) for span in spans
    )


def covers(spans: Iterable[Span], start: int, end: int) -> bool:
    """True if the spans lie end to end from `start` to `end` and none is empty."""
    for span in spans:
        if span.start != start or span.end <= start:
            return False
        start = span.end
    return start == end


def versions_of(spans: Iterable[Span]) -> set[int]:
    """Versions that generated these tokens, and the oldest versions in their KV caches."""
    return {v for span in spans for v in (span.version, span.kv_version) if v is not None}


def sampled_versions(spans: Iterable[Span]) -> list[int]:
    """Version of each span that an engine sampled, in order; an environment's spans are left out."""
    return [span.version for span in spans if span.version is not None]


def num_sampled(spans: Iterable[Span]) -> int:
    """Number of tokens that an engine sampled."""
    return sum(span.end - span.start for span in spans if span.version is not None)


def sampled_mask(spans: Iterable[Span], length: int) -> BoolArray:
    """[length] True on tokens that an engine sampled."""
    mask = np.zeros(length, np.bool_)
    for span in spans:
        mask[span.start : span.end] = span.version is not None
    return mask


def num_turns(spans: Iterable[Span]) -> int:
    """Number of the model's turns; a turn is a run of sampled spans, of one or more versions."""
    turns, sampled = 0, False
    for span in spans:
        turns += span.version is not None and not sampled
        sampled = span.version is not None
    return turns


def turn_ends(spans: Sequence[Span]) -> list[int]:
    """End of each turn that the model sampled, in order: the number of response tokens up to this end."""
    is_last = [after.version is None for after in spans[1:]] + [True]
    return [span.end for span, ends in zip(spans, is_last, strict=False) if ends and span.version is not None]


def last_answer(spans: Sequence[Span]) -> Span:
    """Return the last span that an environment wrote, an empty span if there is none."""
    return next((span for span in reversed(spans) if span.version is None), Span(None, 0, 0))


def encode_spans(spans: tuple[Span, ...]) -> str:
    """Encode spans as JSON, e.g. `[[7,0,41,null,null]]`; the entries of a turn's limits follow if it has any."""
    rows = [
        span if span.stop else msgspec.structs.astuple(span)[: 5 if span.turn_limit is None else 6]
        for span in spans
    ]
    return _encoder.encode(rows).decode()


def decode_spans(text: str) -> tuple[Span, ...]:
    """Decode JSON of `encode_spans`. Raises `msgspec.DecodeError`."""
    return _decoder.decode(text)


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Response tokens [start, end) that follow each other, e.g. `TokenRun(60, 75, 41)` behind the first 41."""

    start: int
    end: int
    follows: int  # leading response tokens before the run; `NEW_CONVERSATION`: no tokens, not even the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPath:
    """Response tokens that a model sees in one context, and which of them the sequence owns for training.

    E.g. the first 3 of 9 response tokens, owned by another sequence, then the last 4:
    `TokenPath(has_prompt=True, parts=((0, 3, False), (5, 9, True)))`.
    """

    has_prompt: bool
    parts: tuple[tuple[int, int, bool], ...]  # (start, end, own) in the response

    @property
    def length(self) -> int:
        """Number of response tokens on the path, n."""
        return sum(end - start for start, end, _ in self.parts)

    def num_tokens(self, prompt: int) -> int:
        """Number of tokens on the path, with a prompt of `prompt` tokens where the path has one."""
        return self.length + (prompt if self.has_prompt else 0)

    @property
    def places(self) -> IntArray:
        """[n] index of each token in the response."""
        return np.concatenate([np.arange(start, end, dtype=np.int32) for start, end, _ in self.parts])

    @property
    def own(self) -> BoolArray:
        """[n] True on tokens that this sequence owns."""
        return np.concatenate([np.full(end - start, own) for start, end, own in self.parts])


def is_tree(spans: Iterable[Span]) -> bool:
    """True if a span does not follow all tokens before it."""
    return any(span.follows is not None for span in spans)


def context_of(spans: Sequence[Span]) -> TokenPath:
    """Return the context of the next token: the path from the tree's root to the last token, all owned."""
    runs = _runs(spans)
    has_prompt, parts = _path_to(runs, runs[-1].end if runs else 0)
    return TokenPath(has_prompt=has_prompt, parts=tuple((start, end, True) for start, end in parts))


def context_tokens(prompt: int, spans: Sequence[Span]) -> int:
    """Number of tokens in the context of the next token, with a prompt of `prompt` tokens."""
    if not is_tree(spans):
        return prompt + (spans[-1].end if spans else 0)
    return context_of(spans).num_tokens(prompt)


def sequences_of(spans: Sequence[Span]) -> list[TokenPath]:
    """Return one sequence for each leaf of a response's tree; the first sequence with a whole run owns the run."""
    runs = _runs(spans)
    run_ends = {run.start: run.end for run in runs}
    continued = {run.follows for run in runs}
    owned: set[int] = set()  # starts of runs that an earlier sequence owns
    found = []
    for leaf in runs:
        if leaf.end in continued:
            continue
        has_prompt, path = _path_to(runs, leaf.end)
        parts = [(start, end, run_ends[start] == end and start not in owned) for start, end in path]
        owned.update(start for start, _, own in parts if own)
        found.append(TokenPath(has_prompt=has_prompt, parts=tuple(parts)))
    return found


def _runs(spans: Iterable[Span]) -> list[TokenRun]:
    """Join spans into runs, in order: a span with `follows` starts a run, and other spans extend the last run."""
    found: list[TokenRun] = []
    for span in spans:
        if span.follows is None and found:
            found[-1] = TokenRun(found[-1].start, span.end, found[-1].follows)
        else:
            found.append(TokenRun(span.start, span.end, 0 if span.follows is None else span.follows))
    return found


def _path_to(runs: Sequence[TokenRun], end: int) -> tuple[bool, list[tuple[int, int]]]:
    """Return the path from the root to token `end`: whether the prompt begins it, and its parts (start, end)."""
    parts: list[tuple[int, int]] = []
    while end > 0:
        run = runs[bisect_left(runs, end, key=lambda run: run.end)]
        parts.append((run.start, end))
        end = run.follows
    return end != NEW_CONVERSATION, parts[::-1]
