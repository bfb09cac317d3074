"""Requests of an agent, matched to the turns of the model: which turn each goes on behind, and with what. Pure.

Owned by an `AgentEnvironment`. A request is bytes: digests of its messages, its tokens, or its text. It goes on
behind the longest turn whose bytes it begins with, which are those of that turn's own request and of its answer.
The turn's tokens stay as they are, and the rest alone is tokenized. A request that repeats no turn begins a
sequence of its own. Invariants: nothing that was sampled is tokenized again to be trained on; of each turn a
digest alone is kept.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from blake3 import blake3

from laminar_py.config.environment import Words
from laminar_py.environment.protocol import Observation, Rewrite, Role, SampledTurn, TokenWords
from laminar_py.environment.tool_calls import CallFormat, WrittenCall, outside_reasoning
from laminar_py.records.codec import DIGEST_BYTES, IntArray

Message: TypeAlias = Mapping[str, Any]  # of a request, as the API has it
TOKENS, TEXT = b"tokens", b"text"  # kinds of bytes; those of messages are named by their tools


class WordsTooLongError(Exception):
    """A request that says more than it may, beyond what it repeats."""


class AgentHistory:
    """Turns of the model, by the bytes of their requests and answers.

    A request in messages says at most `most_bytes` beyond what it repeats.
    """

    def __init__(self, words: Words, *, most_bytes: int) -> None:
        self.words = words
        self.most_bytes = most_bytes
        self._turns: dict[tuple[bytes, int], dict[bytes, int]] = {}  # number by digest, by kind and size

    def note(self, kind: bytes, said: bytes, *, turn: int) -> None:
        """Note a turn whose request and answer are these bytes; of equal ones the first stays."""
        self._turns.setdefault((kind, len(said)), {}).setdefault(_digest(said), turn)

    def longest(self, kind: bytes, said: bytes) -> tuple[int, int]:
        """Number and bytes of the longest turn that these bytes begin with, and go on; zeros for none."""
        hasher, place, found = blake3(), 0, (0, 0)
        for size in sorted(size for known, size in self._turns if known == kind and size < len(said)):
            hasher.update(said[place:size])
            place = size
            turn = self._turns[kind, size].get(hasher.digest(length=DIGEST_BYTES))
            found = found if turn is None else (turn, size)
        return found


@dataclass(slots=True, kw_only=True)
class Chat:
    """Messages, the last of which the model answers, and tools that it may call."""

    messages: Sequence[Message]
    tools: Sequence[Message]
    max_tokens: int | None = None  # the most of the turn that answers it
    _kind: bytes = field(default=b"", init=False)
    _said: bytes = field(default=b"", init=False)

    @property
    def has_tools(self) -> bool:
        """True where a turn may call tools."""
        return bool(self.tools)

    def join(self, history: AgentHistory, *, turn: int) -> Observation | Rewrite:
        """Words to the model, whose turn of that number answers them, 1 the first. Raises `WordsTooLongError`."""
        self._kind, self._said = _digest(_json(list(self.tools))), b"".join(map(plain, self.messages))
        behind, size = history.longest(self._kind, self._said)
        words = self._words(behind, self.messages[size // DIGEST_BYTES :], turn=turn)
        if (count := _num_bytes(words)) > history.most_bytes:
            raise WordsTooLongError(f"{count:,} bytes, above max_observation_bytes={history.most_bytes:,}")
        return words

    def note_answer(self, history: AgentHistory, sampled: SampledTurn, message: Message, *, turn: int) -> None:
        """Note the turn that answers it."""
        history.note(self._kind, self._said + plain(message), turn=turn)

    def _words(self, behind: int, rest: Sequence[Message], *, turn: int) -> Observation | Rewrite:
        """Words of the messages behind a turn, or of all of them anew."""
        roles = {message["role"] for message in rest}
        if not behind or len(roles) != 1 or not roles <= set(Role):
            return Rewrite(tuple(map(_turn, self.messages)), tuple(self.tools), max_tokens=self.max_tokens)
        after = None if behind == turn - 1 else behind
        texts = tuple(map(_text, rest))
        return Observation(texts, role=Role(roles.pop()), after=after, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Tokens that the model goes on behind."""

    ids: IntArray  # [n]
    max_tokens: int | None = None  # the most of the turn that answers it
    has_tools: bool = False

    def join(self, history: AgentHistory, *, turn: int) -> TokenWords:
        """Words to the model, whose turn answers them."""
        behind, size = history.longest(TOKENS, self.ids.tobytes())
        return TokenWords(self.ids[size // self.ids.itemsize :], behind, max_tokens=self.max_tokens)

    def note_answer(self, history: AgentHistory, sampled: SampledTurn, message: Message, *, turn: int) -> None:
        """Note the turn that answers it."""
        _note_tokens(history, sampled, turn=turn)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text that the model goes on behind, as it stands."""

    text: str
    max_tokens: int | None = None  # the most of the turn that answers it
    has_tools: bool = False

    def join(self, history: AgentHistory, *, turn: int) -> TokenWords:
        """Words to the model, whose turn answers them."""
        said = self.text.encode()
        behind, size = history.longest(TEXT, said)
        ids = history.words.encoded(said[size:].decode(), begins=not behind)
        return TokenWords(ids, behind, max_tokens=self.max_tokens)

    def note_answer(self, history: AgentHistory, sampled: SampledTurn, message: Message, *, turn: int) -> None:
        """Note the turn that answers it, which requests in tokens may repeat, too."""
        history.note(TEXT, f"{self.text}{history.words.said(sampled.ids)}".encode(), turn=turn)
        _note_tokens(history, sampled, turn=turn)


Prompt = Chat | TokenPrompt | TextPrompt


class AssistantMessages:
    """Messages of a model whose calls are written so, e.g. `AssistantMessages(HermesCalls(), mark="<tool_call>")`.

    `mark` begins a call, which is no text.
    """

    def __init__(self, call_format: CallFormat, *, mark: str) -> None:
        self._format = call_format
        self._mark = mark

    def read(self, text: str, *, turn: int, has_tools: bool) -> Message:
        """The message of a turn; a call that cannot be read is text, as is each where the agent has no tools."""
        parsed = list(self._format.parse(outside_reasoning(text))) if has_tools else []
        calls = [call for call in parsed if isinstance(call, WrittenCall)]
        if not calls or len(calls) < len(parsed):
            return {"role": "assistant", "content": text}
        before = text.partition(self._mark)[0] if self._mark in text else ""
        return {
            "role": "assistant",
            "content": before.strip() or None,
            "tool_calls": [
                {
                    "id": f"call_{turn}_{place}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for place, call in enumerate(calls)
            ],
        }


def plain(message: Message) -> bytes:
    """Digest of a message in one form, whatever fields its writer leaves out or adds."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return _digest(_json([message["role"], _text(message), [[call["name"], _read(call)] for call in calls]]))


def _note_tokens(history: AgentHistory, sampled: SampledTurn, *, turn: int) -> None:
    history.note(TOKENS, np.concatenate([sampled.context, sampled.ids]).astype(np.int32).tobytes(), turn=turn)


def _num_bytes(words: Observation | Rewrite) -> int:
    """Bytes of what is said, as `environment.calls` counts them."""
    if isinstance(words, Rewrite):
        return len(json.dumps([words.turns, words.tools]))
    return sum(len(text.encode(errors="surrogatepass")) for text in words.messages)


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(said: bytes) -> bytes:
    return blake3(said).digest(length=DIGEST_BYTES)


def _read(call: Mapping[str, Any]) -> Any:
    """Arguments of a call, which are JSON in a text."""
    try:
        return json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call["arguments"]


def _text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _turn(message: Message) -> Message:
    """A message as chat templates take it: one text, and arguments of calls as objects."""
    turn = {"role": message["role"], "content": _text(message)}
    if calls := message.get("tool_calls"):
        turn["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _read(call["function"])},
            }
            for call in calls
        ]
    return turn
