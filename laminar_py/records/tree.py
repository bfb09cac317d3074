"""Tree of a response: what each of its tokens was sampled behind, and the sequences that a learner sees. Pure.

Tokens stand in the order in which they came. Most follow all that stand before them, and the response is one
sequence behind its prompt. A span that `follows` others begins a branch: the conversation went on from an earlier
place, or anew. Used by a running stream, by the packer and wherever tokens of a context are counted.

Invariant: of all sequences together each token is `own` in exactly one; in others it is context alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from laminar_py.records.codec import BoolArray, IntArray
from laminar_py.records.spans import ANEW, Span


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens [start, end) of a response that follow each other, the first of them behind the first `follows`."""

    start: int
    end: int
    follows: int  # `ANEW`: behind nothing, not even the prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPath:
    """Tokens that a model sees in one context, e.g. of a response of 9 whose last 4 follow its first 3:

    `TokenPath(has_prompt=True, parts=((0, 3, False), (5, 9, True)))`, where the first 3 are of another sequence.
    """

    has_prompt: bool
    parts: tuple[tuple[int, int, bool], ...]  # (start, end, own) in the response

    @property
    def length(self) -> int:
        """Response tokens in it."""
        return sum(end - start for start, end, _ in self.parts)

    def num_tokens(self, prompt: int) -> int:
        """Tokens in it behind a prompt of so many."""
        return self.length + (prompt if self.has_prompt else 0)

    @property
    def places(self) -> IntArray:
        """[n] places in the response of its tokens."""
        return np.concatenate([np.arange(start, end, dtype=np.int32) for start, end, _ in self.parts])

    @property
    def own(self) -> BoolArray:
        """[n] True on tokens that belong to no other sequence."""
        return np.concatenate([np.full(end - start, own) for start, end, own in self.parts])


def is_tree(spans: Iterable[Span]) -> bool:
    """True where a part of the response does not follow all that stands before it."""
    return any(span.follows is not None for span in spans)


def context_of(spans: Sequence[Span]) -> TokenPath:
    """Context of what comes next: the tokens from the root of the tree to the end of the response."""
    runs = _runs(spans)
    has_prompt, parts = _behind(runs, runs[-1].end if runs else 0)
    return TokenPath(has_prompt=has_prompt, parts=tuple((start, end, True) for start, end in parts))


def context_tokens(prompt: int, spans: Sequence[Span]) -> int:
    """Tokens of the context of what comes next, behind a prompt of so many."""
    if not is_tree(spans):
        return prompt + (spans[-1].end if spans else 0)
    return context_of(spans).num_tokens(prompt)


def sequences_of(spans: Sequence[Span]) -> list[TokenPath]:
    """Sequences of a response, one for each end of its tree, in the order of these ends."""
    runs = _runs(spans)
    continued = {run.follows for run in runs}
    owned: set[int] = set()  # starts of runs
    found = []
    for leaf in runs:
        if leaf.end in continued:
            continue
        has_prompt, behind = _behind(runs, leaf.end)
        whole = {run.start: run.end for run in runs}
        parts = [(start, end, whole[start] == end and start not in owned) for start, end in behind]
        owned.update(start for start, _, own in parts if own)
        found.append(TokenPath(has_prompt=has_prompt, parts=tuple(parts)))
    return found


def packed_tokens(prompt: int, spans: Sequence[Span]) -> int:
    """Tokens of all sequences of a response, each with its context, behind a prompt of so many."""
    if not is_tree(spans):
        return prompt + (spans[-1].end if spans else 0)
    return sum(sequence.num_tokens(prompt) for sequence in sequences_of(spans))


def turn_ends(spans: Sequence[Span]) -> list[int]:
    """Places in the response behind each turn of the model, in the order in which it took them."""
    is_last = [after.version is None for after in spans[1:]] + [True]
    return [span.end for span, ends in zip(spans, is_last, strict=False) if ends and span.version is not None]


def _runs(spans: Iterable[Span]) -> list[TokenRun]:
    """Runs of a response, in order."""
    found: list[TokenRun] = []
    for span in spans:
        if span.follows is None and found:
            found[-1] = TokenRun(found[-1].start, span.end, found[-1].follows)
        else:
            found.append(TokenRun(span.start, span.end, 0 if span.follows is None else span.follows))
    return found


def _behind(runs: Sequence[TokenRun], end: int) -> tuple[bool, list[tuple[int, int]]]:
    """Path to the token before place `end`: whether it begins with the prompt, and its parts in order."""
    parts: list[tuple[int, int]] = []
    while end > 0:
        run = next(one for one in runs if one.start < end <= one.end)
        parts.append((run.start, end))
        end = run.follows
    return end != ANEW, parts[::-1]
