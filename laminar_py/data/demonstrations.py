"""Demonstrations for the warm start: prompts with the response to imitate.

Owns their checks; the learner reads them once, before the supervised phase. Every response ends in one end of
sequence.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from laminar_py.data.jsonl import JsonlFile, read_jsonl
from laminar_py.data.tokenizer import Tokenizer
from laminar_py.records.codec import IntArray


class _DemonstrationLine(msgspec.Struct, frozen=True):
    prompt: str
    response: str


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and the response to it, e.g. ids of `2+2=` and of `4` with the end of sequence."""

    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [L] the last is the end of sequence


def read_demonstrations(source: JsonlFile, *, tokenizer: Tokenizer, max_tokens: int) -> list[Demonstration]:
    """Every line of a warm-start file, checked; `max_tokens` is `warm_start.tokens_per_step`.

    Raises `ConfigError` on the first line that has a fault.
    """
    end = tokenizer.eos_ids[:1]
    demonstrations = []
    for row, line, _ in read_jsonl(source, _DemonstrationLine):
        for name, text in (("prompt", line.prompt), ("response", line.response)):
            if not text:
                raise source.error(row, f"{name} is empty", value=line, remedy="write one or remove the line")
        prompt = tokenizer.encode_prompt(line.prompt)
        response = np.append(tokenizer.encode(line.response), np.array(end, dtype=np.int32))
        if len(prompt) + len(response) > max_tokens:
            raise source.error(
                row,
                f"{len(prompt) + len(response)} tokens, above warm_start.tokens_per_step={max_tokens},",
                value=line.prompt,
                remedy="raise warm_start.tokens_per_step or shorten the response",
            )
        demonstrations.append(Demonstration(prompt, response))
    return demonstrations
