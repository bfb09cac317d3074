"""Requests of an agent in tokens, joined to what the model has sampled: the longest turn whose tokens they repeat.

Owned by an `AgentEnvironment`. A request in text repeats a turn whose text it begins with: its tokens are taken
as they are, and the rest alone is tokenized.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from laminar_py.config.environment import Words
from laminar_py.environment.protocol import SampledTurn, TokenWords
from laminar_py.records.codec import IntArray


@dataclass(frozen=True, slots=True)
class _Path:
    turn: int  # of the model, 1 the first
    ids: IntArray  # [n] up to its end
    text: str


class TokenPaths:
    """Turns of the model with all that they were sampled behind, in tokens and as text."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._paths: list[_Path] = []
        self._asked = ""

    def join(self, ids: IntArray) -> TokenWords:
        """Words to the model for tokens that it goes on behind."""
        self._asked = ""
        return self._behind(ids)

    def join_text(self, text: str) -> TokenWords:
        """Words to the model for a text that it goes on behind."""
        self._asked = text
        known = self._longest(lambda path: bool(path.text) and text.startswith(path.text))
        if known is None:
            return self._behind(self._words.encoded(text, begins=True))
        rest = self._words.encoded(text.removeprefix(known.text), begins=False)
        return self._behind(np.concatenate([known.ids, rest]))

    def answered(self, turn: SampledTurn, *, number: int) -> None:
        """Note the turn that answers what was joined last."""
        text = f"{self._asked}{self._words.said(turn.ids)}" if self._asked else ""
        self._paths.append(_Path(number, np.concatenate([turn.context, turn.ids]), text))

    def _behind(self, ids: IntArray) -> TokenWords:
        def begins(path: _Path) -> bool:
            return len(ids) > len(path.ids) and bool((ids[: len(path.ids)] == path.ids).all())

        known = self._longest(begins)
        return TokenWords(ids, 0) if known is None else TokenWords(ids[len(known.ids) :], known.turn)

    def _longest(self, fits: Callable[[_Path], bool]) -> _Path | None:
        return max((path for path in self._paths if fits(path)), key=lambda path: len(path.ids), default=None)
