"""Demonstrations for the warm start: prompts with the response to imitate.

Owns their checks; the learner reads them once, before the supervised phase. Every response ends in one end of
sequence, after messages in the token that ends a turn of the assistant.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from laminar_py.data.chat import REMEDY, Message, PromptEncoder, TemplateError, Turn, read_turns
from laminar_py.data.sources import DataSource, read_records, written_field
from laminar_py.records.codec import IntArray


class _DemonstrationRow(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str | list[Message] | None = None
    messages: list[Message] | None = None
    response: str | None = None


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and the response to it, e.g. of row 6, ids of `2+2=` and of `4` with the end of sequence."""

    row: int  # of its source
    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [L] the last is the end of sequence

    @property
    def num_tokens(self) -> int:
        """P + L."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Demonstrations and their source, e.g. the 7,800 of warm_start.jsonl."""

    source: DataSource
    all: list[Demonstration]


def read_demonstrations(
    source: DataSource, *, encoder: PromptEncoder, max_tokens: int | None
) -> list[Demonstration]:
    """Every row of a warm start's source, checked; `max_tokens` is `warm_start.tokens_per_step`, None: any length.

    Raises `ConfigError` on the first row that has a fault.
    """
    demonstrations = []
    for row, line, given in read_records(source, _DemonstrationRow):
        try:
            asked, answer = _parts(source, row, line, given)
            _, prompt = encoder.encode(asked, answered=True)
        except TemplateError as error:
            raise source.error(row, str(error), value=given, remedy=REMEDY) from None
        end = np.array([encoder.end_after(asked)], dtype=np.int32)
        made = Demonstration(row, prompt, np.append(encoder.tokenizer.encode(answer), end))
        if max_tokens is not None and made.num_tokens > max_tokens:
            raise source.error(
                row,
                f"{made.num_tokens} tokens, above warm_start.tokens_per_step={max_tokens},",
                value=asked,
                remedy="raise warm_start.tokens_per_step or shorten the response",
            )
        demonstrations.append(made)
    return demonstrations


def read_texts(source: DataSource, *, encoder: PromptEncoder, every: int = 1) -> Iterator[tuple[int, str, str]]:
    """Row, prompt as the model gets it, and response of every so many-th demonstration; they have no fault."""
    for row, line, given in islice(read_records(source, _DemonstrationRow), 0, None, every):
        asked, answer = _parts(source, row, line, given)
        yield row, encoder.write(asked, answered=True), answer


def _parts(source: DataSource, row: int, line: _DemonstrationRow, given: bytes) -> tuple[str | list[Turn], str]:
    """Prompt and response of a row; without a response of its own that is the last message.

    Raises `TemplateError`, or `ConfigError` where one is missing.
    """
    asked, answer = _asked(line, given), line.response
    if answer is None and isinstance(asked, list) and asked and asked[-1]["role"] == "assistant":
        asked, last = asked[:-1], asked[-1]
        if "tool_calls" in last:
            raise TemplateError("the last message calls a tool, which a response of text does not")
        answer = str(last["content"])
    for name, text in (("prompt", asked), ("response", answer)):
        if text is None:
            remedy = f"write one, name its column in {source.field}.columns, or end messages with the assistant's"
            raise source.error(row, f"no `{name}`", value=given, remedy=remedy)
        if not text:
            raise source.error(row, f"{name} is empty", value=given, remedy="write one or remove the line")
    assert asked is not None
    assert answer is not None
    return asked, answer


def _asked(line: _DemonstrationRow, given: bytes) -> str | list[Turn] | None:
    if isinstance(line.prompt, str):
        return line.prompt
    if line.prompt is not None:
        return read_turns(written_field(given, "prompt"))
    return None if line.messages is None else read_turns(written_field(given, "messages"))
