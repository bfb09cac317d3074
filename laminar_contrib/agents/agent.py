"""An agent as the environment of a trajectory: the model answers each request of the agent with one turn.

`agents.kind` makes the environment, and the endpoint adds requests, which are answered in the order of arrival.
A retry gets the response of the request that it repeats; a new question of the same text gets another sample
(`tests/environment/agents/test_agents.py`).
"""

import asyncio
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web
from pydantic import ValidationError

from laminar_contrib.agents.history import AgentHistory, Message, Prompt, assistant_message
from laminar_contrib.sandbox import PythonSession, SandboxError, SessionClosedError
from laminar_contrib.tools.call_formats import JsonCalls
from laminar_py.environment import Answer, Begin, End, Problem, SampledTurn
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.credit import credits_of

KEY_BYTES = 24
ENDED = "the trajectory has ended"
MAX_WAITING = 16  # requests of one agent in its queue
MAX_REQUESTS = 64  # of one agent that are read or answered at the same time
MAX_BODIES = 4  # request bodies of one agent that are read at the same time


class AgentFailedError(Exception):
    """The agent ended with an error."""


@dataclass(slots=True, kw_only=True)
class AgentAnswer:
    """A turn of the model, as a message of the assistant and as sampled tokens."""

    message: Message
    ids: IntArray  # [n]
    logprobs: FloatArray  # [n], or [0] for a replayed turn
    is_cut: bool  # True if `max_tokens` of the request ended the turn
    num_context: int  # number of tokens before the turn
    context: IntArray | None  # these tokens, while this is the newest answer


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRequest:
    """A request that waits for a turn of the model."""

    prompt: Prompt
    role: str  # that the model plays in this turn
    answer: "asyncio.Future[AgentAnswer]"


class AgentStarter(Protocol):
    """Starts the agents of trajectories, or offers the trajectories to external agents."""

    async def start(
        self, problem: Problem, *, key: str, exited: Callable[[str], None]
    ) -> Callable[[], Awaitable[None]]:
        """Start the agent of a trajectory with the API key `key`, and return a function that ends the agent.

        When the agent exits by itself, call `exited` with its fault, or "".
        """
        ...


class AgentEnvironment:
    """Environment whose messages to the model are the requests of an agent.

    `agents` has the running agents by their API keys. `session` runs code for the agent.
    """

    def __init__(
        self,
        starter: AgentStarter,
        call_format: JsonCalls,
        *,
        agents: "dict[str, AgentEnvironment]",
        deterministic: bool,
        session: PythonSession | None = None,
    ) -> None:
        self.deterministic = deterministic
        self.request_slots = asyncio.Semaphore(MAX_REQUESTS)  # the endpoint refuses instead of waiting
        self.body_slots = asyncio.Semaphore(MAX_BODIES)
        self._starter = starter
        self._agents = agents
        self._call_format = call_format
        self._session = session
        self._history = AgentHistory()
        self._queue = asyncio.Queue[AgentRequest | None]()  # `ask` bounds it; None: the end
        self._answers: dict[bytes, asyncio.Future[AgentAnswer]] = {}  # of the last request of each digest
        self._lost = defaultdict[bytes, list[asyncio.Future[AgentAnswer]]](list)  # whose clients are gone
        self._unanswered = set[asyncio.Future[AgentAnswer]]()
        self._current: AgentRequest | None = None  # the model's next turn answers it
        self._newest: AgentAnswer | None = None
        self._roles: list[str] = []  # that the model played, by turn
        self._last: End | AgentFailedError | None = None  # once it is set, waiting requests get no answer
        self._end_agent: Callable[[], Awaitable[None]] | None = None
        self._key = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
        self._is_closed = False

    # ---- called by the host

    async def reset(self, problem: Problem) -> Begin:
        """Start the agent and wait for its first request, which begins the conversation."""
        self._agents[self._key] = self
        self._end_agent = await self._starter.start(problem, key=self._key, exited=self._agent_exited)
        first = await self._next_prompt()
        if isinstance(first, End):
            raise AgentFailedError("the agent ended before its first request to the model; see its log")
        return first

    async def step_tokens(self, turn: SampledTurn) -> Answer:
        """Answer the current request with a turn of the model, and return the agent's next request."""
        request, self._current = self._current, None
        assert request is not None, "a turn of the model answers a request"
        self._roles.append(request.role)
        number, prompt = len(self._roles), request.prompt
        message = assistant_message(
            turn.text,
            self._call_format if prompt.tools and prompt.may_call else None,
            turn=number,
            opened=turn.opened,
        )
        self._history.add_turn(prompt.kind, prompt.with_answer(message, turn.ids), turn=number)
        if self._newest is not None:
            self._newest.context = None
        self._newest = AgentAnswer(
            message=message,
            ids=turn.ids,
            logprobs=turn.logprobs,
            is_cut=turn.is_cut,
            num_context=len(turn.context),
            context=turn.context,
        )
        request.answer.set_result(self._newest)
        return await self._next_prompt()

    async def close(self) -> None:
        """End the agent and its session; refuse its requests from now on."""
        self._refuse_requests()
        async with AsyncExitStack() as stack:  # runs in reverse order, each step even if another fails
            stack.callback(self._agents.pop, self._key, None)
            if self._end_agent is not None:
                stack.push_async_callback(self._end_agent)
            if self._session is not None:
                stack.push_async_callback(self._session.close)

    # ---- called by the endpoint; each method raises an HTTP status if it refuses a request

    async def ask(
        self, digests: Sequence[bytes], prompt: Prompt, *, role: str, is_retry: bool | None
    ) -> list[AgentAnswer]:
        """Queue a request for each digest, all with the same prompt, and wait for their answers.

        A retry gets the answer of an equal request whose client is gone, or else of the last one. If
        `is_retry` is None, the client does not say whether this is one, and a repeated request is a retry until
        the first one is answered.
        """
        new = [digest for digest in digests if not self._repeats(digest, is_retry=is_retry)]
        if new and self._is_closed:
            raise web.HTTPGone(text=ENDED)
        if self._queue.qsize() + len(new) > MAX_WAITING:
            raise web.HTTPTooManyRequests(text=f"{MAX_WAITING} requests wait already; try again")
        for digest in new:
            answer = self._answers[digest] = asyncio.get_running_loop().create_future()
            self._unanswered.add(answer)
            answer.add_done_callback(self._unanswered.discard)
            self._queue.put_nowait(AgentRequest(prompt=prompt, role=role, answer=answer))
        answers = [
            self._lost[digest].pop(0) if digest not in new and self._lost[digest] else self._answers[digest]
            for digest in digests
        ]
        try:
            return await asyncio.gather(*map(asyncio.shield, answers))
        except asyncio.CancelledError:
            for digest, answer in zip(digests, answers, strict=True):
                self._lost[digest].append(answer)
            raise

    def _repeats(self, digest: bytes, *, is_retry: bool | None) -> bool:
        earlier = self._answers.get(digest)
        return earlier is not None and (not earlier.done() if is_retry is None else is_retry)

    async def python(self, code: str) -> str:
        """Run code in this agent's sandbox session, and return its output as a terminal shows it."""
        if self._session is None:
            raise web.HTTPNotFound(text="the run has no sandbox for agents; set environment.python")
        try:
            return await self._session.python(code)
        except SessionClosedError:
            raise web.HTTPGone(text=ENDED) from None
        except SandboxError as error:
            raise web.HTTPServiceUnavailable(text=f"the sandbox failed: {error}") from None

    def end_with_reward(self, reward: float | dict[str, float] | None) -> None:
        """End the trajectory. `reward` is a number, a number for each role, or None: other terms score it."""
        if self._is_closed or self._last is not None:
            raise web.HTTPGone(text=ENDED)
        try:
            end = End(reward)
            if isinstance(reward, dict):
                credits_of(reward, self._roles if self._current is None else [*self._roles, self._current.role])
        except (ValidationError, ValueError) as error:
            raise web.HTTPBadRequest(text=f"reward: {error}") from None
        self._stop(end)

    # ----

    def _agent_exited(self, fault: str) -> None:
        """Note that the agent has exited. Unless it gave a reward, other terms score the response."""
        if self._last is None:
            self._stop(AgentFailedError(fault) if fault else End())

    def _stop(self, last: End | AgentFailedError) -> None:
        self._last = last
        self._queue.put_nowait(None)  # wakes `_next_prompt`

    async def _next_prompt(self) -> Answer:
        """Wait for the agent's next request, and return its prompt; return `End` once the agent has ended.

        Raises `AgentFailedError` if the agent failed.
        """
        request = await self._queue.get()
        if isinstance(self._last, AgentFailedError):
            raise self._last
        if self._last is not None:
            self._refuse_requests()
            return End(self._last.reward, roles=tuple(self._roles))
        assert request is not None, "None comes only with the end"
        self._current = request
        after, size = self._history.longest_prefix(request.prompt.kind, request.prompt.request_bytes)
        return request.prompt.observation(after, size, is_latest=after == len(self._roles))

    def _refuse_requests(self) -> None:
        self._is_closed = True
        for answer in list(self._unanswered):
            answer.set_exception(web.HTTPGone(text=ENDED))
            answer.exception()  # mark it as retrieved: the client may be gone
