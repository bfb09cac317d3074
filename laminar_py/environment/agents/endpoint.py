"""The endpoint of agents: the chat completions API of OpenAI, as far as agents need it.

Served by each process of environments, for the agents of its trajectories. A key names a trajectory. Invariants:
a request is answered by one whole turn of the model, or refused by a status; what is read of one is bounded.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import msgspec
from aiohttp import web
from blake3 import blake3

from laminar_py.config.section import ConfigError
from laminar_py.environment.agents.agent import (
    MOST_WAITING,
    AgentEnvironment,
    AgentRequest,
    Keys,
    TooManyWaitingError,
    TrajectoryEndedError,
)
from laminar_py.environment.agents.conversation import Message
from laminar_py.environment.calls import LARGEST

KEEP_ALIVE_S = 10.0
SHUTDOWN_S = 1.0  # for requests that are being answered
MODEL = "policy"
ENDED = "the trajectory has ended"


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
    """Fields of a message that count; others are allowed."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextOfMessage] | None = None
    tool_calls: list[CalledTool] | None = None


class ChatRequest(msgspec.Struct):
    """Fields of a request that count. How tokens are drawn is the run's own matter."""

    messages: list[ChatMessage]
    tools: list[dict[str, Any]] | None = None
    stream: bool | None = None
    n: int | None = None


class RewardRequest(msgspec.Struct):
    """Reward of a trajectory, e.g. `{"reward": 1.0}`, which ends it."""

    reward: float


class AgentEndpoint:
    """Handlers of the endpoint."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    def app(self, *, max_body_bytes: int) -> web.Application:
        """The application, which reads no longer body."""
        app = web.Application(client_max_size=max_body_bytes)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/reward", self._reward)
        app.router.add_get("/v1/models", self._models)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        self._agent(request)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})

    async def _reward(self, request: web.Request) -> web.Response:
        agent = self._agent(request)
        value = _decode(RewardRequest, await request.read()).reward
        if abs(value) > LARGEST:
            raise _refused(web.HTTPBadRequest, f"reward={value:g}: give a number up to {LARGEST:g}")
        try:
            agent.reward(value)
        except TrajectoryEndedError:
            raise _refused(web.HTTPGone, ENDED) from None
        return web.json_response({"reward": value})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        agent = self._agent(request)
        body = await request.read()
        asked = _decode(ChatRequest, body)
        if asked.n not in (None, 1):
            remedy = "ask once for each answer, each time with another Idempotency-Key"
            raise _refused(web.HTTPBadRequest, f"n={asked.n}: {remedy}")
        if not asked.messages or asked.messages[-1].role == "assistant":
            raise _refused(web.HTTPBadRequest, "messages: there are none, or the last is the assistant's")
        key = request.headers.get("Idempotency-Key", "").encode(errors="surrogateescape")
        digest = blake3(key + body).digest()
        asks = agent.ask(AgentRequest(digest, _plain(asked.messages), asked.tools or []))
        answer = asyncio.ensure_future(asks)
        try:
            if asked.stream:
                return await _streamed(request, answer, name=digest.hex())
            return web.json_response(_completion(await answer, name=digest.hex(), streams=False))
        except TrajectoryEndedError:
            raise _refused(web.HTTPGone, ENDED) from None
        except TooManyWaitingError:
            raise _refused(web.HTTPTooManyRequests, f"{MOST_WAITING} requests wait already; try again") from None

    def _agent(self, request: web.Request) -> AgentEnvironment:
        """The agent whose key the request has. Raises `HTTPUnauthorized`."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        agent = self._keys.agent(key)
        if agent is None:
            raise _refused(web.HTTPUnauthorized, "no trajectory that goes on has this key")
        return agent


@asynccontextmanager
async def serve(keys: Keys, *, host: str, port: int, max_body_bytes: int) -> AsyncIterator[str]:
    """Serve agents while it is open; gives the address, with a free port where it is 0. Raises `ConfigError`."""
    app = AgentEndpoint(keys).app(max_body_bytes=max_body_bytes)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            remedy = "choose another, or 0"
            raise ConfigError(f"environment.port={port}: cannot be served ({error.strerror}); {remedy}") from None
        yield f"http://{host}:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


async def _streamed(request: web.Request, answer: "asyncio.Future[Message]", *, name: str) -> web.StreamResponse:
    """The answer as events, once there is one; until then comments keep the connection alive."""
    done, _ = await asyncio.wait([answer], timeout=KEEP_ALIVE_S)
    if done:
        answer.result()  # else a status can still say it
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    while not (await asyncio.wait([answer], timeout=KEEP_ALIVE_S))[0]:
        await response.write(b": working\n\n")
    told = _error(ENDED, "gone") if answer.exception() else _completion(answer.result(), name=name, streams=True)
    for event in (json.dumps(told), "[DONE]"):
        await response.write(f"data: {event}\n\n".encode())
    await response.write_eof()
    return response


def _completion(message: Message, *, name: str, streams: bool) -> dict[str, Any]:
    """Body of an answer, or the one event that has all of it."""
    called = bool(message.get("tool_calls"))
    said = {"delta": _delta(message)} if streams else {"message": message}
    choice = {"index": 0, **said, "finish_reason": "tool_calls" if called else "stop", "logprobs": None}
    kind = "chat.completion.chunk" if streams else "chat.completion"
    return {
        "id": f"chatcmpl-{name[:24]}",
        "object": kind,
        "created": int(time.time()),
        "model": MODEL,
        "choices": [choice],
    }


def _delta(message: Message) -> Message:
    calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls") or ())]
    return {**message, "tool_calls": calls} if calls else message


def _plain(messages: list[ChatMessage]) -> list[Message]:
    plain = [msgspec.to_builtins(message) for message in messages]
    return [{**one, "role": "system"} if one["role"] == "developer" else one for one in plain]


def _decode(kind: type[Any], body: bytes) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise _refused(web.HTTPBadRequest, str(error)) from None


def _refused(kind: type[web.HTTPException], reason: str) -> web.HTTPException:
    """Refusal in the form that clients of the API read."""
    return kind(text=json.dumps(_error(reason, kind.__name__)), content_type="application/json")


def _error(reason: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": reason, "type": kind, "code": None, "param": None}}
