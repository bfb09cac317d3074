"""Match requests of an agent to earlier turns of the model: which turn a request continues.

An `AgentEnvironment` owns a history. A request and the answer to it are bytes: digests of messages, or tokens. A
new request continues the longest turn whose request and answer it begins with. The tokens of that turn stay as
they were sampled, and only the rest is tokenized. A request that repeats no turn begins a new sequence. So sampled
tokens are never tokenized again (`tests/environment/agents/test_agents_truth.py`).
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

from blake3 import blake3

from laminar_contrib.tools.call_formats import JsonCalls, ToolCall, read_turn
from laminar_py.environment import Observation, Rewrite, Role, TokenPrompt
from laminar_py.records.codec import DIGEST_BYTES, IntArray

Message: TypeAlias = dict[str, Any]  # of a request, as the API has it


class AgentHistory:
    """Turns of the model, by the bytes of their requests and answers. It keeps a digest of each."""

    def __init__(self) -> None:
        self._turns: dict[tuple[bytes, int], dict[bytes, int]] = {}  # turn by digest, for each kind and size

    def add_turn(self, kind: bytes, request_and_answer: bytes, *, turn: int) -> None:
        """Add a turn. The first of turns with equal bytes stays."""
        turns = self._turns.setdefault((kind, len(request_and_answer)), {})
        turns.setdefault(_digest(request_and_answer), turn)

    def longest_prefix(self, kind: bytes, request: bytes) -> tuple[int, int]:
        """Find the longest turn whose bytes are a true prefix of a request.

        Returns its number and size; zeros if there is none.
        """
        hasher, hashed, longest = blake3(), 0, (0, 0)
        for size in sorted(size for known, size in self._turns if known == kind and size < len(request)):
            hasher.update(request[hashed:size])
            hashed = size
            turn = self._turns[kind, size].get(hasher.digest(length=DIGEST_BYTES))
            longest = longest if turn is None else (turn, size)
        return longest


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """Messages and tools: the model answers the last message, and may call the tools."""

    messages: Sequence[Message]
    tools: Sequence[Message]
    may_call: bool = True  # else a call in the answer is text
    max_tokens: int | None = None  # of the answer
    stop: tuple[str, ...] = ()  # strings that end the answer

    @cached_property
    def kind(self) -> bytes:
        """Digest of the tools: a request continues only turns with the same tools."""
        return _digest(_to_json(list(self.tools)))

    @cached_property
    def request_bytes(self) -> bytes:
        """Digests of the messages, joined."""
        return b"".join(map(message_digest, self.messages))

    def with_answer(self, answer: Message, ids: IntArray) -> bytes:
        """Return the bytes of this request with its answer."""
        return self.request_bytes + message_digest(answer)

    def observation(self, after: int, size: int, *, is_latest: bool) -> Observation | Rewrite:
        """Return the new messages behind turn `after`, whose request and answer have `size` bytes.

        Return all messages if there is no such turn, or if the new messages cannot follow a turn.
        """
        new = self.messages[size // DIGEST_BYTES :]
        roles = {message["role"] for message in new}
        if not after or len(roles) != 1 or not roles <= set(Role):
            messages = tuple(map(_template_message, self.messages))
            return Rewrite(messages, tuple(self.tools), max_tokens=self.max_tokens, stop=self.stop)
        return Observation(
            tuple(map(_message_text, new)),
            role=Role(roles.pop()),
            after=None if is_latest else after,
            max_tokens=self.max_tokens,
            stop=self.stop,
        )


@dataclass(frozen=True, kw_only=True)
class IdsPrompt:
    """Token ids, which the model continues."""

    tools: ClassVar[Sequence[Message]] = ()
    may_call: ClassVar[bool] = True
    kind: ClassVar[bytes] = b"tokens"
    ids: IntArray  # [n]
    max_tokens: int | None = None  # of the answer
    stop: tuple[str, ...] = ()  # strings that end the answer

    @cached_property
    def request_bytes(self) -> bytes:
        """The ids as bytes."""
        return self.ids.tobytes()

    def with_answer(self, answer: Message, ids: IntArray) -> bytes:
        """Return the bytes of this request with its answer."""
        return self.request_bytes + ids.astype(self.ids.dtype).tobytes()

    def observation(self, after: int, size: int, *, is_latest: bool) -> TokenPrompt:
        """Return the new ids behind turn `after`, whose request and answer have `size` bytes."""
        new = self.ids[size // self.ids.itemsize :]
        return TokenPrompt(new, after, max_tokens=self.max_tokens, stop=self.stop)


Prompt: TypeAlias = ChatPrompt | IdsPrompt


def assistant_message(text: str, call_format: JsonCalls | None, *, turn: int) -> Message:
    """Read a turn of the model as a message of the assistant.

    The whole turn is the content if a call is broken, or if `call_format` is None: the agent has no tools.
    """
    rest, parsed = (text, []) if call_format is None else read_turn(text, call_format)
    calls = [call for call in parsed if isinstance(call, ToolCall)]
    if not calls or len(calls) < len(parsed):
        return {"role": "assistant", "content": text}
    return {
        "role": "assistant",
        "content": rest.strip() or None,
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
    """Hash role, text and tool calls of a message; clients add or leave out other fields."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    fields = [message["role"], _message_text(message), [[call["name"], _arguments(call)] for call in calls]]
    return _digest(_to_json(fields))


def _to_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _digest(data: bytes) -> bytes:
    return blake3(data).digest(length=DIGEST_BYTES)


def _arguments(call: Mapping[str, Any]) -> Any:
    """Decode the arguments of a call; return their text if it is not JSON."""
    try:
        return json.loads(call["arguments"])
    except (ValueError, RecursionError):
        return call["arguments"]


def _message_text(message: Message) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _template_message(message: Message) -> Message:
    """Convert a message for a chat template: one text, and arguments of calls as objects."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    called = [{"name": call["name"], "arguments": _arguments(call)} for call in calls]
    tool_calls = [{"type": "function", "function": function} for function in called]
    plain = {"role": message["role"], "content": _message_text(message)}
    return {**plain, "tool_calls": tool_calls} if tool_calls else plain
