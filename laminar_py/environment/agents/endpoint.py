"""The endpoint of agents: the API of OpenAI as far as agents need it, and a form of it in tokens.

Served by each process of environments, for the agents of its trajectories. A key names a trajectory. Invariants:
a request is answered by one whole turn of the model, or refused by a status; of whoever has no key no body is
kept.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from aiohttp import web
from blake3 import blake3

from laminar_py.config.environment import Words
from laminar_py.config.section import ConfigError
from laminar_py.environment.agents.agent import (
    MOST_WAITING,
    AgentAnswer,
    AgentEnvironment,
    Keys,
    NoSandboxError,
    TooManyWaitingError,
    TrajectoryEndedError,
)
from laminar_py.environment.agents.bodies import (
    MODEL,
    MOST_CHOICES,
    AnyRequest,
    Bodies,
    ChatRequest,
    CodeRequest,
    CommandRequest,
    CompletionRequest,
    RewardRequest,
    TokensRequest,
    encoded,
    error_body,
)
from laminar_py.environment.agents.connections import (
    MOST_AT_ONCE,
    AgentConnection,
    AgentConnections,
    BodiesFullError,
    ConnectionBounds,
    TooManyAtOnceError,
)
from laminar_py.environment.agents.conversation import WordsTooLongError
from laminar_py.environment.agents.external import ExternalAgents
from laminar_py.environment.agents.requests import Chat, Prompt, TextPrompt, TokenPrompt
from laminar_py.environment.agents.streamed import EventStream
from laminar_py.environment.calls import LARGEST
from laminar_py.sandbox.records import SandboxError

SHUTDOWN_S = 1.0  # for requests that are being answered
PATIENCE_S = 20.0  # of an external agent, for a trajectory
WILDCARDS = ("0.0.0.0", "::")
KEEP_ALIVE_S = 75.0  # of a connection that asks nothing
ENDED = "the trajectory has ended"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
RequestT = TypeVar("RequestT", bound=AnyRequest)


class AgentEndpoint:
    """Handlers of the endpoint."""

    def __init__(
        self, keys: Keys, words: Words, connections: AgentConnections, external: ExternalAgents | None = None
    ) -> None:
        self._keys = keys
        self._external = external
        self._words = words
        self._bodies = Bodies(words)
        self._connections = connections

    def app(self) -> web.Application:
        """The application."""
        most = self._connections.bounds.max_body_bytes
        app = web.Application(client_max_size=most, middlewares=[self._admit])
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/reward", self._reward)
        app.router.add_post("/v1/trajectories/{trajectory}/reward", self._reward)
        app.router.add_post("/v1/python", self._python)
        app.router.add_post("/v1/shell", self._shell)
        app.router.add_get("/v1/models", self._models)
        if self._external is not None:
            app.router.add_post("/v1/trajectories", self._hand_out)
        return app

    # ---- whoever asks

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Handle a request of an agent, once it is here; others are refused before they are read, and closed."""
        try:
            agent = None if self._is_external(request) else self._agent(request)
        except web.HTTPUnauthorized as refusal:
            refusal.force_close()
            raise
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise _refused(web.HTTPUnsupportedMediaType, "a body is to be plain JSON")
        try:
            with self._connections.answering(request.transport, agent):
                return await self._handle(request, handler, agent)
        except TooManyAtOnceError:
            raise _refused(web.HTTPTooManyRequests, f"{MOST_AT_ONCE} requests are being answered") from None
        except BodiesFullError:
            reason = "too much is being read, or kept for this agent; try again"
            raise _refused(web.HTTPServiceUnavailable, reason, {"Retry-After": "1"}) from None

    async def _handle(
        self, request: web.Request, handler: Handler, agent: AgentEnvironment | None
    ) -> web.StreamResponse:
        """Read a request, and answer it."""
        bounds, length = self._connections.bounds, request.content_length
        most = bounds.max_body_bytes if length is None else min(length, bounds.max_body_bytes)
        count = most if request.can_read_body else 0
        with self._connections.keeping(agent, count):
            with self._connections.reading(count):
                await self._read(request)
            return await handler(request)

    async def _read(self, request: web.Request) -> None:
        """Read the body of a request, which keeps it."""
        bounds = self._connections.bounds
        try:
            async with asyncio.timeout(bounds.read_s):
                await request.read()
        except TimeoutError:
            reason = f"the body took longer than {bounds.read_s:g} s"
            raise _refused(web.HTTPRequestTimeout, reason, {"Connection": "close"}) from None

    # ---- turns

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, ChatRequest)
        return await self._answer(
            request, body, Chat(body.plain(), body.tools or [], body.turn_limit), self._bodies.chat
        )

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, CompletionRequest)
        given, most = body.prompt, body.turn_limit
        prompt = TextPrompt(given, most) if isinstance(given, str) else TokenPrompt(_ids(given), most)
        return await self._answer(request, body, prompt, self._bodies.completion)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, TokensRequest)
        if body.stream:
            raise _refused(web.HTTPBadRequest, "stream: is not done here; leave it out")
        prompt = TokenPrompt(_ids(body.token_ids), body.turn_limit)
        return await self._answer(request, body, prompt, self._bodies.generated)

    async def _answer(
        self, request: web.Request, body: RequestT, prompt: Prompt, form: Callable[..., dict[str, Any]]
    ) -> web.StreamResponse:
        """Have a request answered, in a form, or refused."""
        agent, choices = self._agent(request), 1 if body.n is None else body.n
        if not 1 <= choices <= MOST_CHOICES or (choices > 1 and body.stream):
            raise _refused(web.HTTPBadRequest, f"n={choices}: give 1 to {MOST_CHOICES}, and 1 for a stream")
        digest = _digest(request, await request.read())
        try:
            if body.stream:
                listens = not prompt.has_tools
                (waiting,) = agent.ask([digest], prompt, role=body.model or MODEL, listens=listens)
                return await EventStream(waiting, body, self._words).serve(request)
            answers = await _answers(agent, digest, prompt, role=body.model or MODEL, choices=choices)
        except TrajectoryEndedError:
            raise _refused(web.HTTPGone, ENDED) from None
        except WordsTooLongError as error:
            raise _refused(TooLong, str(error)) from None
        except TooManyWaitingError:
            raise _refused(web.HTTPTooManyRequests, f"{MOST_WAITING} requests wait already; try again") from None
        return _json(form(answers, name=digest.hex(), body=body))

    async def _body(self, request: web.Request, kind: type[RequestT]) -> RequestT:
        """Body of a request."""
        body: RequestT = _decode(kind, await request.read())
        if fault := body.fault():
            raise _refused(web.HTTPBadRequest, fault)
        return body

    # ---- all else

    async def _models(self, request: web.Request) -> web.Response:
        self._agent(request)
        return _json(
            {"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "run", "created": 0}]}
        )

    async def _reward(self, request: web.Request) -> web.Response:
        agent = self._agent(request)
        named = request.match_info.get("trajectory")
        if named is not None and named != agent.trajectory_id:
            raise _refused(web.HTTPForbidden, f"the key is not that of {named}")
        value = _decode(RewardRequest, await request.read()).reward
        for one in value.values() if isinstance(value, dict) else [value]:
            if one is not None and abs(one) > LARGEST:
                raise _refused(web.HTTPBadRequest, f"reward={one:g}: give a number up to {LARGEST:g}")
        try:
            agent.reward(value)
        except ValueError as error:
            raise _refused(web.HTTPBadRequest, f"reward: {error}") from None
        except TrajectoryEndedError:
            raise _refused(web.HTTPGone, ENDED) from None
        return _json({"reward": value})

    async def _python(self, request: web.Request) -> web.Response:
        agent, code = self._agent(request), _decode(CodeRequest, await request.read()).code
        return await self._run(agent.python(code), "no sandbox for agents; set environment.python")

    async def _shell(self, request: web.Request) -> web.Response:
        agent, command = self._agent(request), _decode(CommandRequest, await request.read()).command
        absent = "no shell for agents; set environment.python and sandbox.programs"
        return await self._run(agent.shell(command), absent)

    async def _run(self, output: Awaitable[str], absent: str) -> web.Response:
        """Answer with what was run in the sandbox, in the session of an agent."""
        try:
            return _json({"output": await output})
        except NoSandboxError:
            raise _refused(web.HTTPNotFound, f"the run has {absent}") from None
        except TrajectoryEndedError:
            raise _refused(web.HTTPGone, ENDED) from None
        except SandboxError as error:
            raise _refused(web.HTTPServiceUnavailable, f"the sandbox failed: {error}") from None

    async def _hand_out(self, request: web.Request) -> web.Response:
        """A trajectory for an external agent, or the word that none waits now."""
        assert self._external is not None, "who starts agents hands none out"
        if not self._is_external(request):
            raise _refused(web.HTTPUnauthorized, "this is not the key of the run")
        offer = await self._external.take(PATIENCE_S)
        if offer is None:
            return _json({"id": None})
        problem = msgspec.to_builtins(offer.problem)
        return _json({"id": offer.problem.trajectory_id, "key": offer.key, "problem": problem})

    def _is_external(self, request: web.Request) -> bool:
        """True where the request has the key of the run."""
        key = _key_of(request).encode(errors="surrogateescape")
        return self._external is not None and secrets.compare_digest(key, self._external.key.encode())

    def _agent(self, request: web.Request) -> AgentEnvironment:
        """The agent whose key the request has. Raises `HTTPUnauthorized`."""
        agent = self._keys.agent(_key_of(request))
        if agent is None:
            raise _refused(web.HTTPUnauthorized, "no trajectory that goes on has this key")
        return agent


def _key_of(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


class TooLong(web.HTTPException):
    """Status 413; the library's own has a text of its own."""

    status_code = 413


@asynccontextmanager
async def serve(
    keys: Keys,
    words: Words,
    *,
    external: ExternalAgents | None = None,
    host: str,
    port: int,
    bounds: ConnectionBounds,
) -> AsyncIterator[str]:
    """Serve agents while it is open; gives the address, with a free port where it is 0. Raises `ConfigError`."""
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


async def _answers(
    agent: AgentEnvironment, digest: bytes, prompt: Prompt, *, role: str, choices: int
) -> Sequence[AgentAnswer]:
    """Turns that answer a request, each of them asked for by itself."""
    digests = [digest, *(blake3(digest + bytes([place])).digest() for place in range(1, choices))]
    requests = agent.ask(digests, prompt, role=role)
    return await asyncio.gather(*(asyncio.shield(one.answer) for one in requests))


def _digest(request: web.Request, body: bytes) -> bytes:
    """Name of a request: the same for the same body under the same key of the client's."""
    key = request.headers.get("Idempotency-Key", "").encode(errors="surrogateescape")
    return blake3(b"\0".join((request.path.encode(), key, body))).digest()


def _ids(given: list[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    if min(given) < 0 or max(given) > np.iinfo(np.int32).max:
        raise _refused(web.HTTPBadRequest, "tokens: one of them is no id of the model")
    return np.array(given, np.int32)


def _json(body: object) -> web.Response:
    return web.Response(text=encoded(body), content_type="application/json")


def _decode(kind: type[Any], body: bytes) -> Any:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _refused(web.HTTPBadRequest, str(error)) from None


def _refused(
    kind: type[web.HTTPException], reason: str, headers: Mapping[str, str] | None = None
) -> web.HTTPException:
    """Refusal in the form that clients of the API read."""
    text = encoded(error_body(reason, kind.__name__))
    return kind(text=text, content_type="application/json", headers=headers)
