"""Match requests of an agent to earlier turns of the model: the turn that a request continues, and its new text.

An `AgentEnvironment` owns a history. A request and the answer to it are bytes: digests of messages, tokens, or
text. A new request continues the longest turn whose request and answer it begins with. The tokens of that turn
stay as they were sampled, and only the rest is tokenized. A request that repeats no turn begins a new sequence. So
sampled tokens are never tokenized again (`tests/environment/agents/test_agents_truth.py`). The history keeps only
a digest of each turn.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from blake3 import blake3

from laminar_py.config.environment import Words
from laminar_py.environment import (
    HermesCalls,
    LlamaCalls,
    Observation,
    Rewrite,
    Role,
    SampledTurn,
    TokenWords,
    WrittenCall,
    outside_reasoning,
)
from laminar_py.records.codec import DIGEST_BYTES, IntArray

Message: TypeAlias = Mapping[str, Any]  # of a request, as the API has it
TOKENS, TEXT = b"tokens", b"text"  # kinds of requests; the kind of a chat is the digest of its tools


class WordsTooLongError(Exception):
    """The new text of a request is longer than allowed."""


class AgentHistory:
    """Turns of the model, by the bytes of their requests and answers.

    A chat request may have at most `most_bytes` of new text.
    """

    def __init__(self, words: Words, *, most_bytes: int) -> None:
        self.words = words
        self.most_bytes = most_bytes
        self._turns: dict[tuple[bytes, int], dict[bytes, int]] = {}  # turn by digest, for each kind and size

    def add_turn(self, kind: bytes, said: bytes, *, turn: int) -> None:
        """Add a turn whose request and answer are the bytes `said`. The first of equal ones stays."""
        self._turns.setdefault((kind, len(said)), {}).setdefault(_digest(said), turn)

    def longest_prefix(self, kind: bytes, said: bytes) -> tuple[int, int]:
        """Find the longest turn whose bytes are a true prefix of `said`.

        Returns its number and size; zeros if none.
        """
        hasher, place, found = blake3(), 0, (0, 0)
        for size in sorted(size for known, size in self._turns if known == kind and size < len(said)):
            hasher.update(said[place:size])
            place = size
            turn = self._turns[kind, size].get(hasher.digest(length=DIGEST_BYTES))
            found = found if turn is None else (turn, size)
        return found


@dataclass(slots=True, kw_only=True)
class Chat:
    """A chat request: messages, whose last one the model answers, and tools that it may call."""

    messages: Sequence[Message]
    tools: Sequence[Message]
    max_tokens: int | None = None  # of the answer
    _kind: bytes = field(default=b"", init=False)
    _said: bytes = field(default=b"", init=False)

    @property
    def has_tools(self) -> bool:
        """True if the answer may call tools."""
        return bool(self.tools)

    def new_words(self, history: AgentHistory, *, turn: int) -> Observation | Rewrite:
        """Return the messages for the model before its turn `turn`; 1 is the first. Raises `WordsTooLongError`."""
        self._kind, self._said = (
            _digest(_to_json(list(self.tools))),
            b"".join(map(message_digest, self.messages)),
        )
        behind, size = history.longest_prefix(self._kind, self._said)
        words = self._words(behind, self.messages[size // DIGEST_BYTES :], turn=turn)
        if (count := _num_bytes(words)) > history.most_bytes:
            raise WordsTooLongError(f"{count:,} bytes, above max_observation_bytes={history.most_bytes:,}")
        return words

    def record_answer(self, history: AgentHistory, sampled: SampledTurn, message: Message, *, turn: int) -> None:
        """Add the turn that answers this request to the history."""
        history.add_turn(self._kind, self._said + message_digest(message), turn=turn)

    def _words(self, behind: int, rest: Sequence[Message], *, turn: int) -> Observation | Rewrite:
        """Return the messages `rest` after the turn `behind`, or all messages if they cannot follow a turn."""
        roles = {message["role"] for message in rest}
        if not behind or len(roles) != 1 or not roles <= set(Role):
            return Rewrite(
                tuple(map(_template_message, self.messages)), tuple(self.tools), max_tokens=self.max_tokens
            )
        after = None if behind == turn - 1 else behind
        texts = tuple(map(_message_text, rest))
        return Observation(texts, role=Role(roles.pop()), after=after, max_tokens=self.max_tokens)


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A request in tokens, which the model continues."""

    ids: IntArray  # [n]
    max_tokens: int | None = None  # of the answer
    has_tools: bool = False

    def new_words(self, history: AgentHistory, *, turn: int) -> TokenWords:
        """Return the new tokens, and the turn that they follow."""
        behind, size = history.longest_prefix(TOKENS, self.ids.tobytes())
        return TokenWords(self.ids[size // self.ids.itemsize :], behind, max_tokens=self.max_tokens)

    def record_answer(self, history: AgentHistory, sampled: SampledTurn, message: Message, *, turn: int) -> None:
        """Add the turn that answers this request to the history."""
        _record_tokens(history, sampled, turn=turn)


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A request in plain text, which the model continues."""

    text: str
    max_tokens: int | None = None  # of the answer
    has_tools: bool = False

    def new_words(self, history: AgentHistory, *, turn: int) -> TokenWords:
        """Return the new text as tokens, and the turn that they follow."""
        said = self.text.encode()
        behind, size = history.longest_prefix(TEXT, said)
        ids = history.words.encode_text(said[size:].decode(), begins=not behind)
        return TokenWords(ids, behind, max_tokens=self.max_tokens)

    def record_answer(self, history: AgentHistory, sampled: SampledTurn, message: Message, *, turn: int) -> None:
        """Add the turn that answers this request to the history. Requests in tokens may continue it, too."""
        history.add_turn(TEXT, f"{self.text}{history.words.decode_turn(sampled.ids)}".encode(), turn=turn)
        _record_tokens(history, sampled, turn=turn)


Prompt = Chat | TokenPrompt | TextPrompt


class AssistantMessages:
    """Reads turns of the model as chat messages, e.g. `AssistantMessages(HermesCalls())`."""

    def __init__(self, call_format: HermesCalls | LlamaCalls) -> None:
        self._format = call_format

    def read_turn(self, text: str, *, turn: int, has_tools: bool) -> Message:
        """Read a turn as a message. The whole turn is text if a call is broken, or if the agent has no tools."""
        parsed = list(self._format.parse(outside_reasoning(text))) if has_tools else []
        calls = [call for call in parsed if isinstance(call, WrittenCall)]
        if not calls or len(calls) < len(parsed):
            return {"role": "assistant", "content": text}
        before, found, _ = text.partition(self._format.mark)
        return {
            "role": "assistant",
            "content": (before.strip() if found else "") or None,
            "tool_calls": [
                {
                    "id": f"call_{turn}_{place}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
                }
                for place, call in enumerate(calls)
            ],
        }


def message_digest(message: Message) -> bytes:
    """Hash the fields of a message that count, whatever other fields a client adds or leaves out."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return _digest(
        _to_json(
            [message["role"], _message_text(message), [[call["name"], _read_arguments(call)] for call in calls]]
        )
    )


def _record_tokens(history: AgentHistory, sampled: SampledTurn, *, turn: int) -> None:
    history.add_turn(TOKENS, np.concatenate([sampled.context, sampled.ids]).astype(np.int32).tobytes(), turn=turn)


def _num_bytes(words: Observation | Rewrite) -> int:
    """Count the bytes of new messages as `environment.calls` does."""
    if isinstance(words, Rewrite):
        return len(json.dumps([words.turns, words.tools]))
    return sum(len(text.encode(errors="surrogatepass")) for text in words.messages)


def _to_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(said: bytes) -> bytes:
    return blake3(said).digest(length=DIGEST_BYTES)


def _read_arguments(call: Mapping[str, Any]) -> Any:
    """Decode the arguments of a call; return their text if it is not JSON."""
    try:
        return json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call["arguments"]


def _message_text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _template_message(message: Message) -> Message:
    """Convert a message for a chat template: one text, and arguments of calls as objects."""
    turn = {"role": message["role"], "content": _message_text(message)}
    if calls := message.get("tool_calls"):
        turn["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": call["function"]["name"], "arguments": _read_arguments(call["function"])},
            }
            for call in calls
        ]
    return turn
