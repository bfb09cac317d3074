"""Reads demonstrations for the warm start: prompts with the responses to imitate.

Every response ends in one end of sequence; after messages this is the token that ends a turn of the assistant.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from laminar_py.data import (
    REMEDY,
    DataSource,
    Demonstration,
    Message,
    PromptEncoder,
    TemplateError,
    Turn,
    parts_of,
    read_records,
    read_turns,
    written_field,
)


class _DemonstrationRow(msgspec.Struct, frozen=True, kw_only=True):
    """Checked fields of a row, e.g. `{"prompt": "2+2=", "response": "4"}` or `{"messages": [...]}`."""

    prompt: str | list[Message] | None = None
    messages: list[Message] | None = None
    response: str | None = None
    tools: Any = None  # definitions, which the template gets from the environment instead


def read_demonstrations(source: DataSource, *, encoder: PromptEncoder) -> list[Demonstration]:
    """Read, check and encode every row of a source. Raises `ConfigError` for the first row that is invalid."""
    demonstrations = []
    for row, line, written in read_records(source, _DemonstrationRow):
        if others := _tool_names(line.tools) - _tool_names(encoder.tools):
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
        demonstrations.append(
            Demonstration(
                row=row, prompt=prompt_text, response=response, prompt_ids=prompt_ids, response_ids=response_ids
            )
        )
    return demonstrations


def _tool_names(tools: Any) -> set[str]:
    """Return the names in definitions of tools, or in their JSON; another value counts as a name."""
    if isinstance(tools, str):
        with contextlib.suppress(msgspec.DecodeError):
            tools = msgspec.json.decode(tools)
    listed = tools if isinstance(tools, list) else [tools] if tools else []
    functions = [tool.get("function", tool) if isinstance(tool, Mapping) else tool for tool in listed]
    return {str(each.get("name", each) if isinstance(each, Mapping) else each) for each in functions}


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
