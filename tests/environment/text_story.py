"""Trajectories whose turns are any text, over a tokenizer of bytes."""

import tokenizers
from tokenizers import decoders, pre_tokenizers
from tokenizers.models import BPE

from laminar_py.data.tokenizer import Tokenizer
from tests.environment.turns import END, appended, first_turn, make_host


def byte_tokenizer() -> Tokenizer:
    """An id for each byte."""
    words = ["<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = tokenizers.Tokenizer(BPE({word: id for id, word in enumerate(words)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend, eos_ids=(END,))


class TextStory:
    """A trajectory in an environment of `make`; `move` has another process go on, with nothing that was saved."""

    def __init__(self, make, problem, folder, **limits):
        self._make, self._folder, self._limits, self._processes = make, folder, limits, 0
        self._tokenizer = byte_tokenizer()
        self._turn = first_turn(problem)
        self.move()

    def move(self):
        self._processes += 1
        folder = self._folder / str(self._processes)
        self._host = make_host(self._make, folder, tokenizer=self._tokenizer, **self._limits)

    async def say(self, text=None):
        """Answer to what the model says, or to the problem, and its text; None where it writes none."""
        if text is not None:
            self._turn = appended(self._turn, [*self._tokenizer.encode(text), END], 3)
        answer = await self._host.answer(self._turn)
        if answer.ids is None:
            return answer, None
        self._turn = appended(self._turn, answer.ids)
        return answer, self._tokenizer.decode(answer.ids)
