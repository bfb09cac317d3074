"""Turns as text and ids: what the model said, and what an environment's answer is to a model of its kind.

Owned by `environment.host`. Invariant: what a model sampled is decoded and never encoded again; an answer is
encoded by itself and appended, so no earlier id depends on it. Special tokens in what an environment says are text
like any other: it cannot end or begin a turn. Who speaks in ids (`TokenWords`) has them taken as they are.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from laminar_py.config.data import ChatConfig
from laminar_py.config.environment import EnvironmentConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.chat import PROBE, PromptEncoder, TemplateError, Turn
from laminar_py.data.tokenizer import load_tokenizer
from laminar_py.environment.protocol import Observation, Rewrite, Role
from laminar_py.records.codec import IntArray

OTHER_MARK = "turntwoturntwo"  # content of other turns
REMEDY = "name a model whose chat template only appends, or write prompts as text"


class TextCodec(Protocol):
    """Tokenizer as a writer needs it."""

    @property
    def special_texts(self) -> tuple[str, ...]:
        """Names of the special tokens, the longest first."""
        ...

    @property
    def num_ids(self) -> int:
        """Ids of the model."""
        ...

    def encode(self, text: str) -> IntArray:
        """[n] ids of a text, none added."""
        ...

    def encode_literal(self, text: str) -> IntArray:
        """[n] ids of a text in which no special token is known."""
        ...

    def encode_prompt(self, text: str) -> IntArray:
        """[n] ids of a text behind those with which a text begins."""
        ...

    def decode(self, ids: IntArray, *, special: bool = False) -> str:
        """Text of ids."""
        ...


class Template(Protocol):
    """Chat template as a writer needs it."""

    def with_system(self, messages: Sequence[Turn]) -> list[Turn]:
        """Messages behind the system's words, where those are to begin a conversation."""
        ...

    def conversation(
        self, messages: Sequence[Turn], *, answers: bool, tools: Sequence[Mapping[str, object]] = ()
    ) -> str:
        """Text of messages and `tools`; if the model `answers` next it ends where its turn begins."""
        ...


class PlainWriter:
    """Answers as they stand, for prompts that are text, e.g. `PlainWriter(tokenizer, stop_ids=(1,))`."""

    def __init__(self, codec: TextCodec, *, stop_ids: Sequence[int]) -> None:
        self._codec = codec
        self._stop_ids = frozenset(stop_ids)

    def said(self, ids: IntArray) -> str:
        """Text of a turn of the model, without what ended it."""
        return self._codec.decode(ids[:-1] if self.has_ended(ids) else ids, special=True)

    def has_ended(self, ids: IntArray) -> bool:
        """True where the last token ends a turn of the model; its limit has cut it where none does."""
        return len(ids) > 0 and int(ids[-1]) in self._stop_ids

    def first(self, observation: Observation) -> IntArray:
        """[n] ids of what an environment says before the first turn."""
        return self.next(observation)

    def next(self, observation: Observation, *, is_cut: bool = False) -> IntArray:
        """[n] ids of what an environment says after a turn, which a limit may have cut. Raises `TemplateError`."""
        return self._codec.encode_literal("".join(observation.messages))

    def anew(self, rewrite: Rewrite) -> IntArray:
        """[n] ids of a conversation up to the next turn of the model. Raises `TemplateError`."""
        if not isinstance(rewrite.messages, str):
            raise TemplateError("a Rewrite has messages where prompts are text; give it a text")
        return self.encoded(rewrite.messages, begins=True)

    def encoded(self, text: str, *, begins: bool) -> IntArray:
        """[n] ids of a text as it stands; if it `begins` a conversation, behind those that a text begins with."""
        ids = self._codec.encode_literal(text)
        if not begins:
            return ids
        whole, alone = self._codec.encode_prompt(PROBE), self._codec.encode(PROBE)
        return np.concatenate([whole[: len(whole) - len(alone)], ids])

    def check(self, ids: IntArray) -> None:
        """Raise `TemplateError` where there is no such token."""
        outside = (ids < 0) | (ids >= self._codec.num_ids)
        if outside.any():
            raise TemplateError(f"token {ids[outside][0]} is none of the {self._codec.num_ids} of the model")


class ChatWriter(PlainWriter):
    """Answers as messages, as the model's chat template writes them between two turns of the assistant.

    What the assistant said earlier stays as it was sampled, whatever the template would make of it now. The
    template is asked once how it writes so many messages of a role, with marks in their place. Raises
    `ConfigError` if it does not just append: then what it writes depends on what came before.
    """

    def __init__(self, codec: TextCodec, template: Template, *, stop_ids: Sequence[int], model: str) -> None:
        super().__init__(codec, stop_ids=stop_ids)
        self._template = template
        self._faults = {role: fault for role in Role if (fault := self._fault(role))}
        if len(self._faults) == len(Role):
            raise ConfigError(f"model.path={model}: {self._faults[Role.USER]}, so turns cannot follow; {REMEDY}")
        self._around = lru_cache(maxsize=64)(self._pieces)

    def first(self, observation: Observation) -> IntArray:
        """[n] ids of messages before the first turn, and of its beginning. Raises `TemplateError`."""
        return self._written(observation, is_first=True)

    def next(self, observation: Observation, *, is_cut: bool = False) -> IntArray:
        """[n] ids of what is between the end of a turn and the beginning of the next. Raises `TemplateError`.

        Behind a turn that its limit has cut, they begin with the token that the template ends a turn with.
        """
        if fault := self._faults.get(observation.role):
            raise TemplateError(f"{fault}, in a message of role {observation.role}")
        ids = self._written(observation, is_first=False)
        return ids if is_cut else ids[1:]

    def _written(self, observation: Observation, *, is_first: bool) -> IntArray:
        """Ids of the texts, and of what the template has around them, with the end of a turn before them."""
        texts = observation.messages
        return self._filled(self._around(observation.role, len(texts), is_first), texts)

    def anew(self, rewrite: Rewrite) -> IntArray:
        """[n] ids of a conversation up to the next turn of the model. Raises `TemplateError`."""
        if rewrite.turns[-1]["role"] == "assistant":
            raise TemplateError("a Rewrite ends before a turn of the assistant; let another speak last")
        hidden = HiddenWords(self._codec.special_texts)
        turns: list[Turn] = [hidden.hide(dict(turn)) for turn in rewrite.turns]
        tools = hidden.hide(list(rewrite.tools))
        text = self._template.conversation(self._template.with_system(turns), answers=True, tools=tools)
        return np.concatenate(
            [
                self._codec.encode(piece) if word is None else self._codec.encode_literal(word)
                for piece, word in hidden.parts(text)
            ]
        )

    def _filled(self, around: Sequence[IntArray], texts: Sequence[str]) -> IntArray:
        """Ids of texts, and of what is before, between and behind them."""
        between = [
            part
            for text, after in zip(texts, around[1:], strict=True)
            for part in (self._codec.encode_literal(text), after)
        ]
        return np.concatenate([around[0], *between])

    def _pieces(self, role: Role, count: int, is_first: bool) -> list[IntArray]:
        """Ids of what the template writes before, between and behind so many messages of a role."""
        turns: list[Turn] = [{"role": role.value, "content": _mark(place)} for place in range(count)]
        if is_first:
            return self._parted(self._opening(turns), count)
        end, text = self._between(PROBE, turns)
        before, *others = self._parted(text, count)
        return [np.concatenate([end, before]), *others]

    def _parted(self, text: str, count: int) -> list[IntArray]:
        """Ids of what is before, between and behind so many marks."""
        pieces = []
        for place in range(count):
            before, found, text = text.partition(_mark(place))
            if not found:
                raise TemplateError("the chat template leaves out a message, or writes messages in another order")
            pieces.append(before)
        return [self._codec.encode(piece) for piece in (*pieces, text)]

    def _opening(self, turns: list[Turn]) -> str:
        """Text of messages behind a prompt, and of the beginning of the assistant's turn."""
        asked: list[Turn] = [{"role": Role.USER.value, "content": PROBE}]
        before = self._template.conversation(asked, answers=False)
        text = self._template.conversation([*asked, *turns], answers=True)
        if not text.startswith(before):
            raise TemplateError("the chat template writes a first message otherwise once there is another")
        return text.removeprefix(before)

    def _between(self, said: str, turns: list[Turn]) -> tuple[IntArray, str]:
        """[1] token that ends a turn in which the assistant `said` something, and the text behind it."""
        spoken: list[Turn] = [{"role": Role.USER.value, "content": "?"}, {"role": "assistant", "content": said}]
        _, found, after = self._template.conversation([*spoken, *turns], answers=True).partition(said)
        if not found:
            raise TemplateError("the chat template leaves out what the assistant said")
        return self._ended(after)

    def _ended(self, text: str) -> tuple[IntArray, str]:
        """[1] first token of a text, which must end a turn, and the text behind it."""
        ids = self._codec.encode(text)
        if not len(ids) or int(ids[0]) not in self._stop_ids:
            raise TemplateError("the chat template writes no token behind a turn that ends it")
        return ids[:1], text.removeprefix(self._codec.decode(ids[:1], special=True))

    def _fault(self, role: Role) -> str:
        """Why messages of a role cannot follow a turn; "" where they can."""
        answer: list[Turn] = [{"role": role.value, "content": "5"}]
        try:
            (_, one), (_, other) = self._between(PROBE, answer), self._between(OTHER_MARK, answer)
        except TemplateError as error:
            return str(error)
        return "" if one == other else "the chat template writes an answer in dependence of what came before"


class HiddenWords:
    """Names of special tokens in what is given to a template, hidden from it and from the tokenizer behind it.

    E.g. `hidden.hide({"content": "a <s> b"})` has another word for `<s>`, which nobody can know before.
    """

    def __init__(self, words: Sequence[str]) -> None:
        nonce = secrets.token_hex(8)
        self._names = {word: f"{nonce}x{place}x" for place, word in enumerate(words)}
        self._words = {name: word for word, name in self._names.items()}
        self._special = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")

    def hide(self, value: Any) -> Any:
        """Value of JSON with these words hidden in all of its texts."""
        if isinstance(value, str):
            return self._special.sub(lambda found: self._names[found[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(one) for one in value]
        return value

    def parts(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Text in parts: what is as it was written, with None, and each hidden word."""
        pattern = "|".join(map(re.escape, self._words)) or r"(?!)"
        for piece in re.split(f"({pattern})", text):
            if piece:
                yield piece, self._words.get(piece)


def _mark(place: int) -> str:
    """Stand-in for the text of a message, for the template."""
    return f"{OTHER_MARK}{place}x"


def open_writer(model: Path, chat: ChatConfig, settings: EnvironmentConfig, *, messages: bool) -> PlainWriter:
    """The writer for a model, by its chat template where prompts are `messages`. Raises `ConfigError`."""
    tokenizer = load_tokenizer(model)
    if not messages:
        return PlainWriter(tokenizer, stop_ids=tokenizer.eos_ids)
    encoder = PromptEncoder(tokenizer, model, chat, settings)
    tokenizer = tokenizer.with_ends(encoder.template_ends())
    return ChatWriter(tokenizer, encoder, stop_ids=tokenizer.eos_ids, model=str(model))


def turns_of(ids: IntArray, spans: Sequence[Any]) -> list[IntArray]:
    """Ids of each turn of the model in a response; consecutive spans of an engine are one turn."""
    turns: list[list[IntArray]] = []
    last_end = -1
    for span in spans:
        if span.version is None:
            last_end = -1
            continue
        if span.start != last_end:
            turns.append([])
        turns[-1].append(ids[span.start : span.end])
        last_end = span.end
    return [np.concatenate(parts) for parts in turns]
