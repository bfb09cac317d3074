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

Json: TypeAlias = Any  # a value that JSON can express

SHOWN = 160  # characters of a call, in a message
THINK_TAG = re.compile("(</?think>)")
SPACE = re.compile(r"\s*")
BARE = re.compile(r"\s*\{")  # a call without a mark may begin so


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

    result_form: str  # format of a tool's result, with `{}` for the result

    def next_calls(self, text: str, place: int, *, at_start: bool) -> list[FoundCall]:
        """Return the next call behind a place, with the calls that follow it directly; [] if there is none.

        `at_start` says that the model has written nothing before this place but its reasoning.
        """
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


def read_turn(turn: str, form: CallFormat, *, begun: bool = False) -> tuple[str, list[Call]]:
    """Return the text of a turn without its calls, reasoning included, and the calls outside of its reasoning.

    Marks of reasoning inside a call's arguments are data. The turn starts inside reasoning if `begun` is True, or
    if it closes reasoning that it did not open.
    """
    texts, calls = list[str](), list[Call]()
    place, is_reasoning, at_start = 0, begun, True
    found: list[FoundCall] = []  # the next calls behind `place`
    is_stale = True
    while True:
        tag = THINK_TAG.search(turn, place)
        if not is_reasoning and (is_stale or (found and found[0].start < place)):
            found, is_stale = form.next_calls(turn, place, at_start=at_start), False
        if not is_reasoning and found and (tag is None or found[0].start < tag.start()):
            for one in found:
                texts.append(turn[place : one.start])
                calls.append(one.call)
                place = one.end
            at_start, is_stale = False, True
            continue
        if tag is None:
            return "".join([*texts, turn[place:]]), calls
        if not is_reasoning:
            at_start &= not turn[place : tag.start()].strip()
        if tag[1] == "</think>" and not is_reasoning:  # all before it was reasoning
            calls.clear()
        texts.append(turn[place : tag.end()])
        was_reasoning, is_reasoning, place = is_reasoning, tag[1] == "<think>", tag.end()
        if not is_reasoning:
            at_start |= not calls and (was_reasoning or tag[1] == "</think>")
            is_stale |= at_start and BARE.match(turn, place) is not None


class HermesCalls:
    """JSON between marks, with text around: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`."""

    result_form = "{}"
    mark, _close = "<tool_call>", "</tool_call>"  # around a call

    def next_calls(self, text: str, place: int, *, at_start: bool) -> list[FoundCall]:
        """Return the next call; an unclosed call is broken and lasts to the end."""
        begin = text.find(self.mark, place)
        if begin < 0:
            return []
        start = begin + len(self.mark)
        call, end = _read_call(text, start, "arguments")
        closed = text.find(self._close, start if end is None else end)
        if closed < 0:
            return [FoundCall(begin, len(text), BrokenCall(f"no {self._close} after it"))]
        if end is not None and text[end:closed].strip():
            call = BrokenCall(f"more than one JSON object before {self._close}")
        return [FoundCall(begin, closed + len(self._close), call)]


class LlamaCalls:
    """JSON alone, or after text and a tag, e.g. `<|python_tag|>{"name": "add", "parameters": {"a": 1}}`.

    Semicolons or line breaks separate several calls. No text follows them.
    """

    result_form = "{}"
    mark = "<|python_tag|>"  # before a call
    _begin = re.compile(r'\s*\{\s*"(?:name|type|parameters)"\s*:')  # other JSON may be an answer
    _between = re.compile(r"(?:[\s;]|<\|python_tag\|>)*")

    def next_calls(self, text: str, place: int, *, at_start: bool) -> list[FoundCall]:
        """Return the next calls, up to the first one without an end."""
        begin = place if at_start and self._begin.match(text, place) else text.find(self.mark, place)
        found: list[FoundCall] = []
        end: int | None = begin
        while end is not None and end >= 0:
            start = self._after(text, end)
            if found and text[start : start + 1] != "{":
                break
            call, end = _read_call(text, start, "parameters", "arguments")
            found.append(FoundCall(begin, len(text) if end is None else end, call))
            begin = found[-1].end
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
        self.marking = re.compile(f"<({'|'.join(map(re.escape, arguments))})>")

    def next_calls(self, text: str, place: int, *, at_start: bool) -> list[FoundCall]:
        """Return the next call; an unclosed call is broken and lasts to the end."""
        opening = self.marking.search(text, place)
        if opening is None:
            return []
        name, start = opening[1], opening.end()
        closed = text.find(f"</{name}>", start)
        if closed < 0:
            return [FoundCall(opening.start(), len(text), BrokenCall(f"no </{name}> after <{name}>"))]
        call = ToolCall(name, {self._arguments[name]: text[start:closed]})
        return [FoundCall(opening.start(), closed + len(f"</{name}>"), call)]


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
