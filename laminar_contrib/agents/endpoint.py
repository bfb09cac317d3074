"""The HTTP endpoint of agents: the part of OpenAI's API that agents need, and a variant of it in tokens.

Each environment process serves one for the agents of its trajectories. An API key stands for a trajectory. A
request gets one whole turn of the model, or a status. The endpoint reads no body of a request without a known key
(`tests/environment/agents/test_connections.py`).
"""

import asyncio
import re
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeAlias, TypeVar

import msgspec
from aiohttp import web
from blake3 import blake3

from laminar_contrib.agents.agent import MAX_REQUESTS, AgentEnvironment
from laminar_contrib.agents.api import (
    MODEL,
    ChatRequest,
    CodeRequest,
    RewardRequest,
    TokensRequest,
    check_fields,
)
from laminar_contrib.agents.connections import AgentConnection, AgentConnections, ConnectionBounds
from laminar_contrib.agents.runner import ExternalAgents
from laminar_py.config.section import ConfigError
from laminar_py.records.codec import IntArray

SHUTDOWN_S = 1.0  # for requests in flight
OFFER_S = 20.0  # an external agent waits so long for a trajectory, then asks again
WILDCARDS = ("0.0.0.0", "::")
KEEP_ALIVE_S = 75.0  # of an idle connection
FIELD = re.compile(r"`\$\.(\w+)")  # in a message of msgspec
CLOSES = (401, 408)  # statuses after which the rest of a body is not read
AgentHandler: TypeAlias = Callable[[AgentEnvironment, web.Request], Awaitable[web.Response]]
BodyT = TypeVar("BodyT", bound=msgspec.Struct)


class AgentEndpoint:
    """HTTP handlers of the endpoint. `agents` has the running agents by their API keys."""

    def __init__(
        self,
        agents: Mapping[str, AgentEnvironment],
        token_bytes: Callable[[IntArray], list[bytes]],
        connections: AgentConnections,
        external: ExternalAgents | None = None,
    ) -> None:
        self._agents = agents
        self._token_bytes = token_bytes
        self._connections = connections
        self._external = external

    def app(self) -> web.Application:
        """Make the web application with its routes."""
        app = web.Application(client_max_size=self._connections.bounds.body_bytes, middlewares=[_errors_as_json])
        handlers: dict[str, AgentHandler] = {
            "/v1/chat/completions": self._chat,
            "/inference/v1/generate": self._generate,
            "/v1/reward": self._reward,
            "/v1/python": self._python,
        }
        for path, handler in handlers.items():
            app.router.add_post(path, partial(self._admit, handler))
        app.router.add_get("/v1/models", partial(self._admit, self._models))
        if self._external is not None:
            app.router.add_post("/v1/trajectories", self._offer_trajectory)
        return app

    async def _admit(self, handler: AgentHandler, request: web.Request) -> web.Response:
        """Read and handle a request of an agent.

        Refuse a request without a known key, or beyond `MAX_REQUESTS` of its agent, before reading its body.
        """
        agent = self._agents.get(_key_of(request))
        if agent is None:
            raise web.HTTPUnauthorized(text="no running trajectory has this key")
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise web.HTTPUnsupportedMediaType(text="a body is to be plain JSON")
        if agent.request_slots.locked():
            raise web.HTTPTooManyRequests(text=f"{MAX_REQUESTS} requests are being answered; try again")
        read_s = self._connections.bounds.read_s
        with self._connections.serving(_connection_of(request)):
            async with agent.request_slots:
                async with agent.body_slots:
                    try:
                        async with asyncio.timeout(read_s):
                            await request.read()
                    except TimeoutError:
                        raise web.HTTPRequestTimeout(text=f"the body took longer than {read_s:g} s") from None
                return await handler(agent, request)

    # ---- routes

    async def _chat(self, agent: AgentEnvironment, request: web.Request) -> web.Response:
        """Answer with turns of the model: `n` choices are `n` requests of the agent."""
        body = await _body(request, ChatRequest)
        digest = await _digest(request)
        digests = [digest, *(blake3(digest + bytes([place])).digest() for place in range(1, body.n or 1))]
        role, is_retry = body.model or MODEL, _is_retry(request)
        answers = await agent.ask(digests, body.prompt(), role=role, is_retry=is_retry)
        response = body.response(answers, name=digest.hex(), token_bytes=self._token_bytes)
        if body.stream:
            return web.Response(text=body.events(response), content_type="text/event-stream")
        return web.json_response(response)

    async def _generate(self, agent: AgentEnvironment, request: web.Request) -> web.Response:
        body = await _body(request, TokensRequest)
        digest = await _digest(request)
        role, is_retry = body.model or MODEL, _is_retry(request)
        (answer,) = await agent.ask([digest], body.prompt(), role=role, is_retry=is_retry)
        return web.json_response(body.response(answer, name=digest.hex()))

    async def _models(self, agent: AgentEnvironment, request: web.Request) -> web.Response:
        model = {"id": MODEL, "object": "model", "owned_by": "run", "created": 0}
        return web.json_response({"object": "list", "data": [model]})

    async def _reward(self, agent: AgentEnvironment, request: web.Request) -> web.Response:
        """Accept an agent's reward, which ends its trajectory."""
        reward = (await _body(request, RewardRequest)).reward
        agent.end_with_reward(reward)
        return web.json_response({"reward": reward})

    async def _python(self, agent: AgentEnvironment, request: web.Request) -> web.Response:
        body = await _body(request, CodeRequest)
        return web.json_response({"output": await agent.python(body.code)})

    async def _offer_trajectory(self, request: web.Request) -> web.Response:
        """Give a trajectory to an external agent, or answer `{"id": null}` if none waits. Reads no body."""
        assert self._external is not None, "this route exists only with external agents"
        key = _key_of(request).encode(errors="surrogateescape")
        if not secrets.compare_digest(key, self._external.key.encode()):
            raise web.HTTPUnauthorized(text="this is not the key of the run")
        with self._connections.serving(_connection_of(request), can_close=True):
            offer = await self._external.next_offer(OFFER_S)
        if offer is None:
            return web.json_response({"id": None})
        agent_key, problem = offer
        body: dict[str, Any] = {"id": problem.trajectory_id, "key": agent_key}
        return web.json_response({**body, "problem": msgspec.to_builtins(problem)})


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer a refused request in the form that API clients read."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        fault = {"message": error.text, "type": error.reason, "code": None, "param": None}
        headers = {"Retry-After": "1"} if error.status == web.HTTPServiceUnavailable.status_code else None
        response = web.json_response({"error": fault}, status=error.status, headers=headers)
        if error.status in CLOSES:
            response.force_close()
        return response


@asynccontextmanager
async def serve(
    agents: Mapping[str, AgentEnvironment],
    token_bytes: Callable[[IntArray], list[bytes]],
    *,
    external: ExternalAgents | None = None,
    host: str,
    port: int,
    bounds: ConnectionBounds,
) -> AsyncIterator[str]:
    """Serve agents while the context is open, and yield the endpoint's URL; port 0 takes any free one.

    Raises `ConfigError` if the port is taken.
    """
    connections = AgentConnections(bounds)
    app = AgentEndpoint(agents, token_bytes, connections, external).app()
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        assert runner.server is not None, "it is set up"
        options = {"access_log": None, "auto_decompress": False, "keepalive_timeout": KEEP_ALIVE_S}
        make = partial(AgentConnection, connections, runner.server, **options)
        try:
            server = await asyncio.get_running_loop().create_server(make, host, port, backlog=bounds.backlog)
        except OSError as error:
            fault = f"cannot be served on {host} ({error.strerror}); choose another, or 0"
            raise ConfigError(f"environment.port={port}: {fault}") from None
        name = socket.gethostname() if host in WILDCARDS else f"[{host}]" if ":" in host else host
        try:
            yield f"http://{name}:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _key_of(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


def _connection_of(request: web.Request) -> AgentConnection:
    assert isinstance(request.protocol, AgentConnection), "`serve` makes all connections"
    return request.protocol


async def _body(request: web.Request, kind: type[BodyT]) -> BodyT:
    """Decode the body of a request. Raises status 400, also for a field that the endpoint would ignore."""
    try:
        content = await request.read()
        check_fields(msgspec.json.decode(content, type=dict[str, Any]), kind)
        return msgspec.json.decode(content, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        field = FIELD.search(str(error))
        raise web.HTTPBadRequest(text=f"{field[1]}: {error}" if field else str(error)) from None


def _is_retry(request: web.Request) -> bool | None:
    """Return whether a request is a retry, as its client says; None if the client does not say."""
    if "Idempotency-Key" in request.headers:
        return True
    retries = request.headers.get("X-Stainless-Retry-Count")  # of OpenAI's clients: 0 for a new question
    return None if retries is None or not retries.isdecimal() else int(retries) > 0


async def _digest(request: web.Request) -> bytes:
    """Hash path, idempotency key and body of a request, so that a repeated request has the same digest."""
    key = request.headers.get("Idempotency-Key", "").encode(errors="surrogateescape")
    return blake3(b"\0".join((request.path.encode(), key, await request.read()))).digest()
