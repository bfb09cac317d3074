"""Bodies of the endpoint: what is read of a request, and answers as clients of the API know them. Pure.

Fields that are not named here are allowed and not heeded: how tokens are drawn is the run's own matter.
"""

import json
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from laminar_py.config.environment import Words
from laminar_py.environment.agents.agent import AgentAnswer
from laminar_py.environment.agents.conversation import Message
from laminar_py.environment.protocol import MOST_TOKENS
from laminar_py.records.roles import MOST_ROLES, ROLE_CHARS

MODEL = "policy"
MOST_CHOICES = 16
TurnLimit = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] | None


class CalledFunction(msgspec.Struct):
    """A function that a message calls."""

    name: str
    arguments: str = "{}"


class CalledTool(msgspec.Struct):
    """A call of a tool."""

    function: CalledFunction
    id: str = ""


class TextOfMessage(msgspec.Struct, tag_field="type", tag="text"):
    """A part of a message, which has no pictures."""

    text: str


class ChatMessage(msgspec.Struct):
    """Fields of a message that count."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextOfMessage] | None = None
    tool_calls: list[CalledTool] | None = None


class StreamOptions(msgspec.Struct):
    """Options of a stream, e.g. whether it ends with the usage of tokens."""

    include_usage: bool | None = None


class AnyRequest(msgspec.Struct, kw_only=True):
    """Fields that requests for a turn have in common; `return_token_ids` asks for tokens in numbers, too.

    `model` is the role whose turn answers, where the agent gives each role a reward.
    """

    model: Annotated[str, msgspec.Meta(max_length=ROLE_CHARS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    return_token_ids: bool | None = None
    max_tokens: TurnLimit = None

    @property
    def turn_limit(self) -> int | None:
        """The most tokens of each turn that answers it."""
        return self.max_tokens

    def fault(self) -> str:
        """Why it cannot be answered; "" where it can."""
        return ""


class ChatRequest(AnyRequest):
    """A conversation of messages."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    max_completion_tokens: TurnLimit = None

    @property
    def turn_limit(self) -> int | None:
        """The most tokens of each turn that answers it: the lesser of both fields."""
        return _least(self.max_tokens, self.max_completion_tokens)

    def fault(self) -> str:
        """Why it cannot be answered; "" where it can."""
        if not self.messages or self.messages[-1].role == "assistant":
            return "messages: there are none, or the last is the assistant's"
        return ""

    def plain(self) -> list[Message]:
        """Messages as chat templates know them."""
        plain = [msgspec.to_builtins(message) for message in self.messages]
        return [{**one, "role": "system"} if one["role"] == "developer" else one for one in plain]


class CompletionRequest(AnyRequest):
    """A text, or ids of the model, to go on behind."""

    prompt: str | list[int]
    logprobs: int | None = None
    echo: bool | None = None

    def fault(self) -> str:
        """Why it cannot be answered; "" where it can."""
        return "prompt: is empty" if not self.prompt else "echo: is not done here" if self.echo else ""


class SamplingFields(msgspec.Struct):
    """Fields of how a turn is sampled that are heeded."""

    max_tokens: TurnLimit = None


class TokensRequest(AnyRequest):
    """Ids of the model to go on behind."""

    token_ids: list[int]
    sampling_params: SamplingFields | None = None

    @property
    def turn_limit(self) -> int | None:
        """The most tokens of each turn that answers it: the lesser of both fields."""
        return _least(self.max_tokens, None if self.sampling_params is None else self.sampling_params.max_tokens)

    def fault(self) -> str:
        """Why it cannot be answered; "" where it can."""
        return "" if self.token_ids else "token_ids: there are none"


class RewardRequest(msgspec.Struct):
    """Reward that ends a trajectory, or None, or one for each role: `{"reward": {"black": 1.0, "white": 0.0}}`."""

    reward: float | Annotated[dict[str, float], msgspec.Meta(min_length=1, max_length=MOST_ROLES)] | None


class CodeRequest(msgspec.Struct):
    """Code to run in the sandbox."""

    code: str


class CommandRequest(msgspec.Struct):
    """Command to run in the sandbox, by its shell."""

    command: str


class Bodies:
    """Answers in the forms of the API, e.g. `Bodies(words).chat(answers, name="1f", body=request)`."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def chat(self, answers: Sequence[AgentAnswer], *, name: str, body: ChatRequest) -> dict[str, Any]:
        """A chat completion."""
        choices = [
            {
                "index": place,
                "message": answer.message,
                "finish_reason": finish_of(answer),
                "logprobs": self.logprobs(answer) if body.logprobs else None,
                **_ids_of(answer, body),
            }
            for place, answer in enumerate(answers)
        ]
        return {**head(name, "chat.completion"), "choices": choices, **_ends(answers, body)}

    def completion(self, answers: Sequence[AgentAnswer], *, name: str, body: CompletionRequest) -> dict[str, Any]:
        """A completion of a text."""
        choices = [
            {
                "index": place,
                "text": answer.message["content"],
                "finish_reason": finish_of(answer),
                "logprobs": None if body.logprobs is None else self._flat_logprobs(answer),
                **_ids_of(answer, body),
            }
            for place, answer in enumerate(answers)
        ]
        return {**head(name, "text_completion"), "choices": choices, **_ends(answers, body)}

    def generated(self, answers: Sequence[AgentAnswer], *, name: str, body: TokensRequest) -> dict[str, Any]:
        """An answer in tokens."""
        choices = [
            {
                "index": place,
                "token_ids": answer.ids.tolist(),
                "finish_reason": finish_of(answer),
                "logprobs": _numbered_logprobs(answer),
            }
            for place, answer in enumerate(answers)
        ]
        prompt = _context_of(answers[0])
        return {
            "request_id": name[:24],
            "choices": choices,
            "prompt_token_ids": prompt,
            "usage": usage_of(answers),
        }

    def logprobs(self, answer: AgentAnswer) -> dict[str, Any] | None:
        """Log-probabilities of a turn's tokens; None of a turn that was answered in an earlier life."""
        if len(answer.logprobs) != len(answer.ids):
            return None
        return {"content": self.token_logprobs(answer.ids.tolist(), answer.logprobs.tolist()), "refusal": None}

    def token_logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> list[dict[str, Any]]:
        """Entries of tokens."""
        texts = self._texts(ids)
        return [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(texts, logprobs, strict=True)
        ]

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each token by itself; what ends a turn has none."""
        return [self._words.said(np.array([id], np.int32)) for id in ids]

    def _flat_logprobs(self, answer: AgentAnswer) -> dict[str, Any] | None:
        if len(answer.logprobs) != len(answer.ids):
            return None
        tokens = self._texts(answer.ids.tolist())
        offsets = [0, *accumulate(map(len, tokens[:-1]))]
        values = answer.logprobs.tolist()
        return {"tokens": tokens, "token_logprobs": values, "text_offset": offsets, "top_logprobs": None}


def head(name: str, kind: str) -> dict[str, Any]:
    """Fields that every answer begins with."""
    return {"id": f"cmpl-{name[:24]}", "object": kind, "created": int(time.time()), "model": MODEL}


def usage_of(answers: Sequence[AgentAnswer]) -> dict[str, int]:
    """Tokens of a request and of its answers."""
    prompt, sampled = answers[0].num_context, sum(len(answer.ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def finish_of(answer: AgentAnswer) -> str:
    """Why a turn ended."""
    if answer.is_cut:
        return "length"
    return "tool_calls" if answer.message.get("tool_calls") else "stop"


def error_body(reason: str, kind: str) -> dict[str, Any]:
    """A fault in the form that clients of the API read."""
    return {"error": {"message": reason, "type": kind, "code": None, "param": None}}


def encoded(value: object) -> str:
    """Text of a body."""
    return json.dumps(value, ensure_ascii=False)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _context_of(answer: AgentAnswer) -> list[int] | None:
    """Tokens that an answer was sampled behind; None once there are newer ones."""
    return None if answer.context is None else answer.context.tolist()


def _ids_of(answer: AgentAnswer, body: AnyRequest) -> dict[str, Any]:
    return {"token_ids": answer.ids.tolist()} if body.return_token_ids else {}


def _ends(answers: Sequence[AgentAnswer], body: AnyRequest) -> dict[str, Any]:
    ids = {"prompt_token_ids": _context_of(answers[0])} if body.return_token_ids else {}
    return {"usage": usage_of(answers), **ids}


def _numbered_logprobs(answer: AgentAnswer) -> dict[str, Any] | None:
    if len(answer.logprobs) != len(answer.ids):
        return None
    pairs = zip(answer.ids.tolist(), answer.logprobs.tolist(), strict=True)
    return {"content": [{"token": f"token_id:{id}", "logprob": value} for id, value in pairs]}
