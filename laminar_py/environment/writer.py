"""Decode turns of the model, and encode messages of an environment. `environment.host` owns a writer.

Sampled tokens are decoded and never encoded again. Messages are encoded by themselves and appended, so no earlier
token depends on them (`tests/environment/test_writer.py`). The name of a special token in a message stays plain
text, so an environment cannot end or begin a turn. Ids of `TokenPrompt` are used as they are.
"""

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from laminar_py.config.data import ChatConfig
from laminar_py.config.environment import EnvironmentConfig
from laminar_py.config.section import ConfigError
from laminar_py.data.chat import PromptEncoder, TemplateError, Turn
from laminar_py.data.tokenizer import PROBE, Tokenizer, load_tokenizer
from laminar_py.environment.protocol import Observation, Rewrite, Role
from laminar_py.records.codec import IntArray

OTHER_MARK = "turntwoturntwo"  # placeholder for the content of a message
REMEDY = "name a model whose chat template only appends, or write prompts as text"


class PlainWriter:
    """Encodes messages as plain text, for prompts that are text, e.g. `PlainWriter(tokenizer, stop_ids=(1,))`."""

    def __init__(self, codec: Tokenizer, *, stop_ids: Sequence[int]) -> None:
        self._codec = codec
        self._stop_ids = frozenset(stop_ids)

    def decode_turn(self, ids: IntArray) -> str:
        """Decode a turn of the model, without the token that ended it."""
        return self._codec.decode(ids[:-1] if self.has_ended(ids) else ids, special=True)

    def has_ended(self, ids: IntArray) -> bool:
        """Return True if the last token ends a turn. Without such a token, a limit has cut the turn."""
        return len(ids) > 0 and int(ids[-1]) in self._stop_ids

    def encode_first(self, observation: Observation) -> IntArray:
        """Encode the messages before the first turn to [n] ids."""
        return self.encode_next(observation)

    def encode_next(self, observation: Observation, *, is_cut: bool = False) -> IntArray:
        """Encode the messages after a turn, which a limit may have cut, to [n] ids. Raises `TemplateError`."""
        return self._codec.encode_next("".join(observation.messages), literal=True)

    def encode_conversation(self, rewrite: Rewrite) -> IntArray:
        """Encode a conversation up to the model's next turn to [n] ids. Raises `TemplateError`."""
        if not isinstance(rewrite.messages, str):
            raise TemplateError("a Rewrite has messages where prompts are text; give it a text")
        ids = self._codec.encode_literal(rewrite.messages)
        whole, alone = self._codec.encode_prompt(PROBE), self._codec.encode(PROBE)
        return np.concatenate([whole[: len(whole) - len(alone)], ids])  # begin-of-text tokens first

    def check_ids(self, ids: IntArray) -> None:
        """Raise `TemplateError` if an id is not a token of the model."""
        outside = (ids < 0) | (ids >= self._codec.num_ids)
        if outside.any():
            raise TemplateError(
                f"token {ids[outside][0]} is unknown; the model has ids below {self._codec.num_ids}"
            )


class ChatWriter(PlainWriter):
    """Encodes messages as the model's chat template writes them between two turns of the assistant.

    Earlier turns of the assistant stay as they were sampled, even if the template would write them otherwise. The
    writer renders placeholder messages once for each role and number of messages, and keeps the text around them.
    Raises `ConfigError` if the template does not only append, so that its text depends on earlier turns.
    """

    def __init__(self, codec: Tokenizer, template: PromptEncoder, *, stop_ids: Sequence[int], model: str) -> None:
        super().__init__(codec, stop_ids=stop_ids)
        self._template = template
        self._faults = {role: fault for role in Role if (fault := self._why_unsupported(role))}
        if len(self._faults) == len(Role):
            raise ConfigError(f"model.path={model}: {self._faults[Role.USER]}, so turns cannot follow; {REMEDY}")
        self._around = lru_cache(maxsize=64)(self._template_pieces)

    def encode_first(self, observation: Observation) -> IntArray:
        """Encode the messages before the first turn, and its beginning, to [n] ids. Raises `TemplateError`."""
        return self._encode_messages(observation, is_first=True)

    def encode_next(self, observation: Observation, *, is_cut: bool = False) -> IntArray:
        """Encode messages, and the template's text around them, between two turns to [n] ids.

        After a turn that a limit has cut, they begin with the token that ends a turn. Raises `TemplateError`.
        """
        if fault := self._faults.get(observation.role):
            raise TemplateError(f"{fault}, in a message of role {observation.role}")
        return self._encode_messages(observation, is_first=False, is_cut=is_cut)

    def _encode_messages(self, observation: Observation, *, is_first: bool, is_cut: bool = False) -> IntArray:
        """Encode messages and the template's text around them; if `is_cut`, behind the token that ends a turn."""
        before, (first, *others) = self._around(observation.role, len(observation.messages), is_first)
        parts = [(before, False), (first, False)] if is_cut else [(first, False)]
        for text, after in zip(observation.messages, others, strict=True):
            parts += [(text, True), (after, False)]
        return self._join(parts, before=before)

    def _join(self, parts: Sequence[tuple[str, bool]], *, before: str, begin: Sequence[IntArray] = ()) -> IntArray:
        """Encode parts of a text that follow `before`; in literal parts (True), special tokens are plain text."""
        joined = list(begin)
        for text, is_literal in parts:
            joined.append(self._codec.encode_next(text, after=before, literal=is_literal))
            before = "" if is_literal else text
        return np.concatenate(joined)

    def encode_conversation(self, rewrite: Rewrite) -> IntArray:
        """Encode a conversation up to the model's next turn to [n] ids. Raises `TemplateError`."""
        if rewrite.turns[-1]["role"] == "assistant":
            raise TemplateError("a Rewrite ends before a turn of the assistant; end it with another role")
        hidden = HiddenWords(self._codec.special_texts)
        turns: list[Turn] = [hidden.hide(dict(turn)) for turn in rewrite.turns]
        tools = hidden.hide(list(rewrite.tools))
        text = self._template.conversation(self._template.with_system(turns), answers=True, tools=tools or None)
        (first, is_word), *others = [(word or piece, word is not None) for piece, word in hidden.parts(text)]
        begin = self._codec.encode_literal(first) if is_word else self._codec.encode(first)
        return self._join(others, before="" if is_word else first, begin=[begin])

    def _template_pieces(self, role: Role, count: int, is_first: bool) -> tuple[str, list[str]]:
        """Return the text before `count` messages of a role, and the template's texts around them."""
        turns: list[Turn] = [{"role": role.value, "content": _mark(place)} for place in range(count)]
        before, text = self._text_before_turn(turns) if is_first else self._text_between_turns(PROBE, turns)
        pieces = []
        for place in range(count):
            piece, mark, text = text.partition(_mark(place))
            if not mark:
                raise TemplateError("the chat template leaves out a message, or writes messages in another order")
            pieces.append(piece)
        return before, [*pieces, text]

    def _text_before_turn(self, turns: list[Turn]) -> tuple[str, str]:
        """Return the text of a prompt, and of messages after it up to where the assistant's turn begins."""
        asked: list[Turn] = [{"role": Role.USER.value, "content": PROBE}]
        before = self._template.conversation(asked, answers=False)
        text = self._template.conversation([*asked, *turns], answers=True)
        if not text.startswith(before):
            raise TemplateError("the chat template changes the first message when a second one follows")
        return before, text.removeprefix(before)

    def _text_between_turns(self, answer: str, turns: list[Turn]) -> tuple[str, str]:
        """Return the token that ends the assistant's turn `answer`, and the text for the messages after it."""
        spoken: list[Turn] = [{"role": Role.USER.value, "content": "?"}, {"role": "assistant", "content": answer}]
        text = self._template.conversation([*spoken, *turns], answers=True)
        _, written, after = text.partition(answer)
        if not written:
            raise TemplateError("the chat template leaves out the assistant's text")
        ids = self._codec.encode(after)
        if not len(ids) or int(ids[0]) not in self._stop_ids:
            raise TemplateError("the chat template writes no end token after a turn of the assistant")
        end = self._codec.decode(ids[:1], special=True)
        return end, after.removeprefix(end)

    def _why_unsupported(self, role: Role) -> str:
        """Return why messages of a role cannot follow a turn of the model; "" if they can."""
        answer: list[Turn] = [{"role": role.value, "content": "5"}]
        try:
            _, first = self._text_between_turns(PROBE, answer)
            _, second = self._text_between_turns(OTHER_MARK, answer)
        except TemplateError as error:
            return str(error)
        return "" if first == second else "the chat template writes a message differently after different turns"


class HiddenWords:
    """Replaces names of special tokens by random words, which are not special to template and tokenizer.

    E.g. `hidden.hide({"content": "a <s> b"})` has a random word in place of `<s>`, which no user can guess.
    """

    def __init__(self, words: Sequence[str]) -> None:
        nonce = secrets.token_hex(8)
        self._names = {word: f"{nonce}x{place}x" for place, word in enumerate(words)}
        self._words = {name: word for word, name in self._names.items()}
        self._special = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")

    def hide(self, value: Any) -> Any:
        """Return a JSON value with the names replaced in all of its texts."""
        if isinstance(value, str):
            return self._special.sub(lambda match: self._names[match[0]], value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def parts(self, text: str) -> Iterator[tuple[str, str | None]]:
        """Split a text at the random words: yield (plain piece, None) and (random word, name behind it)."""
        pattern = "|".join(map(re.escape, self._words)) or r"(?!)"
        for piece in re.split(f"({pattern})", text):
            if piece:
                yield piece, self._words.get(piece)


def _mark(place: int) -> str:
    """Return the placeholder for the text of the message at a place."""
    return f"{OTHER_MARK}{place}x"


def open_writer(model: Path, chat: ChatConfig, settings: EnvironmentConfig, *, messages: bool) -> PlainWriter:
    """Make the writer for a model; it uses the chat template if prompts are `messages`. Raises `ConfigError`."""
    tokenizer = load_tokenizer(model)
    if not messages:
        return PlainWriter(tokenizer, stop_ids=tokenizer.eos_ids)
    encoder = PromptEncoder(tokenizer, model, chat, settings)
    tokenizer = tokenizer.with_ends(encoder.template_ends())
    return ChatWriter(tokenizer, encoder, stop_ids=tokenizer.eos_ids, model=str(model))
