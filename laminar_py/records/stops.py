"""Stop strings: texts at whose first completion a turn of the model ends. Pure.

A replica keeps the tokens of such a turn up to the token that completes a stop string (`tokens_to_stop`). The
environment gets the text before the stop string (`text_before_stop`).
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from laminar_py.records.codec import IntArray

Decode: TypeAlias = Callable[[IntArray], str] | None  # text of [n] ids, special tokens included; None: not at hand
SLACK = 8  # characters before a window's stop strings, since a window may begin within a character


def text_before_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there is one; else the whole text."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places, default=len(text))], bool(places)


def tokens_to_stop(before: IntArray, new: IntArray, stops: Sequence[str], decode: Decode) -> int | None:
    """Return how many of [n] `new` tokens a turn has up to the first token that completes a stop string.

    Return None if no token does. The turn's tokens [b] `before` the new tokens complete none.
    """
    if not stops:
        return None
    assert decode is not None, f"stop strings {stops} need a tokenizer"
    enough, size = max(map(len, stops)) + SLACK, 1
    while size < len(before) and len(decode(before[-size:])) < enough:
        size *= 2
    window = np.concatenate([before[-size:], new])
    first = len(window) - len(new)
    counts = range(1, len(new) + 1) if text_before_stop(decode(window), stops)[1] else ()
    return next((n for n in counts if text_before_stop(decode(window[: first + n]), stops)[1]), None)
