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


class WordsTooLongError(Exception):
    """A request that says more than it may, beyond what it repeats."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """A request that the model has answered, or is about to, by its turn number `turn`, 1 the first."""

    turn: int
    num_said: int  # messages
    said: bytes  # digest of these, each in one form
    tools: bytes  # digest of those that it had
    answered: bytes = b""  # digest of the messages and the answer, once there is one


class Conversation:
    """Requests of one agent in messages, in the order in which the model answers them.

    What one of them says, beyond what it repeats, has `most_bytes`.
    """

    def __init__(self, exchanges: Sequence[Exchange] = (), *, most_bytes: int) -> None:
        self.exchanges = list(exchanges)
        self._most_bytes = most_bytes

    def join(self, messages: Sequence[Message], tools: Sequence[Message], *, turn: int) -> Observation | Rewrite:
        """Words to the model for a request, which it answers by its turn of that number, 1 the first.

        Raises `WordsTooLongError`, and is as it was before.
        """
        said, known = _chain(messages), _digest(list(tools))
        behind = max(
            (one for one in self.exchanges if one.tools == known and _repeats(said, one)),
            key=lambda one: one.num_said,
            default=None,
        )
        words = _words(messages, tools, behind, turn=turn)
        if (count := _num_bytes(words)) > self._most_bytes:
            raise WordsTooLongError(f"{count:,} bytes, above max_observation_bytes={self._most_bytes:,}")
        self.exchanges.append(Exchange(turn=turn, num_said=len(said), said=said[-1], tools=known))
        return words

    def answered(self, message: Message) -> None:
        """Note the answer to the last request."""
        last = self.exchanges[-1]
        self.exchanges[-1] = msgspec.structs.replace(last, answered=_link(last.said, message))


def _words(
    messages: Sequence[Message], tools: Sequence[Message], behind: Exchange | None, *, turn: int
) -> Observation | Rewrite:
    """Words of the messages behind the answer of an exchange, or of all of them anew."""
    rest = messages if behind is None else messages[behind.num_said + 1 :]
    roles = {message["role"] for message in rest}
    if behind is None or len(roles) != 1 or not roles <= set(Role):
        return Rewrite(tuple(_turn(message) for message in messages), tuple(tools))
    after = None if behind.turn == turn - 1 else behind.turn
    return Observation(tuple(map(_text, rest)), role=Role(roles.pop()), after=after)


def _num_bytes(words: Observation | Rewrite) -> int:
    """Bytes of what is said, as `environment.calls` counts them."""
    if isinstance(words, Rewrite):
        return len(json.dumps([words.turns, words.tools]))
    return sum(len(text.encode(errors="surrogatepass")) for text in words.messages)


def plain(message: Message) -> bytes:
    """Digest of a message in one form, whatever fields its writer leaves out or adds."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return _digest([message["role"], _text(message), [[call["name"], _read(call)] for call in calls]])


def _digest(value: object) -> bytes:
    return blake3(json.dumps(value, sort_keys=True).encode()).digest(length=DIGEST_BYTES)


def _chain(messages: Sequence[Message]) -> list[bytes]:
    """Digests of the messages up to each of them."""
    found = [b""]
    for message in messages:
        found.append(_link(found[-1], message))
    return found[1:]


def _link(before: bytes, message: Message) -> bytes:
    return blake3(before + plain(message)).digest(length=DIGEST_BYTES)


def _repeats(said: Sequence[bytes], one: Exchange) -> bool:
    """True where a request, as `_chain` has it, begins with another and the answer to it, and goes on."""
    return bool(one.answered) and len(said) > one.num_said + 1 and said[one.num_said] == one.answered


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
