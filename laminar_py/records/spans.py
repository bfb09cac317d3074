"""Spans say which weights generated each response token; a tree of spans says which tokens each one followed.
Pure.

The running stream, the ledger, the packer and the audit share this arithmetic. Every tuple of spans that a
function here returns is in order, holds no empty span, and merges neighbours that differ in nothing.

Tokens stand in the order in which they came. Most follow all tokens before them, and the response is one sequence
behind its prompt. A span that `follows` fewer begins a branch: the conversation continued from an earlier place,
or started with an empty context. A learner sees one sequence for each leaf of the tree. Each token is trained on
(`own`) in exactly one of these sequences; the others have it as context (`tests/records/test_spans.py`).
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from laminar_py.records.codec import BoolArray, IntArray

NEW_CONVERSATION = -1  # value of `Span.follows`: the span begins a context of its own, without the prompt


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Response tokens [start, end) and the weights that generated them."""

    version: int | None
    start: int
    end: int
    kv_version: int | None = None


class Span(VersionSpan, frozen=True, array_like=True, kw_only=True):
    """Weights `version` generated response tokens [start, end), e.g. `Span(7, 0, 41)`.

    `kv_version` is set where the tokens attended to a KV cache of older weights; it is the oldest of these. A span
    without a version was written by an environment, e.g. `Span(None, 41, 60)`. A response is a tree where a span
    follows fewer tokens than all before it, e.g. `Span(None, 60, 75, follows=41)`. An environment may limit the
    next turn of the model, e.g. `Span(None, 41, 60, turn_limit=64)`.
    """

    follows: int | None = None  # leading response tokens that the span stands behind; None: all before it
    turn_limit: int | None = None  # cap on the tokens of the model's next turn


_decoder = msgspec.json.Decoder(tuple[Span, ...])
_encoder = msgspec.json.Encoder()


def add_span(spans: list[Span], span: Span) -> None:
    """Append a span to `spans`, or extend the last one if both touch and differ in nothing else."""
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
    """Merge neighbours that differ in nothing, e.g. 7: [0, 3), 7: [3, 5) to 7: [0, 5)."""
    merged: list[Span] = []
    for span in spans:
        add_span(merged, span)
    return tuple(merged)


def clip_spans(spans: Iterable[Span], start: int, end: int = sys.maxsize) -> tuple[Span, ...]:
    """Cut spans to the tokens [start, end)."""
    clipped: list[Span] = []
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            follows = span.follows if span.start >= start else None
            add_span(clipped, msgspec.structs.replace(span, start=first, end=last, follows=follows))
    return tuple(clipped)


def replace_spans(spans: Iterable[Span], by: tuple[Span, ...]) -> tuple[Span, ...]:
    """Replace the spans of some tokens by `by`, or append them.

    E.g. 7: [0, 5) by 8: [4, 9) makes 7: [0, 4), 8: [4, 9).
    """
    spans = tuple(spans)
    if not by or not spans or spans[-1].end <= by[0].start:
        return merge_spans((*spans, *by))
    return merge_spans((*clip_spans(spans, 0, by[0].start), *by, *clip_spans(spans, by[-1].end)))


def shift_spans(spans: Iterable[Span], by: int) -> tuple[Span, ...]:
    """Move the spans of one stream by `by` tokens; each follows the span before it."""
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
    """Versions that generated these tokens or the KV cache behind them."""
    return {v for span in spans for v in (span.version, span.kv_version) if v is not None}


def sampled_versions(spans: Iterable[Span]) -> list[int]:
    """Versions of the spans that an engine sampled, in order; spans of an environment have none."""
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
    """Number of the model's turns: stretches of sampled tokens, each of one or more versions."""
    turns, sampled = 0, False
    for span in spans:
        turns += span.version is not None and not sampled
        sampled = span.version is not None
    return turns


def turn_ends(spans: Sequence[Span]) -> list[int]:
    """Place in the response behind each turn of the model, in the order of the turns."""
    is_last = [after.version is None for after in spans[1:]] + [True]
    return [span.end for span, ends in zip(spans, is_last, strict=False) if ends and span.version is not None]


def encode_spans(spans: tuple[Span, ...]) -> str:
    """JSON of spans, such as `[[7,0,41,null,null]]`; a span with a turn limit has a sixth entry."""
    rows = [span if span.turn_limit is not None else msgspec.structs.astuple(span)[:-1] for span in spans]
    return _encoder.encode(rows).decode()


def decode_spans(text: str) -> tuple[Span, ...]:
    """Spans of JSON that `encode_spans` wrote. Raises `msgspec.DecodeError`."""
    return _decoder.decode(text)


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Response tokens [start, end) that follow each other, e.g. `TokenRun(60, 75, 41)` behind the first 41."""

    start: int
    end: int
    follows: int  # leading response tokens before the run; `NEW_CONVERSATION`: no tokens, not even the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPath:
    """Tokens that a model sees in one context, e.g. the last 4 of a response of 9 behind its first 3:

    `TokenPath(has_prompt=True, parts=((0, 3, False), (5, 9, True)))`, where another sequence owns the first 3.
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
        """[n] place of each token in the response."""
        return np.concatenate([np.arange(start, end, dtype=np.int32) for start, end, _ in self.parts])

    @property
    def own(self) -> BoolArray:
        """[n] True on tokens that the learner trains on in this sequence."""
        return np.concatenate([np.full(end - start, own) for start, end, own in self.parts])


def is_tree(spans: Iterable[Span]) -> bool:
    """True where a part of the response does not follow all tokens before it."""
    return any(span.follows is not None for span in spans)


def context_of(spans: Sequence[Span]) -> TokenPath:
    """Context of the next token: the path from the root of the tree to the end of the response."""
    runs = _runs(spans)
    has_prompt, parts = _path_to(runs, runs[-1].end if runs else 0)
    return TokenPath(has_prompt=has_prompt, parts=tuple((start, end, True) for start, end in parts))


def context_tokens(prompt: int, spans: Sequence[Span]) -> int:
    """Number of tokens in the context of the next token, with a prompt of `prompt` tokens."""
    if not is_tree(spans):
        return prompt + (spans[-1].end if spans else 0)
    return context_of(spans).num_tokens(prompt)


def sequences_of(spans: Sequence[Span]) -> list[TokenPath]:
    """Sequences of a response, one for each leaf of its tree, in the order of the leaves."""
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


def packed_tokens(prompt: int, spans: Sequence[Span]) -> int:
    """Number of tokens in all sequences of a response, each with its context and a prompt of `prompt` tokens."""
    if not is_tree(spans):
        return prompt + (spans[-1].end if spans else 0)
    return sum(sequence.num_tokens(prompt) for sequence in sequences_of(spans))


def _runs(spans: Iterable[Span]) -> list[TokenRun]:
    """Merge spans that follow each other to runs, in order."""
    found: list[TokenRun] = []
    for span in spans:
        if span.follows is None and found:
            found[-1] = TokenRun(found[-1].start, span.end, found[-1].follows)
        else:
            found.append(TokenRun(span.start, span.end, 0 if span.follows is None else span.follows))
    return found


def _path_to(runs: Sequence[TokenRun], end: int) -> tuple[bool, list[tuple[int, int]]]:
    """Path from the root to place `end`: whether it begins with the prompt, and its parts (start, end) in
    order."""
    parts: list[tuple[int, int]] = []
    while end > 0:
        run = next(run for run in runs if run.start < end <= run.end)
        parts.append((run.start, end))
        end = run.follows
    return end != NEW_CONVERSATION, parts[::-1]
