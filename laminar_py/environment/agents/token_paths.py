"""Requests of an agent in tokens, joined to what the model has sampled: the longest turn whose tokens they repeat.

Owned by an `AgentEnvironment`. A request in text repeats a turn whose text it begins with: its tokens are taken
as they are, and the rest alone is tokenized. Invariant: what turns have in common is here once.
"""

from dataclasses import dataclass

import numpy as np

from laminar_py.config.environment import Words
from laminar_py.environment.protocol import SampledTurn, TokenWords
from laminar_py.records.codec import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnPath:
    """A turn of the model, and what it was sampled behind, as far as no other turn before it has that."""

    turn: int  # by number, 1 the first
    before: "TurnPath | None"  # the turn that its request went on behind
    ids: IntArray  # [n] since then, its own included
    text: str | None  # since then; None where somebody asked in tokens
    num_ids: int  # up to its end
    num_chars: int


class TokenPaths:
    """Turns of the model with all that they were sampled behind, in tokens and as text."""

    def __init__(self, words: Words) -> None:
        self._words = words
        self._paths: list[TurnPath] = []
        self._before: TurnPath | None = None  # of the request that is not answered yet
        self._rest: IntArray = np.empty(0, np.int32)
        self._text: str | None = None

    def join(self, ids: IntArray) -> TokenWords:
        """Words to the model for tokens that it goes on behind."""
        repeated: list[TurnPath] = []
        for path in self._paths:
            start = 0 if path.before is None else path.before.num_ids
            same = np.array_equal(ids[start : path.num_ids], path.ids)
            if same and len(ids) > path.num_ids and (path.before is None or path.before in repeated):
                repeated.append(path)
        known = max(repeated, key=lambda path: path.num_ids, default=None)
        return self._behind(known, ids if known is None else ids[known.num_ids :], text=None)

    def join_text(self, text: str) -> TokenWords:
        """Words to the model for a text that it goes on behind."""
        repeated: list[TurnPath] = []
        for path in self._paths:
            start = 0 if path.before is None else path.before.num_chars
            same = path.text is not None and text[start : path.num_chars] == path.text
            if same and len(text) > path.num_chars and (path.before is None or path.before in repeated):
                repeated.append(path)
        known = max(repeated, key=lambda path: path.num_chars, default=None)
        rest = text if known is None else text[known.num_chars :]
        return self._behind(known, self._words.encoded(rest, begins=known is None), text=rest)

    def answered(self, turn: SampledTurn, *, number: int) -> None:
        """Note the turn that answers what was joined last."""
        before, text = self._before, None
        if self._text is not None:
            text = f"{self._text}{self._words.said(turn.ids)}"
        ids = np.concatenate([self._rest, turn.ids])
        num_chars = (0 if before is None else before.num_chars) + len(text or "")
        num_ids = (0 if before is None else before.num_ids) + len(ids)
        self._paths.append(
            TurnPath(turn=number, before=before, ids=ids, text=text, num_ids=num_ids, num_chars=num_chars)
        )

    def _behind(self, known: TurnPath | None, rest: IntArray, *, text: str | None) -> TokenWords:
        self._before, self._rest, self._text = known, rest, text
        return TokenWords(rest, 0 if known is None else known.turn)
