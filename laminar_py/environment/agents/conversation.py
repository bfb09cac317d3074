"""Requests of an agent, joined to what the model has said: which turn each goes on behind, and with what. Pure.

Owned by an `AgentEnvironment`. A request repeats what was said so far. Where it repeats an answer of the model,
behind a request that was the same up to there, it goes on behind that turn, whose tokens stay as they are;
the longest such wins. What repeats none begins a conversation of its own. Invariant: nothing that was sampled is
tokenized again to be trained on.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec
from blake3 import blake3

from laminar_py.environment.protocol import Observation, Rewrite, Role
from laminar_py.records.digests import DIGEST_BYTES

Message: TypeAlias = Mapping[str, Any]  # of a request, as the API has it


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the model has answered, or is about to, by its turn number `turn`, 1 the first."""

    turn: int
    said: list[bytes]  # digests of its messages, each in one form
    tools: bytes  # digest of those that it had
    answer: bytes = b""  # of the model's, once there is one


class Conversation:
    """Requests of one agent in messages, in the order in which the model answers them."""

    def __init__(self, exchanges: Sequence[Exchange] = ()) -> None:
        self.exchanges = list(exchanges)

    def join(self, messages: Sequence[Message], tools: Sequence[Message], *, turn: int) -> Observation | Rewrite:
        """Words to the model for a request, which it answers by its turn of that number, 1 the first."""
        said, known = [plain(message) for message in messages], _digest(list(tools))
        behind = max(
            (one for one in self.exchanges if one.tools == known and _repeats(said, one)),
            key=lambda one: len(one.said),
            default=None,
        )
        self.exchanges.append(Exchange(turn=turn, said=said, tools=known))
        rest = messages if behind is None else messages[len(behind.said) + 1 :]
        roles = {message["role"] for message in rest}
        if behind is None or len(roles) != 1 or not roles <= set(Role) or not all(map(_text, rest)):
            return Rewrite(tuple(_turn(message) for message in messages), tuple(tools))
        after = None if behind.turn == turn - 1 else behind.turn
        return Observation(tuple(map(_text, rest)), role=Role(roles.pop()), after=after)

    def answered(self, message: Message) -> None:
        """Note the answer to the last request."""
        self.exchanges[-1] = msgspec.structs.replace(self.exchanges[-1], answer=plain(message))


def plain(message: Message) -> bytes:
    """Digest of a message in one form, whatever fields its writer leaves out or adds."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return _digest([message["role"], _text(message), [[call["name"], _read(call)] for call in calls]])


def _digest(value: object) -> bytes:
    return blake3(json.dumps(value, sort_keys=True).encode()).digest(length=DIGEST_BYTES)


def _repeats(said: Sequence[bytes], one: Exchange) -> bool:
    """True where a request begins with another and the answer to it."""
    end = len(one.said)
    return bool(one.answer) and len(said) > end and said[end] == one.answer and list(said[:end]) == one.said


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
