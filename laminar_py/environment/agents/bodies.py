"""Bodies of the endpoint: what is read of a request, and answers as clients of the API know them. Pure.

Fields that are not named here are allowed and not heeded: how tokens are drawn is the run's own matter.
"""

import json
import time
from collections.abc import Sequence
from http import HTTPStatus
from itertools import accumulate
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from laminar_py.config.environment import Words
from laminar_py.environment.agents.agent import AgentAnswer
from laminar_py.environment.agents.connections import HttpStatusError
from laminar_py.environment.agents.history import Chat, Prompt, TextPrompt, TokenPrompt
from laminar_py.environment.protocol import MOST_TOKENS
from laminar_py.records.codec import IntArray
from laminar_py.records.credit import MOST_ROLES, ROLE_CHARS

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
    def choices(self) -> int:
        """Number of turns that answer it. Raises `HttpStatusError`."""
        choices = 1 if self.n is None else self.n
        if not 1 <= choices <= MOST_CHOICES or (choices > 1 and self.stream):
            raise HttpStatusError(400, f"n={choices}: give 1 to {MOST_CHOICES}, and 1 for a stream")
        return choices


class ChatRequest(AnyRequest):
    """A conversation of messages."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    max_completion_tokens: TurnLimit = None

    def prompt_of_turn(self) -> Prompt:
        """Messages as chat templates know them. Raises `HttpStatusError`."""
        if not self.messages or self.messages[-1].role == "assistant":
            raise HttpStatusError(400, "messages: there are none, or the last is the assistant's")
        plain = [msgspec.to_builtins(message) for message in self.messages]
        messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in plain]
        most = _least(self.max_tokens, self.max_completion_tokens)
        return Chat(messages=messages, tools=self.tools or [], max_tokens=most)


class CompletionRequest(AnyRequest):
    """A text, or ids of the model, to go on behind."""

    prompt: str | list[int]
    logprobs: int | None = None
    echo: bool | None = None

    def prompt_of_turn(self) -> Prompt:
        """The text or the ids. Raises `HttpStatusError`."""
        if not self.prompt:
            raise HttpStatusError(400, "prompt: is empty")
        if self.echo:
            raise HttpStatusError(400, "echo: is not done here")
        if isinstance(self.prompt, str):
            return TextPrompt(self.prompt, self.max_tokens)
        return TokenPrompt(_ids(self.prompt), self.max_tokens)


class SamplingFields(msgspec.Struct):
    """Fields of how a turn is sampled that are heeded."""

    max_tokens: TurnLimit = None


class TokensRequest(AnyRequest):
    """Ids of the model to go on behind."""

    token_ids: list[int]
    sampling_params: SamplingFields | None = None

    def prompt_of_turn(self) -> Prompt:
        """The ids. Raises `HttpStatusError`."""
        if not self.token_ids:
            raise HttpStatusError(400, "token_ids: there are none")
        if self.stream:
            raise HttpStatusError(400, "stream: is not done here; leave it out")
        sampled = None if self.sampling_params is None else self.sampling_params.max_tokens
        return TokenPrompt(_ids(self.token_ids), _least(self.max_tokens, sampled))


TurnRequest = ChatRequest | CompletionRequest | TokensRequest


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
    """Answers in the forms of the API, e.g. `Bodies(words).whole(answers, name="1f", body=request)`."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def whole(self, answers: Sequence[AgentAnswer], *, name: str, body: TurnRequest) -> dict[str, Any]:
        """Answer to a request, with a choice for each of its turns."""
        choices = [self._choice(answer, place, body) for place, answer in enumerate(answers)]
        # the tokens that the newest answer was sampled behind; there are none of older ones
        context = None if answers[0].context is None else answers[0].context.tolist()
        body_of = {"choices": choices, "usage": usage_of(answers)}
        if isinstance(body, TokensRequest):
            return {"request_id": name[:24], **body_of, "prompt_token_ids": context}
        ids = {"prompt_token_ids": context} if body.return_token_ids else {}
        kind = "chat.completion" if isinstance(body, ChatRequest) else "text_completion"
        return {**head(name, kind), **body_of, **ids}

    def token_logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        """Log-probabilities of tokens, as answers in messages have them."""
        entries = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(self._texts(ids), logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def _choice(self, answer: AgentAnswer, place: int, body: TurnRequest) -> dict[str, Any]:
        ids, values = answer.ids.tolist(), answer.logprobs.tolist()
        known = len(values) == len(ids)  # else it was answered before the process died
        choice: dict[str, Any] = {"index": place, "finish_reason": finish_of(answer), "logprobs": None}
        if isinstance(body, TokensRequest) or body.return_token_ids:
            choice["token_ids"] = ids
        if isinstance(body, ChatRequest):
            choice["message"] = answer.message
            if body.logprobs and known:
                choice["logprobs"] = self.token_logprobs(ids, values)
        elif isinstance(body, CompletionRequest):
            choice["text"] = answer.message["content"]
            if body.logprobs is not None and known:
                choice["logprobs"] = self._flat_logprobs(ids, values)
        elif known:
            pairs = zip(ids, values, strict=True)
            entries = [{"token": f"token_id:{id}", "logprob": value} for id, value in pairs]
            choice["logprobs"] = {"content": entries}
        return choice

    def _texts(self, ids: Sequence[int]) -> list[str]:
        """Text of each token by itself; what ends a turn has none."""
        return [self._words.said(np.array([id], np.int32)) for id in ids]

    def _flat_logprobs(self, ids: list[int], values: list[float]) -> dict[str, Any]:
        tokens = self._texts(ids)
        offsets = [0, *accumulate(map(len, tokens[:-1]))]
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


def error_body(error: BaseException) -> dict[str, Any]:
    """A fault in the form that clients of the API read."""
    kind = HTTPStatus(error.status).phrase if isinstance(error, HttpStatusError) else type(error).__name__
    return {"error": {"message": str(error), "type": kind, "code": None, "param": None}}


def encoded(value: object) -> str:
    """Text of a body."""
    return json.dumps(value, ensure_ascii=False)


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _ids(given: list[int]) -> IntArray:
    if min(given) < 0 or max(given) > np.iinfo(np.int32).max:
        raise HttpStatusError(400, "tokens: one of them is no id of the model")
    return np.array(given, np.int32)
