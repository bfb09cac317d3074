"""An agent as the environment of a trajectory: the model reads its requests and answers each by one turn.

`agents.kind` makes it; the endpoint adds requests. Requests are answered one after another, in the order in which
they arrive. A repeated request gets the answer of the first one (`tests/environment/agents/test_agents.py`).
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from laminar_contrib.agents.connections import HttpStatusError
from laminar_contrib.agents.history import (
    AgentHistory,
    AssistantMessages,
    Message,
    Prompt,
    WordsTooLongError,
)
from laminar_contrib.sandbox import PythonSession, SandboxError, SessionClosedError
from laminar_py.config.environment import Words
from laminar_py.environment import Answer, Begin, End, Problem, SampledTurn
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.credit import credits_of

KEY_BYTES = 24
ENDED = "the trajectory has ended"
MOST_WAITING = 16  # requests of one agent in its queue


class AgentFailedError(Exception):
    """The agent ended with an error."""


@dataclass(slots=True, kw_only=True)
class AgentAnswer:
    """A turn of the model, as a message of the assistant and as sampled tokens."""

    message: Message
    ids: IntArray  # [n]
    logprobs: FloatArray  # [n], or [0]
    is_cut: bool  # True if `max_tokens` of the request ended the turn
    num_context: int  # number of tokens before the turn
    context: IntArray | None  # these tokens, while this is the newest answer


@dataclass(slots=True, kw_only=True)
class AgentRequest:
    """A request for a turn of the model."""

    digest: bytes  # of the request's body
    prompt: Prompt | None  # None once the request is answered
    role: str  # that the model plays in this turn
    answer: "asyncio.Future[AgentAnswer]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    def end(self, answer: AgentAnswer) -> None:
        """Set the answer, and free all other data of the request."""
        self.prompt = None
        self.answer.set_result(answer)

    def refuse(self, error: Exception) -> None:
        """Fail the request with an error unless it has an answer, and free its data."""
        self.prompt = None
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # mark it as retrieved: the client may be gone


class StartedAgent(Protocol):
    """An agent that was started, or a trajectory that waits for an external one."""

    async def end(self) -> None:
        """End the agent, also while it works."""
        ...


class Agents(Protocol):
    """Starts the agents of trajectories, or offers the trajectories to external agents."""

    async def start(self, problem: Problem, *, key: str, ended: Callable[[str], None]) -> StartedAgent:
        """Start the agent of a trajectory, with the API key `key`.

        When it ends, call `ended` with its fault, or "".
        """
        ...


class AgentEnvironment:
    """Environment whose messages to the model are the requests of an agent.

    `agents` starts the agent. `keys` has the running agents by their API keys. A request with more than
    `most_bytes` of new text is refused. `session` runs code for the agent.
    """

    def __init__(
        self,
        agents: Agents,
        messages: AssistantMessages,
        words: Words,
        *,
        keys: "dict[str, AgentEnvironment]",
        deterministic: bool,
        most_bytes: int,
        session: PythonSession | None = None,
    ) -> None:
        self.deterministic = deterministic
        self.trajectory_id = ""
        self._agents = agents
        self._keys = keys
        self._messages = messages
        self._session = session
        self._history = AgentHistory(words, most_bytes=most_bytes)
        # at most MOST_WAITING requests and the end: further ones get status 429, and clients retry
        self._inbox: asyncio.Queue[AgentRequest | None] = asyncio.Queue()
        self._last: End | AgentFailedError | None = None  # once it is set, waiting requests get no answer
        self._requests: dict[bytes, AgentRequest] = {}  # all, by digest
        self._current: AgentRequest | None = None  # the model's next turn answers it
        self._roles: list[str] = []  # that the model played, by turn
        self._sampled: SampledTurn | None = None
        self._newest: AgentAnswer | None = None
        self._agent: StartedAgent | None = None
        self._key = ""
        self._ended = False

    # ---- called by the host

    async def reset(self, problem: Problem) -> Begin:
        """Start the agent and wait for its first request, which begins the conversation."""
        self.trajectory_id = problem.trajectory_id
        self._key = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
        self._keys[self._key] = self
        self._agent = await self._agents.start(problem, key=self._key, ended=self._agent_ended)
        first = await self._next_request()
        if isinstance(first, End):
            raise AgentFailedError("the agent ended before it asked its model anything")
        return first

    def receive_turn(self, turn: SampledTurn) -> None:
        """Keep the tokens of a turn until `step` gets its text."""
        self._sampled = turn

    async def step(self, action: str) -> Answer:
        """Answer the current request with a turn of the model, and return the agent's next request."""
        current, turn = self._current, self._sampled
        assert current is not None, "a turn of the model answers a request"
        assert turn is not None, "its tokens come before its text"
        self._current = None
        assert current.prompt is not None, "it is answered once"
        self._roles.append(current.role)
        message = self._messages.read_turn(action, turn=len(self._roles), has_tools=current.prompt.has_tools)
        current.prompt.record_answer(self._history, turn, message, turn=len(self._roles))
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
        current.end(self._newest)
        return await self._next_request()

    async def close(self) -> None:
        """End the agent and its session; refuse its requests from now on."""
        self._refuse_requests()
        async with AsyncExitStack() as stack:  # runs in reverse order, each step even if another fails
            stack.callback(self._keys.pop, self._key, None)
            if self._agent is not None:
                stack.push_async_callback(self._agent.end)
            if self._session is not None:
                stack.push_async_callback(self._session.close)

    # ---- called by the endpoint

    def add_requests(self, digests: Sequence[bytes], prompt: Prompt, *, role: str) -> list[AgentRequest]:
        """Queue one request for each digest, all with the same prompt. A known digest gives its earlier request.

        Raises `HttpStatusError` if the trajectory has ended or the queue is full; then it queues none.
        """
        new = [digest for digest in digests if digest not in self._requests]
        if new and self._ended:
            raise HttpStatusError(410, ENDED)
        if self._inbox.qsize() + len(new) > MOST_WAITING:
            raise HttpStatusError(429, f"{MOST_WAITING} requests wait already; try again")
        for digest in new:
            request = AgentRequest(digest=digest, prompt=prompt, role=role)
            self._requests[digest] = request
            self._inbox.put_nowait(request)
        return [self._requests[digest] for digest in digests]

    async def python(self, code: str) -> str:
        """Run code in this agent's sandbox session, and return its output as a terminal shows it.

        Raises `HttpStatusError`, also if the sandbox itself fails.
        """
        if self._session is None:
            raise HttpStatusError(404, "the run has no sandbox for agents; set environment.python")
        if self._ended:
            raise HttpStatusError(410, ENDED)
        try:
            return await self._session.python(code)
        except SessionClosedError:
            raise HttpStatusError(410, ENDED) from None
        except SandboxError as error:
            raise HttpStatusError(503, f"the sandbox failed: {error}") from None

    def end_with_reward(self, value: float | dict[str, float] | None) -> None:
        """End the trajectory with a reward, with one for each role, or with None.

        Raises `HttpStatusError` if it has ended already, or if a role with turns has no reward.
        """
        if self._ended or self._last is not None:
            raise HttpStatusError(410, ENDED)
        if isinstance(value, dict):
            roles = self._roles if self._current is None else [*self._roles, self._current.role]
            try:
                credits_of(value, roles)
            except ValueError as error:
                raise HttpStatusError(400, f"reward: {error}") from None
        self._stop(End(value))

    def _agent_ended(self, fault: str) -> None:
        """Note that the agent has exited. Unless it gave a reward, other terms score the response."""
        if self._last is None:
            self._stop(AgentFailedError(fault) if fault else End())

    def _stop(self, last: End | AgentFailedError) -> None:
        self._last = last
        self._inbox.put_nowait(None)  # wakes `_next_request`

    async def _next_request(self) -> Answer:
        """Wait for the agent's next request, and return its new words; return `End` once the agent has ended.

        A request that is too long is refused, and the wait continues. Raises `AgentFailedError` if the agent
        failed.
        """
        while True:
            given = await self._inbox.get()
            if isinstance(self._last, AgentFailedError):
                raise self._last
            if self._last is not None:
                self._refuse_requests()
                return End(self._last.reward, roles=tuple(self._roles))
            assert given is not None, "None comes only with the end"
            assert given.prompt is not None, "it was not answered yet"
            try:
                words = given.prompt.new_words(self._history, turn=len(self._roles) + 1)
            except WordsTooLongError as error:
                del self._requests[given.digest]
                given.refuse(HttpStatusError(413, str(error)))
                continue
            self._current = given
            return words

    def _refuse_requests(self) -> None:
        self._ended = True
        for request in self._requests.values():
            request.refuse(HttpStatusError(410, ENDED))
