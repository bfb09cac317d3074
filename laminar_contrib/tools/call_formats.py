"""Formats in which model families write tool calls.

The chat templates of Qwen2.5, Qwen3, and Llama 3.1 to 3.3 define the formats. Parsing never raises; an unreadable
call becomes a `BrokenCall` (`tests/environment/tools/test_calls.py`).
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from laminar_py.config import ConfigError
from laminar_py.records.reasoning import THINK_TAG

Json: TypeAlias = Any  # a value that JSON can express

SHOWN = 160  # characters of a call, in a message
SPACE = re.compile(r"\s*")
NEVER = re.compile(r"(?!)")


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


@dataclass(frozen=True, slots=True)
class FoundCall:
    """A call with its place in the text of a turn, the marks around it included."""

    start: int
    end: int
    call: Call


class CallFormat(Protocol):
    """Format of a family's tool calls."""

    example: str  # a call, as a text about the tools shows it to the model
    result_form: str  # format of a tool's result, with `{}` for the result
    mark: re.Pattern[str]  # begins a call anywhere in a text
    bare: re.Pattern[str]  # begins a call where the model has written nothing before but its reasoning

    def read_calls(self, text: str, start: int) -> list[FoundCall]:
        """Return the call whose mark, or whose bare form, is at `start`, and calls that follow it directly."""
        ...


def outside_reasoning(text: str) -> str:
    """Return the text outside of `<think>` and `</think>`. Unclosed reasoning lasts to the end.

    If the first tag is `</think>`, all text before it is reasoning.
    """
    pieces = THINK_TAG.split(text)  # text, tag, text, ..., text
    return "\n".join(
        piece
        for tag, piece in zip(["", *pieces[1::2]], pieces[::2], strict=True)
        if tag == "</think>" or (not tag and pieces[1:2] != ["</think>"])
    )


def read_turn(turn: str, form: CallFormat) -> tuple[str, list[Call]]:
    """Return the text of a turn without its calls, reasoning included, and the calls outside of its reasoning.

    Marks of reasoning inside a call's arguments are data. If a turn closes reasoning that it did not open, all
    text before is reasoning.
    """
    texts, calls = list[str](), list[Call]()
    place, is_reasoning, at_start = 0, False, True
    tag, mark = THINK_TAG.search(turn), form.mark.search(turn)
    while True:
        tag, mark = _at_or_behind(place, turn, tag), _at_or_behind(place, turn, mark)
        is_bare = at_start and form.bare.match(turn, place) is not None
        start = place if is_bare else len(turn) if mark is None else mark.start()
        if not is_reasoning and start < (len(turn) if tag is None else tag.start()):
            for found in form.read_calls(turn, start):
                texts.append(turn[place : found.start])
                calls.append(found.call)
                place = found.end
            at_start = False
            continue
        if tag is None:
            return "".join([*texts, turn[place:]]), calls
        if not is_reasoning:
            at_start &= not turn[place : tag.start()].strip()
        if tag[1] == "</think>" and not is_reasoning:  # all before it was reasoning
            calls.clear()
        texts.append(turn[place : tag.end()])
        at_start |= not calls and tag[1] == "</think>"
        is_reasoning, place = tag[1] == "<think>", tag.end()


def _at_or_behind(place: int, text: str, found: re.Match[str] | None) -> re.Match[str] | None:
    """Return the first match at or behind `place`; `found` is the first behind an earlier place, or None."""
    return found if found is None or found.start() >= place else found.re.search(text, place)


class HermesCalls:
    """JSON between marks, with text around: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`."""

    example = '<tool_call>{"name": "<tool>", "arguments": {"<argument>": <value>}}</tool_call>'
    result_form = "{}"
    mark, bare = re.compile("<tool_call>"), NEVER
    _close = "</tool_call>"

    def read_calls(self, text: str, start: int) -> list[FoundCall]:
        """Return the call; an unclosed call is broken and lasts to the end."""
        begin = start + len(self.mark.pattern)
        call, end = _read_call(text, begin, "arguments")
        closed = text.find(self._close, begin if end is None else end)
        if closed < 0:
            return [FoundCall(start, len(text), BrokenCall(f"no {self._close} after it"))]
        if end is not None and text[end:closed].strip():
            call = BrokenCall(f"more than one JSON object before {self._close}")
        return [FoundCall(start, closed + len(self._close), call)]


class LlamaCalls:
    """JSON alone, or after text and a tag, e.g. `<|python_tag|>{"name": "add", "parameters": {"a": 1}}`.

    Semicolons or line breaks separate several calls. No text follows them.
    """

    example = '{"name": "<tool>", "parameters": {"<argument>": <value>}}'
    result_form = "{}"
    mark = re.compile(r"<\|python_tag\|>")
    bare = re.compile(r'\s*\{\s*"(?:name|type|parameters)"\s*:')  # other JSON may be an answer
    _between = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")

    def read_calls(self, text: str, start: int) -> list[FoundCall]:
        """Return the calls, up to the first one without an end."""
        found: list[FoundCall] = []
        end: int | None = start
        while end is not None:
            begin = self._after(text, end)
            if found and text[begin : begin + 1] != "{":
                break
            call, end = _read_call(text, begin, "parameters", "arguments")
            found.append(FoundCall(start, len(text) if end is None else end, call))
            start = found[-1].end
        return found

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
        self.example = " or ".join(f"<{name}>{argument}</{name}>" for name, argument in arguments.items())
        self.mark = re.compile(f"<({'|'.join(map(re.escape, arguments))})>")
        self.bare = NEVER

    def read_calls(self, text: str, start: int) -> list[FoundCall]:
        """Return the call; an unclosed call is broken and lasts to the end."""
        opening = self.mark.match(text, start)
        assert opening is not None, "a mark begins at `start`"
        name = opening[1]
        closed = text.find(f"</{name}>", opening.end())
        if closed < 0:
            return [FoundCall(start, len(text), BrokenCall(f"no </{name}> after <{name}>"))]
        call = ToolCall(name, {self._arguments[name]: text[opening.end() : closed]})
        return [FoundCall(start, closed + len(f"</{name}>"), call)]


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
FORMATS: Mapping[CallFamily, JsonCalls] = {CallFamily.HERMES: HermesCalls(), CallFamily.LLAMA: LlamaCalls()}


def check_family(family: CallFamily, text: str, call: ToolCall, *, field: str) -> None:
    """Raise `ConfigError` if `family`, of the setting `field`, reads another call in a text than the one written.

    Tags are exempt: a chat template has no definitions of such tools.
    """
    if family is CallFamily.TAGS or _reads(family, text, call):
        return
    other = next((name for name in FORMATS if _reads(name, text, call)), None)
    remedy = "name another model, or write tags" if other is None else f"set {other.value}"
    raise ConfigError(
        f"{field}={family.value}: the model's chat template writes a call as {text[:SHOWN]!r}; {remedy}"
    )


def _reads(family: CallFamily, text: str, call: ToolCall) -> bool:
    return read_turn(text, FORMATS[family])[1] == [call]
