"""Demonstrations for the warm start: prompts with the responses to imitate, read once before the supervised phase.

Every response ends in one end of sequence; after messages this is the token that ends a turn of the assistant.
"""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from laminar_py.data.chat import (
    REMEDY,
    Message,
    PromptEncoder,
    TemplateError,
    Turn,
    names_of_tools,
    parts_of,
    read_turns,
)
from laminar_py.data.sources import DataSource, read_records, written_field
from laminar_py.records.codec import IntArray


class _DemonstrationRow(msgspec.Struct, frozen=True, kw_only=True):
    """Checked fields of a row, e.g. `{"prompt": "2+2=", "response": "4"}` or `{"messages": [...]}`."""

    prompt: str | list[Message] | None = None
    messages: list[Message] | None = None
    response: str | None = None
    tools: Any = None  # definitions, which the template gets from the environment instead


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A prompt with its response, e.g. of row 6: ids of `2+2=`, and of `4` with the end of sequence."""

    row: int  # of its source
    prompt: str  # text of `prompt_ids`
    response: str
    prompt_ids: IntArray  # [P]
    response_ids: IntArray  # [L] the last is the end of sequence

    @property
    def num_tokens(self) -> int:
        """Number of prompt and response tokens, P + L."""
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """Demonstrations and their source, e.g. the 7,800 of warm_start.jsonl."""

    source: DataSource
    all: list[Demonstration]

    @property
    def digest(self) -> str:
        """Digest of all prompts and responses."""
        digest = blake2b(digest_size=16)
        for one in self.all:
            digest.update(msgspec.msgpack.encode((one.prompt, one.response)))
        return digest.hexdigest()


def read_demonstrations(
    source: DataSource, *, encoder: PromptEncoder, max_tokens: int | None
) -> list[Demonstration]:
    """Read, check and encode every row of a source.

    Raises `ConfigError` for the first row that is invalid or has more than `max_tokens` tokens (None: any length).
    """
    demonstrations = []
    for row, line, written in read_records(source, _DemonstrationRow):
        if others := names_of_tools(line.tools) - encoder.tool_names:
            remedy = "name the tools in environment, as RL has them, or leave the column out"
            raise source.error(
                row, f"`tools` has {min(others)[:40]!r}, unlike the environment,", value=written, remedy=remedy
            )
        try:
            prompt, answer = _prompt_and_answer(source, row, line, written)
            prompt_text, prompt_ids = encoder.encode(prompt, answered=True)
            response, response_ids = encoder.encode_answer(prompt, prompt_text, answer)
        except TemplateError as error:
            raise source.error(row, str(error), value=written, remedy=REMEDY) from None
        made = Demonstration(
            row=row, prompt=prompt_text, response=response, prompt_ids=prompt_ids, response_ids=response_ids
        )
        if max_tokens is not None and made.num_tokens > max_tokens:
            raise source.error(
                row,
                f"{made.num_tokens} tokens, above warm_start.tokens_per_step={max_tokens},",
                value=prompt,
                remedy="raise warm_start.tokens_per_step or shorten the response",
            )
        demonstrations.append(made)
    return demonstrations


def _prompt_and_answer(
    source: DataSource, row: int, line: _DemonstrationRow, given: bytes
) -> tuple[str | list[Turn], Turn]:
    """Return the prompt of a row, and the answer as a message of the assistant; `given` is the row's JSON.

    Without a field `response`, the last message is the answer. Raises `TemplateError`, and `ConfigError` for a
    missing or empty prompt or response.
    """
    prompt: str | list[Turn] | None = line.prompt if isinstance(line.prompt, str) else None
    if prompt is None and (line.prompt is not None or line.messages is not None):
        prompt = read_turns(written_field(given, "messages" if line.prompt is None else "prompt"))
    answer: Turn | None = None if line.response is None else {"role": "assistant", "content": line.response}
    if answer is None and isinstance(prompt, list) and prompt and prompt[-1]["role"] == "assistant":
        prompt, answer = prompt[:-1], prompt[-1]
    written = None if answer is None else answer["content"] or parts_of(answer)
    for name, value in (("prompt", prompt), ("response", written)):
        if value is None:
            remedy = f"write it, name its column in {source.field}.columns, or end the messages with an answer"
            raise source.error(row, f"no `{name}`", value=given, remedy=remedy)
        if not value:
            raise source.error(row, f"{name} is empty", value=given, remedy=f"write a {name} or remove the line")
    assert prompt is not None
    assert answer is not None
    return prompt, answer
