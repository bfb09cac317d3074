"""JSON bodies of the endpoint: the fields of requests that count, and answers in the form of OpenAI's API.

Other fields of requests are ignored, among them sampling params, which the run's config sets.
"""

import json
import time
from collections.abc import Sequence
from http import HTTPStatus
from itertools import accumulate
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from laminar_contrib.agents.agent import AgentAnswer
from laminar_contrib.agents.connections import HttpStatusError
from laminar_contrib.agents.history import Chat, Prompt, TextPrompt, TokenPrompt
from laminar_py.config.environment import Words
from laminar_py.environment import MOST_TOKENS
from laminar_py.records.credit import MOST_ROLES, ROLE_CHARS

MODEL = "policy"
MOST_CHOICES = 16
TurnLimit = Annotated[int, msgspec.Meta(ge=1, le=MOST_TOKENS)] | None
TokenIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(min_length=1)]


class CalledFunction(msgspec.Struct):
    """Function and arguments of a tool call."""

    name: str
    arguments: str = "{}"


class CalledTool(msgspec.Struct):
    """A tool call in a message."""

    function: CalledFunction
    id: str = ""


class TextOfMessage(msgspec.Struct, tag_field="type", tag="text"):
    """A text part of a message; the endpoint takes no images."""

    text: str


class ChatMessage(msgspec.Struct):
    """A message of a chat, as far as the endpoint reads it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextOfMessage] | None = None
    tool_calls: list[CalledTool] | None = None


class StreamOptions(msgspec.Struct):
    """Options of a stream; `include_usage` adds token counts at its end."""

    include_usage: bool | None = None


class AnyRequest(msgspec.Struct, kw_only=True):
    """Fields that all requests for a turn have.

    `return_token_ids` adds token ids to the answer. `model` names the role that the model plays, if the agent
    gives a reward to each role.
    """

    model: Annotated[str, msgspec.Meta(max_length=ROLE_CHARS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_CHOICES)] | None = None
    return_token_ids: bool | None = None
    max_tokens: TurnLimit = None

    @property
    def choices(self) -> int:
        """Number of turns that answer the request. Raises `HttpStatusError`."""
        if self.stream and (self.n or 1) > 1:
            raise HttpStatusError(400, f"n={self.n}: give 1 for a stream")
        return self.n or 1


class ChatRequest(AnyRequest):
    """Body of a chat completion."""

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    logprobs: bool | None = None
    max_completion_tokens: TurnLimit = None

    def prompt_of_turn(self) -> Prompt:
        """Return the messages as a prompt, with roles that chat templates know. Raises `HttpStatusError`."""
        if self.messages[-1].role == "assistant":
            raise HttpStatusError(400, "messages: the last is the assistant's")
        plain = [msgspec.to_builtins(message) for message in self.messages]
        messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in plain]
        most = _smallest_limit(self.max_tokens, self.max_completion_tokens)
        return Chat(messages=messages, tools=self.tools or [], max_tokens=most)


class CompletionRequest(AnyRequest):
    """Body of a completion: a text or token ids, which the model continues."""

    prompt: Annotated[str, msgspec.Meta(min_length=1)] | TokenIds
    logprobs: int | None = None
    echo: bool | None = None

    def prompt_of_turn(self) -> Prompt:
        """Return the text or the ids as a prompt. Raises `HttpStatusError`."""
        if self.echo:
            raise HttpStatusError(400, "echo: this endpoint does not support it; leave it out")
        if isinstance(self.prompt, str):
            return TextPrompt(self.prompt, self.max_tokens)
        return TokenPrompt(np.array(self.prompt, np.int32), self.max_tokens)


class SamplingFields(msgspec.Struct):
    """Sampling params, as far as the endpoint reads them."""

    max_tokens: TurnLimit = None


class TokensRequest(AnyRequest):
    """Body of a request in token ids, which the model continues."""

    token_ids: TokenIds
    sampling_params: SamplingFields | None = None

    def prompt_of_turn(self) -> Prompt:
        """Return the ids as a prompt. Raises `HttpStatusError`."""
        if self.stream:
            raise HttpStatusError(400, "stream: this endpoint does not support it for tokens; leave it out")
        sampled = None if self.sampling_params is None else self.sampling_params.max_tokens
        return TokenPrompt(np.array(self.token_ids, np.int32), _smallest_limit(self.max_tokens, sampled))


TurnRequest = ChatRequest | CompletionRequest | TokensRequest


class RewardRequest(msgspec.Struct):
    """Reward that ends a trajectory, or None, or one for each role: `{"reward": {"black": 1.0, "white": 0.0}}`."""

    reward: float | Annotated[dict[str, float], msgspec.Meta(min_length=1, max_length=MOST_ROLES)] | None


class CodeRequest(msgspec.Struct):
    """Body of `/v1/python`: code to run in the sandbox."""

    code: str


class Bodies:
    """Writes answers in the form of the API, e.g. `Bodies(words).answer(answers, name="1f", body=request)`."""

    def __init__(self, words: Words) -> None:
        self._words = words

    def answer(self, answers: Sequence[AgentAnswer], *, name: str, body: TurnRequest) -> dict[str, Any]:
        """Make the body that answers a request, with a choice for each turn."""
        choices = [self._choice(answer, place, body) for place, answer in enumerate(answers)]
        # only the newest answer still has the tokens before it
        context = None if answers[0].context is None else answers[0].context.tolist()
        body_of = {"choices": choices, "usage": usage_of(answers)}
        if isinstance(body, TokensRequest):
            return {"request_id": name[:24], **body_of, "prompt_token_ids": context}
        ids = {"prompt_token_ids": context} if body.return_token_ids else {}
        kind = "chat.completion" if isinstance(body, ChatRequest) else "text_completion"
        return {**head(name, kind), **body_of, **ids}

    def token_logprobs(self, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
        """Write log-probabilities of tokens in the form of a chat completion."""
        entries = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in zip(self._texts(ids), logprobs, strict=True)
        ]
        return {"content": entries, "refusal": None}

    def _choice(self, answer: AgentAnswer, place: int, body: TurnRequest) -> dict[str, Any]:
        """Build the choice number `place` of a response in the format that `body` asked for."""
        ids, values = answer.ids.tolist(), answer.logprobs.tolist()
        known = len(values) == len(ids)  # a replayed turn has no log-probabilities
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
        """Decode each token by itself; the token that ends a turn has no text."""
        return [self._words.decode_turn(np.array([id], np.int32)) for id in ids]

    def _flat_logprobs(self, ids: list[int], values: list[float]) -> dict[str, Any]:
        tokens = self._texts(ids)
        offsets = [0, *accumulate(map(len, tokens[:-1]))]
        return {"tokens": tokens, "token_logprobs": values, "text_offset": offsets, "top_logprobs": None}


def head(name: str, kind: str) -> dict[str, Any]:
    """Make the fields that every answer begins with."""
    return {"id": f"cmpl-{name[:24]}", "object": kind, "created": int(time.time()), "model": MODEL}


def usage_of(answers: Sequence[AgentAnswer]) -> dict[str, int]:
    """Count the tokens of a request and of its answers."""
    prompt, sampled = answers[0].num_context, sum(len(answer.ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def finish_of(answer: AgentAnswer) -> str:
    """Return the finish reason of a turn, as the API names it."""
    if answer.is_cut:
        return "length"
    return "tool_calls" if answer.message.get("tool_calls") else "stop"


def error_body(error: BaseException) -> dict[str, Any]:
    """Write an error in the form that API clients read."""
    kind = HTTPStatus(error.status).phrase if isinstance(error, HttpStatusError) else type(error).__name__
    return {"error": {"message": str(error), "type": kind, "code": None, "param": None}}


def to_json(value: object) -> str:
    """Encode a body as JSON."""
    return json.dumps(value, ensure_ascii=False)


def _smallest_limit(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
