"""Formats in which model families write tool calls.

The chat templates of Qwen2.5, Qwen3, and Llama 3.1 to 3.3 define the formats. Parsing never raises; an unreadable
call becomes a `BrokenCall` (`tests/environment/tools/test_calls.py`).
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

Json: TypeAlias = Any  # a value that JSON can express

THINK_TAG = re.compile("(</?think>)")
SPACE = re.compile(r"\s*")


class CallFamily(StrEnum):
    """Formats in which models write tool calls."""

    HERMES = "hermes"
    LLAMA = "llama"
    TAGS = "tags"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, e.g. `ToolCall("calculator", {"expression": "12*3"})`."""

    name: str
    arguments: Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class BrokenCall:
    """A tool call that cannot be read, e.g. `BrokenCall("no </tool_call> after it")`."""

    fault: str


Call: TypeAlias = ToolCall | BrokenCall


class CallFormat(Protocol):
    """Format of a family's tool calls."""

    result_form: str  # format of a tool's result, with `{}` for the result

    def parse(self, text: str) -> Iterator[Call]:
        """Yield the calls in a turn's text, without its reasoning."""
        ...


def outside_reasoning(turn: str, *, begun: bool = False) -> str:
    """Return the text of a turn outside of `<think>` and `</think>`. Unclosed reasoning lasts to the end.

    The turn starts inside reasoning if `begun` is True, or if its first tag is `</think>`.
    """
    pieces = THINK_TAG.split(turn)  # text, tag, text, ..., text
    is_reasoning = begun or pieces[1:2] == ["</think>"]
    texts = []
    for place, piece in enumerate(pieces):
        if place % 2:
            is_reasoning = piece == "<think>"
        elif not is_reasoning:
            texts.append(piece)
    return "\n".join(texts)


class HermesCalls:
    """JSON between marks, with text around: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`."""

    result_form = "{}"
    mark, _close = "<tool_call>", "</tool_call>"  # around a call

    def parse(self, text: str) -> Iterator[Call]:
        """Yield each call; an unclosed one is broken."""
        place = text.find(self.mark)
        while place >= 0:
            start = place + len(self.mark)
            call, end = _read_call(text, start, "arguments")
            closed = text.find(self._close, start if end is None else end)
            if closed < 0:
                yield BrokenCall(f"no {self._close} after it")
                return
            alone = end is None or not text[end:closed].strip()
            yield call if alone else BrokenCall(f"more than one JSON object before {self._close}")
            place = text.find(self.mark, closed)


class LlamaCalls:
    """JSON alone, or after text and a tag, e.g. `<|python_tag|>{"name": "add", "parameters": {"a": 1}}`.

    Semicolons or line breaks separate several calls. No text follows them.
    """

    result_form = "{}"
    mark = "<|python_tag|>"  # before a call
    _begin = re.compile(r'\s*\{\s*"(?:name|type|parameters)"\s*:')  # other JSON may be an answer
    _between = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")

    def parse(self, text: str) -> Iterator[Call]:
        """Yield each call, up to the first one without an end."""
        place: int | None = 0 if self._begin.match(text) else text.find(self.mark)
        first = True
        while place is not None and place >= 0:
            place = self._after(text, place)
            if not first and text[place : place + 1] != "{":
                return
            call, place = _read_call(text, place, "parameters", "arguments")
            yield call
            first = False

    def _after(self, text: str, place: int) -> int:
        """Skip separators and return the next position."""
        separators = self._between.match(text, place)
        return place if separators is None else separators.end()


JsonCalls: TypeAlias = HermesCalls | LlamaCalls


class TagCalls:
    """The tool's name as a tag around its only argument, e.g. `<calculator>12*3</calculator>`, with text around.

    `arguments` has the name of that argument for each tool. Other tags are text.
    """

    result_form = "<result>{}</result>"

    def __init__(self, arguments: Mapping[str, str]) -> None:
        self._arguments = arguments
        self.marking = re.compile(f"<({'|'.join(map(re.escape, arguments))})>")

    def parse(self, text: str) -> Iterator[Call]:
        """Yield each call; an unclosed one is broken."""
        place = 0
        while opening := self.marking.search(text, place):
            name, start = opening[1], opening.end()
            closed = text.find(f"</{name}>", start)
            if closed < 0:
                yield BrokenCall(f"no </{name}> after <{name}>")
                return
            yield ToolCall(name, {self._arguments[name]: text[start:closed]})
            place = closed


def _read_call(text: str, start: int, *keys: str) -> tuple[Call, int | None]:
    """Read a JSON call after `start`, whose arguments have one of these keys.

    Returns the call and the position of its end, or None as position if the JSON is broken.
    """
    space = SPACE.match(text, start)
    try:
        read, end = DECODER.raw_decode(text, start if space is None else space.end())
    except (ValueError, RecursionError) as error:
        fault = error.msg if isinstance(error, json.JSONDecodeError) else "too deep or with too large a number"
        return BrokenCall(f"it is not JSON ({fault})"), None
    if isinstance(read, dict) and isinstance(read.get("name"), str):
        arguments = next((read[key] for key in keys if key in read), None)
        if isinstance(arguments, dict):
            return ToolCall(read["name"], arguments), end
    return BrokenCall(f'write {{"name": "...", "{keys[0]}": {{...}}}}'), end


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_no_number)
