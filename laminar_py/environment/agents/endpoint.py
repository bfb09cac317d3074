"""The endpoint of agents: the API of OpenAI as far as agents need it, and a form of it in tokens.

Served by each process of environments, for the agents of its trajectories. A key names a trajectory. Invariants:
a request is answered by one whole turn of the model, or refused by a status; what is read of one is bounded.
"""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
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
    TooManyWaitingError,
    TrajectoryEndedError,
)
from laminar_py.environment.agents.bodies import (
    MODEL,
    MOST_CHOICES,
    AnyRequest,
    Bodies,
    ChatRequest,
    CompletionRequest,
    RewardRequest,
    TokensRequest,
    encoded,
    error_body,
)
from laminar_py.environment.agents.external import ExternalAgents
from laminar_py.environment.agents.requests import Chat, Prompt, TextPrompt, TokenPrompt
from laminar_py.environment.agents.streamed import EventStream
from laminar_py.environment.calls import LARGEST

SHUTDOWN_S = 1.0  # for requests that are being answered
PATIENCE_S = 20.0  # of an external agent, for a trajectory
WILDCARDS = ("0.0.0.0", "::")
ENDED = "the trajectory has ended"
RequestT = TypeVar("RequestT", bound=AnyRequest)


class AgentEndpoint:
    """Handlers of the endpoint."""

    def __init__(self, keys: Keys, words: Words, external: ExternalAgents | None = None) -> None:
        self._keys = keys
        self._external = external
        self._words = words
        self._bodies = Bodies(words)

    def app(self, *, max_body_bytes: int) -> web.Application:
        """The application, which reads no longer body."""
        app = web.Application(client_max_size=max_body_bytes)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/reward", self._reward)
        app.router.add_post("/v1/trajectories/{trajectory}/reward", self._reward)
        app.router.add_get("/v1/models", self._models)
        if self._external is not None:
            app.router.add_post("/v1/trajectories", self._hand_out)
        return app

    # ---- turns

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, ChatRequest)
        return await self._answer(request, body, Chat(body.plain(), body.tools or []), self._bodies.chat)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, CompletionRequest)
        given = body.prompt
        prompt = TextPrompt(given) if isinstance(given, str) else TokenPrompt(_ids(given))
        return await self._answer(request, body, prompt, self._bodies.completion)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._body(request, TokensRequest)
        if body.stream:
            raise _refused(web.HTTPBadRequest, "stream: is not done here; leave it out")
        return await self._answer(request, body, TokenPrompt(_ids(body.token_ids)), self._bodies.generated)

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
                (waiting,) = agent.ask([digest], prompt, role=body.model, listens=listens)
                return await EventStream(waiting, body, self._words).serve(request)
            answers = await _answers(agent, digest, prompt, role=body.model, choices=choices)
        except TrajectoryEndedError:
            raise _refused(web.HTTPGone, ENDED) from None
        except TooManyWaitingError:
            raise _refused(web.HTTPTooManyRequests, f"{MOST_WAITING} requests wait already; try again") from None
        return _json(form(answers, name=digest.hex(), body=body))

    async def _body(self, request: web.Request, kind: type[RequestT]) -> RequestT:
        """Body of a request, whose key is one."""
        self._agent(request)
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

    async def _hand_out(self, request: web.Request) -> web.Response:
        """A trajectory for an external agent, or the word that none waits now."""
        assert self._external is not None, "who starts agents hands none out"
        if not secrets.compare_digest(_key_of(request).encode(), self._external.key.encode()):
            raise _refused(web.HTTPUnauthorized, "this is not the key of the run")
        offer = await self._external.take(PATIENCE_S)
        if offer is None:
            return _json({"id": None})
        problem = msgspec.to_builtins(offer.problem)
        return _json({"id": offer.problem.trajectory_id, "key": offer.key, "problem": problem})

    def _agent(self, request: web.Request) -> AgentEnvironment:
        """The agent whose key the request has. Raises `HTTPUnauthorized`."""
        agent = self._keys.agent(_key_of(request))
        if agent is None:
            raise _refused(web.HTTPUnauthorized, "no trajectory that goes on has this key")
        return agent


def _key_of(request: web.Request) -> str:
    return request.headers.get("Authorization", "").removeprefix("Bearer ")


@asynccontextmanager
async def serve(endpoint: AgentEndpoint, *, host: str, port: int, max_body_bytes: int) -> AsyncIterator[str]:
    """Serve agents while it is open; gives the address, with a free port where it is 0. Raises `ConfigError`."""
    app = endpoint.app(max_body_bytes=max_body_bytes)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            remedy = "choose another, or 0"
            raise ConfigError(
                f"environment.port={port}: cannot be served on {host} ({error.strerror}); {remedy}"
            ) from None
        name = socket.gethostname() if host in WILDCARDS else host
        yield f"http://{name}:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


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


def _refused(kind: type[web.HTTPException], reason: str) -> web.HTTPException:
    """Refusal in the form that clients of the API read."""
    return kind(text=encoded(error_body(reason, kind.__name__)), content_type="application/json")
