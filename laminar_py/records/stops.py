"""Stop strings: texts at whose first completion a turn of the model ends. Pure.

A replica keeps the tokens of such a turn up to the token that completes a stop string (`tokens_to_stop`). The
environment gets the text before the stop string (`text_before_stop`).
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from laminar_py.records.codec import IntArray

Decode: TypeAlias = Callable[[IntArray], str] | None  # text of [n] ids, special tokens included; None: not at hand
Last: TypeAlias = Callable[[int], IntArray]  # the last n tokens of a turn, fewer at its start
SLACK = 8  # characters before a window's stop strings, since a window may begin within a character


def text_before_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there is one; else the whole text."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))], bool(places)


def has_stop(ids: IntArray, stops: Sequence[str], decode: Decode) -> bool:
    """Whether [n] tokens complete one of the stop strings."""
    if not stops:
        return False
    assert decode is not None, f"stop strings {stops} need a tokenizer"
    return text_before_stop(decode(ids), stops)[1]


def tokens_to_stop(last: Last, new: IntArray, stops: Sequence[str], decode: Decode) -> int | None:
    """Return how many of [n] `new` tokens a turn has up to the first token that completes a stop string.

    Return None if no token does. `last` gives the turn's tokens before the new ones, which complete none; only as
    many are read as a stop string may reach back, so that the cost does not grow with the turn.
    """
    if not stops:
        return None
    assert decode is not None, f"stop strings {stops} need a tokenizer"
    enough, size = max(map(len, stops)) + SLACK, 1
    while len(before := last(size)) == size and len(decode(before)) < enough:
        size *= 2
    window, first = np.concatenate([before, new]), len(before)
    counts = range(1, len(new) + 1) if has_stop(window, stops, decode) else ()
    return next((n for n in counts if has_stop(window[: first + n], stops, decode)), None)
