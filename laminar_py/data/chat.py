"""Prompts as the model gets them: text as it stands, messages through the chat template of the model's tokenizer.

Called by `prompts` and `demonstrations`. Invariant: messages have the ids that transformers' `apply_chat_template`
gives them, which are those of SGLang's chat endpoint.
"""

import contextlib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from laminar_py.config.data import ChatConfig
from laminar_py.config.environment import EnvironmentConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.tokenizer import Tokenizer
from laminar_py.records.codec import IntArray

MARK = "laminarlaminar"  # content of a turn whose end is looked for
REMEDY = "mend them, name a model that was trained on chats, or write prompts as text"
Turn: TypeAlias = dict[str, object]  # of a conversation, with all its fields, as its template gets it


class TextPart(msgspec.Struct, frozen=True):
    """A part of what a turn says, e.g. `{"type": "text", "text": "2+2="}`; there is no other kind."""

    type: Literal["text"]
    text: str


class Called(msgspec.Struct, frozen=True):
    """A function that a turn calls; its arguments may be JSON in a text."""

    name: str
    arguments: str | dict[str, msgspec.Raw] = ""


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool, e.g. `{"function": {"name": "add", "arguments": "{}"}}`."""

    function: Called


class Message(msgspec.Struct, frozen=True):
    """Fields of a turn that are looked at, e.g. `{"role": "user", "content": "2+2="}`; others stay as they are."""

    role: str
    content: str | list[TextPart] | None = None
    tool_calls: list[ToolCall] | None = None


class TemplateError(ValueError):
    """Messages that cannot become text; words for a line that says where they stand."""


def read_turns(written: bytes | str) -> list[Turn]:
    """Turns of messages, given as JSON, as SGLang's chat endpoint hands them to the template.

    A null is no field, parts of a text are joined, arguments of tools are objects. Raises `TemplateError`.
    """
    return [_turn(one) for one in msgspec.json.decode(written)]


def _turn(given: Any) -> Turn:
    turn = {name: value for name, value in given.items() if value is not None}
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
                raise TemplateError(f"arguments of a tool are no JSON, {arguments!r},") from None
    return turn


class PromptEncoder:
    """Text and ids of prompts. `tokenizer` ends a response where a turn ends, once there were messages.

    With an environment prompts of messages end before the assistant's turn, which that opens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model_dir: Path,
        settings: ChatConfig,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._tools = [] if environment is None else list(environment.definitions)
        self._answers = environment is None  # else what an environment writes first opens the turn
        self.uses_template = False
        self._end = tokenizer.eos_ids[0]
        self._model_dir = model_dir
        self._settings = settings

    def write(self, prompt: str | Sequence[Turn], *, answered: bool = False) -> str:
        """The text of a prompt, as the model gets it; of one that is `answered`, up to where the answer begins.

        Raises `TemplateError`.
        """
        if isinstance(prompt, str) and (self._stays(prompt) or not prompt):
            return prompt
        messages: list[Turn] = [_asks(prompt)] if isinstance(prompt, str) else list(prompt)
        self._check(messages)
        messages = self.begun(messages)
        if not self.uses_template:
            self.tokenizer = self.tokenizer.with_ends(self._turn_ends(messages))
            self.uses_template = True
        return self.conversation(messages, answers=self._answers or answered)

    def encode(self, prompt: str | Sequence[Turn], *, answered: bool = False) -> tuple[str, IntArray]:
        """The text of a prompt and its [P] ids. Raises `TemplateError`."""
        text = self.write(prompt, answered=answered)
        return text, self.tokenizer.encode_prompt(text) if self._stays(prompt) else self.tokenizer.encode(text)

    def count(self, prompts: Sequence[str | Sequence[Turn]], texts: Sequence[str]) -> list[int]:
        """Number of ids of each prompt, given with the text that was written of it; many at a time are cheaper."""
        counts = [0] * len(texts)
        for begun in (True, False):
            places = [place for place, prompt in enumerate(prompts) if self._stays(prompt) is begun]
            found = self.tokenizer.count([texts[place] for place in places], begun=begun)
            for place, number in zip(places, found, strict=True):
                counts[place] = number
        return counts

    def end_after(self, prompt: str | Sequence[Turn]) -> int:
        """The id that ends a response to an encoded prompt: after messages the end of a turn."""
        return self._end if self._stays(prompt) else self.tokenizer.eos_ids[0]

    def template_ends(self) -> tuple[int, ...]:
        """The id that ends a turn of the assistant; none where no template is or it refuses a question."""
        if self._template is None:
            return ()
        with contextlib.suppress(TemplateError):
            return self._turn_ends([_asks(MARK)])
        return ()

    def _stays(self, prompt: str | Sequence[Turn]) -> bool:
        """True for text that is tokenized as it stands."""
        return isinstance(prompt, str) and not self._settings.texts

    def _check(self, messages: Sequence[Turn]) -> None:
        if not messages:
            raise TemplateError("messages is empty")
        if messages[-1]["role"] == "assistant":
            raise TemplateError("the last message is the assistant's, which the model is to write")
        if self._template is None:
            raise TemplateError(
                f"messages, and the tokenizer in model.path={self._model_dir} has no chat template"
            )

    @cached_property
    def _template(self) -> Any:
        """The tokenizer of transformers, if it has a template."""
        from transformers import PreTrainedTokenizerFast

        try:
            loaded = PreTrainedTokenizerFast.from_pretrained(self._model_dir, local_files_only=True)
        except Exception as error:  # noqa: BLE001 - the library raises nothing narrower
            words = " ".join(str(error).split())
            raise ConfigError(
                f"model.path={self._model_dir}: its tokenizer cannot be loaded ({words}); mend its files"
            ) from None
        return loaded if loaded.chat_template else None

    def _turn_ends(self, messages: Sequence[Turn]) -> tuple[int, ...]:
        """The special token behind the content of an assistant's turn, if the template writes one."""
        text = self.conversation([*messages, {"role": "assistant", "content": MARK}], answers=False)
        return self.tokenizer.first_special(text.rpartition(MARK)[2])

    def begun(self, messages: Sequence[Turn]) -> list[Turn]:
        """Messages behind `data.chat.system`, if that is set and they do not begin with words of the system."""
        system: list[Turn] = [{"role": "system", "content": self._settings.system}]
        is_without = self._settings.system is not None and messages[0]["role"] != "system"
        return [*system, *messages] if is_without else list(messages)

    def conversation(
        self, messages: Sequence[Turn], *, answers: bool, tools: Sequence[Mapping[str, object]] = ()
    ) -> str:
        """The text of a conversation; if the assistant `answers` next it ends where its turn begins.

        It is told of `tools`, or else of those of the environment. Raises `TemplateError`.
        """
        given: dict[str, Any] = {
            **self._settings.arguments,
            "tokenize": False,
            "add_generation_prompt": answers,
        }
        if tools or self._tools:
            given["tools"] = list(tools or self._tools)
        try:
            return str(self._template.apply_chat_template(list(messages), **given))
        except Exception as error:  # noqa: BLE001 - a template of somebody else's, which may raise anything
            words = " ".join(f"{type(error).__name__}: {error}".split())
            raise TemplateError(f"the chat template refuses the messages ({words})") from None


def _asks(text: str) -> Turn:
    return {"role": "user", "content": text}
