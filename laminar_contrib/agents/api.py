"""Request and response bodies of the endpoint: the fields of OpenAI's API that the endpoint uses.

Sampling params are ignored, since the run's config sets them. `check_fields` refuses any other field that would
change the answer, unless its value is the default.
"""

import json
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from aiohttp import web

from laminar_contrib.agents.agent import AgentAnswer
from laminar_contrib.agents.history import ChatPrompt, IdsPrompt, Prompt
from laminar_py.environment import MAX_STOP_CHARS, MAX_STOPS, MAX_TURN_TOKENS
from laminar_py.records.codec import IntArray
from laminar_py.records.credit import ROLE_CHARS

MODEL = "policy"
MAX_CHOICES = 16
TurnLimit = Annotated[int, msgspec.Meta(ge=1, le=MAX_TURN_TOKENS)] | None
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = StopString | Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOPS)] | None
TokenIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]], msgspec.Meta(min_length=1)]

IGNORED = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "reasoning_effort",
    "verbosity",
    "skip_special_tokens",
    "user",
    "metadata",
    "cache_salt",
    "priority",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
}
DEFAULTS: dict[str, Sequence[object]] = {  # values that change nothing, of fields that a request does not have
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (True, False),  # a response in tokens always has them
    "min_tokens": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "no_stop_trim": (False,),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (True, False),  # a response in tokens always has them
    "stop_token_ids": ([],),
    "stream": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}


def check_fields(body: dict[str, Any], kind: type[msgspec.Struct]) -> None:
    """Refuse a request whose body has a field that the endpoint would ignore. Raises status 400."""
    known = {field.encode_name for field in msgspec.structs.fields(kind)} | IGNORED
    if isinstance(body.get("sampling_params"), dict):
        check_fields(body["sampling_params"], SamplingFields)
    for name, value in body.items():
        if name not in known and value is not None and value not in DEFAULTS.get(name, ()):
            raise web.HTTPBadRequest(text=f"{name}: the endpoint of a run does not do this; leave it out")


class CalledFunction(msgspec.Struct):
    """Function and arguments of a tool call."""

    name: str
    arguments: str = "{}"


class CalledTool(msgspec.Struct):
    """A tool call in a message."""

    function: CalledFunction


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A text part of a message; the endpoint takes no images."""

    text: str


class ChatMessage(msgspec.Struct):
    """A message of a chat, as far as the endpoint reads it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[CalledTool] | None = None


class StreamOptions(msgspec.Struct):
    """Options of a stream; `include_usage` adds token counts at its end."""

    include_usage: bool | None = None


class ChatRequest(msgspec.Struct, kw_only=True):
    """Body of a chat completion.

    `return_token_ids` adds token ids to the response. `model` names the role that the model plays, if the agent
    gives a reward to each role.
    """

    messages: Annotated[list[ChatMessage], msgspec.Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    model: Annotated[str, msgspec.Meta(max_length=ROLE_CHARS)] | None = None
    n: Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    max_tokens: TurnLimit = None
    max_completion_tokens: TurnLimit = None
    stop: StopStrings = None

    def prompt(self) -> Prompt:
        """Return the messages as a prompt, with roles that chat templates know."""
        if self.messages[-1].role == "assistant":
            raise web.HTTPBadRequest(text="messages: the last is the assistant's")
        messages = [msgspec.to_builtins(message) for message in self.messages]
        for message in messages:
            message["role"] = "system" if message["role"] == "developer" else message["role"]
        limit = _smallest_limit(self.max_tokens, self.max_completion_tokens)
        return ChatPrompt(
            messages=messages,
            tools=self.tools or [],
            may_call=self.tool_choice != "none",
            max_tokens=limit,
            stop=_all_stops(self.stop),
        )

    def response(
        self, answers: Sequence[AgentAnswer], *, name: str, token_bytes: Callable[[IntArray], list[bytes]]
    ) -> dict[str, Any]:
        """Build the body of a chat completion, with a choice for each answer."""
        choices: list[dict[str, Any]] = [
            {"index": place, "finish_reason": _finish_reason(answer), "logprobs": None, "message": answer.message}
            for place, answer in enumerate(answers)
        ]
        for choice, answer in zip(choices, answers, strict=True):
            if self.logprobs and len(answer.logprobs):
                choice["logprobs"] = _logprobs(answer, token_bytes)
            if self.return_token_ids:
                choice["token_ids"] = answer.ids.tolist()
        head = {
            "id": f"cmpl-{name[:24]}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": MODEL,
        }
        ids = {"prompt_token_ids": _context(answers)} if self.return_token_ids else {}
        return {**head, "choices": choices, "usage": _usage(answers), **ids}

    def events(self, response: dict[str, Any]) -> str:
        """Write the body of a chat completion as server-sent events: the whole completion, then its end."""
        for choice in response["choices"]:
            message = choice.pop("message")
            calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]
            choice["delta"] = {**message, "tool_calls": calls} if calls else message
        usage = response.pop("usage")
        chunk = {**response, "object": "chat.completion.chunk"}
        has_usage = self.stream_options is not None and self.stream_options.include_usage
        chunks = [chunk, {**chunk, "choices": [], "usage": usage}] if has_usage else [chunk]
        return "".join(f"data: {json.dumps(body)}\n\n" for body in chunks) + "data: [DONE]\n\n"


class SamplingFields(msgspec.Struct):
    """Sampling params, as far as the endpoint reads them.

    Clients of renderers always send the ids that end a turn of the template, and want log-probabilities.
    """

    max_tokens: TurnLimit = None
    logprobs: int | None = None
    stop_token_ids: list[int] | None = None
    stop: StopStrings = None


class TokensRequest(msgspec.Struct, kw_only=True):
    """Body of a request in token ids, which the model continues."""

    token_ids: TokenIds
    model: Annotated[str, msgspec.Meta(max_length=ROLE_CHARS)] | None = None
    sampling_params: SamplingFields | None = None
    max_tokens: TurnLimit = None
    stop: StopStrings = None

    def prompt(self) -> Prompt:
        """Return the ids as a prompt."""
        sampling = self.sampling_params or SamplingFields()
        limit = _smallest_limit(self.max_tokens, sampling.max_tokens)
        stop = _all_stops(self.stop, sampling.stop)
        return IdsPrompt(ids=np.array(self.token_ids, np.int32), max_tokens=limit, stop=stop)

    def response(self, answer: AgentAnswer, *, name: str) -> dict[str, Any]:
        """Build the body of a response in token ids."""
        pairs = zip(answer.ids.tolist(), answer.logprobs.tolist(), strict=False)
        entries = [{"token": f"token_id:{id}", "logprob": value} for id, value in pairs]
        choice = {
            "index": 0,
            "finish_reason": _finish_reason(answer),
            "token_ids": answer.ids.tolist(),
            "logprobs": {"content": entries} if entries else None,
        }
        usage, ids = _usage([answer]), _context([answer])
        return {"request_id": name[:24], "choices": [choice], "usage": usage, "prompt_token_ids": ids}


class RewardRequest(msgspec.Struct):
    """Body of `/v1/reward`: a number, one for each role, or null to leave the reward to other terms."""

    reward: float | dict[str, float] | None


class CodeRequest(msgspec.Struct):
    """Body of `/v1/python`: code to run in the sandbox."""

    code: str


def _logprobs(answer: AgentAnswer, token_bytes: Callable[[IntArray], list[bytes]]) -> dict[str, Any]:
    """Write log-probabilities of tokens in the form of a chat completion; the end token has no text."""
    pairs = zip(token_bytes(answer.ids), answer.logprobs.tolist(), strict=True)
    entries = [
        {"token": data.decode(errors="replace"), "logprob": value, "bytes": list(data), "top_logprobs": []}
        for data, value in pairs
    ]
    return {"content": entries, "refusal": None}


def _usage(answers: Sequence[AgentAnswer]) -> dict[str, int]:
    """Count the tokens of a request and of its answers."""
    prompt, sampled = answers[0].num_context, sum(len(answer.ids) for answer in answers)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _context(answers: Sequence[AgentAnswer]) -> list[int] | None:
    """Return the ids of a request; only the newest answer still has them."""
    context = answers[0].context
    return None if context is None else context.tolist()


def _finish_reason(answer: AgentAnswer) -> str:
    if answer.is_cut:
        return "length"
    return "tool_calls" if answer.message.get("tool_calls") else "stop"


def _all_stops(*fields: str | list[str] | None) -> tuple[str, ...]:
    """Join the stop strings in a request's fields, each once."""
    lists = [[field] if isinstance(field, str) else field or [] for field in fields]
    return tuple(dict.fromkeys(stop for stops in lists for stop in stops))


def _smallest_limit(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)
