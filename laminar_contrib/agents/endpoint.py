"""The HTTP endpoint of agents: the part of OpenAI's API that agents need, and a variant of it in tokens.

Each environment process serves one for the agents of its trajectories. An API key stands for a trajectory. A
request gets one whole turn of the model, or a status. The endpoint reads no body of a request without a known key
(`tests/environment/agents/test_connections.py`).
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web
from blake3 import blake3

from laminar_contrib.agents.agent import AgentEnvironment
from laminar_contrib.agents.bodies import (
    MODEL,
    Bodies,
    ChatRequest,
    CodeRequest,
    CompletionRequest,
    RewardRequest,
    TokensRequest,
    TurnRequest,
    error_body,
    to_json,
)
from laminar_contrib.agents.connections import (
    AgentConnection,
    AgentConnections,
    ConnectionBounds,
    HttpStatusError,
)
from laminar_contrib.agents.runner import ExternalAgents
from laminar_contrib.agents.streamed import EventStream
from laminar_py.config.environment import Words
from laminar_py.config.section import ConfigError
from laminar_py.environment import LARGEST

SHUTDOWN_S = 1.0  # for requests in flight
PATIENCE_S = 20.0  # an external agent waits so long for a trajectory, then asks again
WILDCARDS = ("0.0.0.0", "::")
KEEP_ALIVE_S = 75.0  # of an idle connection
TRY_AGAIN = {"Retry-After": "1"}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
BodyT = TypeVar("BodyT")


class AgentEndpoint:
    """HTTP handlers of the endpoint."""

    def __init__(
        self,
        keys: Mapping[str, AgentEnvironment],
        words: Words,
        connections: AgentConnections,
        external: ExternalAgents | None = None,
    ) -> None:
        self._keys = keys
        self._external = external
        self._words = words
        self._bodies = Bodies(words)
        self._connections = connections

    def app(self) -> web.Application:
        """Make the web application with its routes."""
        most = self._connections.bounds.max_body_bytes
        app = web.Application(client_max_size=most, middlewares=[self._guard])
        app.router.add_post("/v1/chat/completions", partial(self._answer_turns, ChatRequest))
        app.router.add_post("/v1/completions", partial(self._answer_turns, CompletionRequest))
        app.router.add_post("/inference/v1/generate", partial(self._answer_turns, TokensRequest))
        app.router.add_post("/v1/reward", self._reward)
        app.router.add_post("/v1/trajectories/{trajectory}/reward", self._reward)
        app.router.add_post("/v1/python", self._python)
        app.router.add_get("/v1/models", self._models)
        if self._external is not None:
            app.router.add_post("/v1/trajectories", self._give_trajectory)
        return app

    # ---- admission

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer a request; turn a `HttpStatusError` into a status with a JSON body."""
        try:
            return await self._admit(request, handler)
        except HttpStatusError as refusal:
            headers = TRY_AGAIN if refusal.status == web.HTTPServiceUnavailable.status_code else None
            response = _json(error_body(refusal), status=refusal.status, headers=headers)
            if refusal.closes:
                response.force_close()
            return response

    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Read and handle a request of an agent. Refuse a request without a known key before reading its body."""
        agent = None if self._is_external(request) else self._agent(request)
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise HttpStatusError(415, "a body is to be plain JSON")
        bounds, length = self._connections.bounds, request.content_length
        most = bounds.max_body_bytes if length is None else min(length, bounds.max_body_bytes)
        count = most if request.can_read_body else 0
        with self._connections.admit(request.transport, agent, count):
            with self._connections.reserve_reading(count):
                try:
                    async with asyncio.timeout(bounds.read_s):
                        await request.read()
                except TimeoutError:
                    reason = f"the body took longer than {bounds.read_s:g} s"
                    raise HttpStatusError(408, reason, closes=True) from None
            return await handler(request)

    def _is_external(self, request: web.Request) -> bool:
        """Return True if the request has the run's key."""
        key = _key_of(request).encode(errors="surrogateescape")
        return self._external is not None and secrets.compare_digest(key, self._external.key.encode())

    def _agent(self, request: web.Request) -> AgentEnvironment:
        """Find the agent by the request's key. Raises `HttpStatusError`."""
        agent = self._keys.get(_key_of(request))
        if agent is None:
            raise HttpStatusError(401, "no trajectory that goes on has this key", closes=True)
        return agent

    # ---- turns

    async def _answer_turns(self, kind: type[TurnRequest], request: web.Request) -> web.StreamResponse:
        """Answer a request with turns of the model: `n` choices are `n` requests of the agent."""
        body = await _body(request, kind)
        prompt, agent, choices = body.prompt_of_turn(), self._agent(request), body.choices
        digest = _digest(request, await request.read())
        digests = [digest, *(blake3(digest + bytes([place])).digest() for place in range(1, choices))]
        waiting = agent.add_requests(digests, prompt, role=body.model or MODEL)
        if body.stream:
            return await EventStream(waiting[0], body, self._words).serve(request)
        answers = await asyncio.gather(*(asyncio.shield(one.answer) for one in waiting))
        return _json(self._bodies.answer(answers, name=digest.hex(), body=body))

    # ---- other routes

    async def _models(self, request: web.Request) -> web.Response:
        self._agent(request)
        return _json(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "run", "created": 0}]}
        )

    async def _reward(self, request: web.Request) -> web.Response:
        """Accept an agent's reward, which ends its trajectory.

        A key of another trajectory is refused with status 403, too large a number with 400.
        """
        agent = self._agent(request)
        named = request.match_info.get("trajectory")
        if named is not None and named != agent.trajectory_id:
            raise HttpStatusError(403, f"the key is not that of {named}")
        value = (await _body(request, RewardRequest)).reward
        for number in value.values() if isinstance(value, dict) else [value]:
            if number is not None and abs(number) > LARGEST:
                raise HttpStatusError(400, f"reward={number:g}: give a number up to {LARGEST:g}")
        agent.end_with_reward(value)
        return _json({"reward": value})

    async def _python(self, request: web.Request) -> web.Response:
        agent, body = self._agent(request), await _body(request, CodeRequest)
        return _json({"output": await agent.python(body.code)})

    async def _give_trajectory(self, request: web.Request) -> web.Response:
        """Give a trajectory to an external agent, or answer `{"id": null}` if none waits."""
        assert self._external is not None, "this route exists only with external agents"
        if not self._is_external(request):
            raise HttpStatusError(401, "this is not the key of the run")
        offer = await self._external.next_offer(PATIENCE_S)
        if offer is None:
            return _json({"id": None})
        problem = msgspec.to_builtins(offer.problem)
        return _json({"id": offer.problem.trajectory_id, "key": offer.key, "problem": problem})


def _key_of(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


@asynccontextmanager
async def serve(
    keys: Mapping[str, AgentEnvironment],
    words: Words,
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
    runner = web.AppRunner(
        AgentEndpoint(keys, words, connections, external).app(),
        access_log=None,
        handler_cancellation=True,
        shutdown_timeout=SHUTDOWN_S,
        keepalive_timeout=KEEP_ALIVE_S,
        auto_decompress=False,
    )
    await runner.setup()
    try:
        assert runner.server is not None, "it is set up"
        make = partial(_accept, connections, runner.server)
        try:
            server = await asyncio.get_running_loop().create_server(make, host, port, backlog=bounds.backlog)
        except OSError as error:
            remedy = "choose another, or 0"
            raise ConfigError(
                f"environment.port={port}: cannot be served on {host} ({error.strerror}); {remedy}"
            ) from None
        name = socket.gethostname() if host in WILDCARDS else f"[{host}]" if ":" in host else host
        try:
            yield f"http://{name}:{server.sockets[0].getsockname()[1]}/v1"
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _accept(connections: AgentConnections, server: web.Server) -> AgentConnection:
    return connections.accept(server())


async def _body(request: web.Request, kind: type[BodyT]) -> BodyT:
    """Decode the body of a request. Raises `HttpStatusError`."""
    try:
        return msgspec.json.decode(await request.read(), type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise HttpStatusError(400, str(error)) from None


def _digest(request: web.Request, body: bytes) -> bytes:
    """Hash path, idempotency key and body of a request, so that a repeated request has the same digest."""
    key = request.headers.get("Idempotency-Key", "").encode(errors="surrogateescape")
    return blake3(b"\0".join((request.path.encode(), key, body))).digest()


def _json(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(text=to_json(body), content_type="application/json", status=status, headers=headers)
