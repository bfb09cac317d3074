"""Prompts as the model reads them: plain text stays as it is, messages go through the model's chat template.

`problems` and `demonstrations` call it. Messages get the ids that transformers' `apply_chat_template` and SGLang's
chat endpoint give them (`tests/data/test_chat_sglang.py`).
"""

import contextlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec
import numpy as np

from laminar_py.config.data import ChatConfig
from laminar_py.config.environment import EnvironmentConfig
from laminar_py.config.registry import in_one_line
from laminar_py.config.section import ConfigError
from laminar_py.data.tokenizer import PROBE, Tokenizer
from laminar_py.records.codec import IntArray
from laminar_py.records.reasoning import TAGS, THINK_TAG

REMEDY = "fix the messages, name a model that was trained on chats, or write prompts as text"
PYTHON = {"true": "True", "false": "False"}
REASONING = ("reasoning_content", "reasoning", "thinking")  # fields of a message, often with the same text
Turn: TypeAlias = dict[str, object]  # a message with all its fields, as the template gets it


class TextPart(msgspec.Struct, frozen=True):
    """Part of a message's content, e.g. `{"type": "text", "text": "2+2="}`; other types are refused."""

    type: Literal["text"]
    text: str


class CalledFunction(msgspec.Struct, frozen=True):
    """Function that a message calls, e.g. `{"name": "add", "arguments": "{}"}`."""

    name: str
    arguments: str | dict[str, msgspec.Raw] = ""  # an object, or its JSON as text


class ToolCall(msgspec.Struct, frozen=True):
    """Call of a tool, e.g. `{"function": {"name": "add", "arguments": "{}"}}`."""

    function: CalledFunction


class Message(msgspec.Struct, frozen=True):
    """Checked fields of a message, e.g. `{"role": "user", "content": "2+2="}`; it may have others."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None


class TemplateError(ValueError):
    """Messages cannot become text. The caller adds their place in the data to the error's message."""


def read_turns(written: bytes | str) -> list[Turn]:
    """Convert the JSON of checked messages to turns, in the form that SGLang's chat endpoint gives a template.

    Omit null fields, join parts of a content, decode arguments of tools to objects. Raises `TemplateError`.
    """
    return [_read_turn(message) for message in msgspec.json.decode(written)]


def _read_turn(message: Any) -> Turn:
    """Convert a checked message to a turn: text content, and arguments of tool calls as objects.

    Raises `TemplateError` for a message without content, and for arguments that are no JSON.
    """
    turn = {name: value for name, value in message.items() if value is not None}
    if "content" not in turn and "tool_calls" not in turn:
        raise TemplateError(f"a message of {turn['role']!r} has no content")
    content = turn.get("content", "")
    turn["content"] = content if isinstance(content, str) else " ".join(part["text"] for part in content)
    for call in turn.get("tool_calls", ()):
        arguments = call["function"].get("arguments")
        if isinstance(arguments, str) and arguments:
            try:
                call["function"]["arguments"] = msgspec.json.decode(arguments)
            except msgspec.DecodeError:
                raise TemplateError(f"the arguments of a tool call are no JSON ({arguments!r})") from None
    return turn


def user_turn(text: str) -> Turn:
    """Return a message of the user."""
    return {"role": "user", "content": text}


def parts_of(turn: Turn) -> list[str]:
    """Return the texts that a template must write for a message: content, reasoning, names and values in calls."""
    written = [
        turn["content"],
        *dict.fromkeys(turn[name] for name in REASONING if isinstance(turn.get(name), str)),
    ]
    texts = [part for text in written for part in THINK_TAG.split(str(text))[::2]]
    calls: Any = turn.get("tool_calls", ())
    for call in calls:
        texts += [call["function"]["name"], *_leaves(call["function"].get("arguments"))]
    return [text.strip() for text in texts if text.strip()]


def _leaves(value: object) -> Iterator[str]:
    """Yield the names and values of a JSON value as text, null values left out."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield name
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif value is not None:
        yield value if isinstance(value, str) else json.dumps(value)


def _times_written(part: str, plain: str) -> int:
    """Count a part of a message in a text without backslashes: as it is, as JSON, or as Python writes it."""
    forms = {part, json.dumps(part)[1:-1], json.dumps(part, ensure_ascii=False)[1:-1], PYTHON.get(part, part)}
    return sum(plain.count(form) for form in {form.replace("\\", "") for form in forms})


class PromptEncoder:
    """Writes and encodes prompts. Prompts for an environment end before the assistant's turn.

    The first prompt with messages replaces `tokenizer`: from then on the end of a turn ends a response too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model_dir: Path,
        settings: ChatConfig,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = [] if environment is None else list(environment.definitions)
        self._about_tools = "" if environment is None else environment.system_text
        self._environment = environment
        self._opens_turn = environment is None  # else the environment's first text opens the assistant's turn
        self.uses_template = False
        self._end = tokenizer.eos_ids[0]
        self._model_dir = model_dir
        self._settings = settings

    def write(self, prompt: str | Sequence[Turn], *, answered: bool = False) -> str:
        """Return a prompt as the model reads it, up to the place where the assistant's answer begins.

        With an environment it ends before the assistant's turn, unless `answered`. Raises `TemplateError`.
        """
        if isinstance(prompt, str) and (self._is_plain(prompt) or not prompt):
            if prompt:
                self._check_text()
            return prompt
        messages: list[Turn] = [user_turn(prompt)] if isinstance(prompt, str) else list(prompt)
        self._check(messages)
        messages = self.with_system(messages)
        if not self.uses_template:
            self.tokenizer = self.tokenizer.with_ends(self._turn_ends(messages))
            self.uses_template = True
            self._check_shows_tools(messages)
            self._check_calls()
        return self.conversation(messages, answers=self._opens_turn or answered)

    @property
    def opening(self) -> str:
        """Text that opens the assistant's turn where an environment does that; "" where prompts end with it."""
        if self._opens_turn or not self.uses_template:
            return ""
        asked = [user_turn(PROBE)]
        return self.conversation(asked, answers=True).removeprefix(self.conversation(asked, answers=False))

    def encode(self, prompt: str | Sequence[Turn], *, answered: bool = False) -> tuple[str, IntArray]:
        """Return the text that `write` makes of a prompt, and its [P] ids. Raises `TemplateError`."""
        text = self.write(prompt, answered=answered)
        return text, self.tokenizer.encode_prompt(text) if self._is_plain(prompt) else self.tokenizer.encode(text)

    def count(self, prompts: Sequence[str | Sequence[Turn]], texts: Sequence[str]) -> list[int]:
        """Count the ids of each prompt; `texts` has the text that `write` made of each."""
        counts = [0] * len(texts)
        for plain in (True, False):
            places = [place for place, prompt in enumerate(prompts) if self._is_plain(prompt) is plain]
            numbers = self.tokenizer.count([texts[place] for place in places], begun=plain)
            for place, count in zip(places, numbers, strict=True):
                counts[place] = count
        return counts

    def encode_answer(self, prompt: str | Sequence[Turn], prompt_text: str, answer: Turn) -> tuple[str, IntArray]:
        """Return the text and ids [L] of an assistant's message behind a prompt and its text; one end id is last.

        After messages, it is the template's text of the conversation less the prompt's. Raises `TemplateError`.
        """
        text, end = str(answer["content"]), self._end
        if not self._is_plain(prompt):
            turns = [user_turn(prompt)] if isinstance(prompt, str) else prompt
            whole = self.conversation(self.with_system([*turns, answer]), answers=False)
            if not whole.startswith(prompt_text):
                raise TemplateError("the chat template writes the answer differently from how it begins one")
            text, end = whole.removeprefix(prompt_text).rstrip(), self.tokenizer.eos_ids[0]
            plain = text.replace("\\", "")  # some templates escape twice
            for part, times in Counter(parts_of(answer)).items():
                if _times_written(part, plain) < times:
                    raise TemplateError(f"the chat template leaves out {part[:40]!r} of the answer")
        ids = self.tokenizer.encode_next(text, after=prompt_text)
        has_end = len(ids) > 0 and ids[-1] in self.tokenizer.eos_ids
        return text, ids if has_end else np.append(ids, np.int32(end))

    def template_ends(self) -> tuple[int, ...]:
        """Return (id,) of the token that ends an assistant's turn; () if the model has no usable template."""
        if self._template is None:
            return ()
        with contextlib.suppress(TemplateError):
            return self._turn_ends([user_turn(PROBE)])
        return ()

    def with_system(self, messages: Sequence[Turn]) -> list[Turn]:
        """Return the messages, behind `data.chat.system` if that is set and they have no system message.

        The environment's text about its tools ends the system message.
        """
        found = list(messages)
        if self._settings.system is not None and found[0]["role"] != "system":
            found.insert(0, {"role": "system", "content": self._settings.system})
        if not self._about_tools:
            return found
        if found[0]["role"] != "system":
            return [{"role": "system", "content": self._about_tools}, *found]
        texts = [text for text in (found[0]["content"], self._about_tools) if text]
        return [{**found[0], "content": "\n\n".join(map(str, texts))}, *found[1:]]

    def conversation(
        self, messages: Sequence[Turn], *, answers: bool, tools: Sequence[Mapping[str, object]] | None = None
    ) -> str:
        """Return the text of a conversation; `answers` opens the assistant's next turn at its end.

        The template gets `tools`, by default the environment's. Raises `TemplateError`.
        """
        tools = self.tools if tools is None else tools
        options: dict[str, Any] = {
            **self._settings.arguments,
            "tokenize": False,
            "add_generation_prompt": answers,
        }
        if tools:
            options["tools"] = list(tools)
        try:
            return str(self._template.apply_chat_template(list(messages), **options))
        except Exception as error:  # noqa: BLE001 - the model's template may raise anything
            raise TemplateError(f"the chat template refuses the messages ({in_one_line(error)})") from None

    def _is_plain(self, prompt: str | Sequence[Turn]) -> bool:
        """Return whether a prompt is a text that the model reads without the chat template."""
        return isinstance(prompt, str) and not self._settings.texts

    def _check(self, messages: Sequence[Turn]) -> None:
        """Raise `TemplateError` or `ConfigError` if messages cannot be a prompt, or there is no template."""
        if not messages:
            raise TemplateError("messages is empty")
        if messages[-1]["role"] == "assistant":
            raise TemplateError("the last message is the assistant's, which the model is to write")
        if self._template is None and self._settings.texts:
            raise ConfigError(
                f"data.chat.texts=true: the tokenizer in model.path={self._model_dir} has no chat template;"
                " leave it out, or name a model that was trained on chats"
            )
        if self._template is None:
            raise TemplateError(
                f"messages, and the tokenizer in model.path={self._model_dir} has no chat template"
            )

    @cached_property
    def _template(self) -> Any:
        """The tokenizer of transformers; None without a chat template. Raises `ConfigError`."""
        from transformers import PreTrainedTokenizerFast

        try:
            loaded = PreTrainedTokenizerFast.from_pretrained(self._model_dir, local_files_only=True)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            words = " ".join(str(error).split())
            raise ConfigError(
                f"model.path={self._model_dir}: its tokenizer cannot be loaded ({words}); fix its files"
            ) from None
        return loaded if loaded.chat_template else None

    def _check_text(self) -> None:
        """Raise `ConfigError` if a prompt is a plain text, in which no tool is shown."""
        if self.tools or self._about_tools:
            raise ConfigError(
                "environment.tools: the prompts are plain texts, to which no tool is added; write messages, or set"
                " data.chat.texts=true, or set environment.tools.shown_in=prompt if your prompts tell of the tools"
            )

    def _check_shows_tools(self, messages: Sequence[Turn]) -> None:
        """Raise `ConfigError` if the template writes the same text with the environment's tools as without."""
        without = self.conversation(messages, answers=True, tools=())
        if self.tools and self.conversation(messages, answers=True) == without:
            raise ConfigError(
                f"environment.tools: the chat template in model.path={self._model_dir} shows the model no tools;"
                " set environment.tools.shown_in=system, which writes them into the system message, or prompt if"
                " your prompts tell of them"
            )

    def _check_calls(self) -> None:
        """Raise `ConfigError` if the environment does not read calls as the template writes them.

        A template that writes none is no fault: the model then learns a format from its prompts.
        """
        if self._environment is None:
            return
        name, arguments = "probe", {"value": PROBE}
        parameters = {"type": "object", "properties": {"value": {"type": "string"}}, "required": ["value"]}
        tool = {"type": "function", "function": {"name": name, "description": "Probes.", "parameters": parameters}}
        asked: list[Turn] = [user_turn("?")]
        for given in (arguments, json.dumps(arguments)):  # some templates take arguments as text alone
            call = {"type": "function", "function": {"name": name, "arguments": given}}
            answered: list[Turn] = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
            with contextlib.suppress(TemplateError):
                opening = self.conversation(asked, answers=True, tools=[tool])
                text = self.conversation(answered, answers=False, tools=[tool])
                unopened = opening.rpartition(TAGS[0])[0]  # some templates leave reasoning out of answered turns
                text = text.removeprefix(opening if text.startswith(opening) else unopened)
                if PROBE in text:
                    self._environment.check_call(text, name, arguments)
                    return

    def _turn_ends(self, messages: Sequence[Turn]) -> tuple[int, ...]:
        """Return (id,) of the special token that the template writes after an assistant's turn; () without one."""
        text = self.conversation([*messages, {"role": "assistant", "content": PROBE}], answers=False)
        return self.tokenizer.first_special(text.rpartition(PROBE)[2])
