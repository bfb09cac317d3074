"""An agent as the environment of a trajectory: its requests are said to the model, whose turns answer them.

Owned by `agents.kind`; the endpoint hands it requests. Invariant: requests are answered one after another, in the
order in which they came, each by one turn of the model; a request that is repeated has the answer of the first.
"""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Protocol

from laminar_py.config.environment import Words
from laminar_py.environment.agents.connections import HttpStatusError
from laminar_py.environment.agents.history import (
    AgentHistory,
    AssistantMessages,
    Message,
    Prompt,
    WordsTooLongError,
)
from laminar_py.environment.protocol import Answer, Begin, End, Problem, SampledTurn
from laminar_py.environment.python_session import PythonSession, SessionClosedError
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.credit import credits_of
from laminar_py.sandbox.records import SandboxError

KEY_BYTES = 24
ENDED = "the trajectory has ended"
MOST_WAITING = 16  # requests of one agent, for those before them


class AgentFailedError(Exception):
    """An agent that ended with an error."""


@dataclass(slots=True, kw_only=True)
class AgentAnswer:
    """A turn of the model: as a message of the assistant, and as it was sampled."""

    message: Message
    ids: IntArray  # [n]
    logprobs: FloatArray  # [n], or [0]
    is_cut: bool  # by the most tokens that the request gave it
    num_context: int  # tokens that it was sampled behind
    context: IntArray | None  # these tokens, while it is the newest answer


@dataclass(slots=True, kw_only=True)
class AgentRequest:
    """A request for a turn, by the digest of what was sent; `ids` grow as its turn is sampled, if it listens."""

    digest: bytes
    prompt: Prompt | None  # until it is answered
    role: str  # whose turn answers it
    listens: bool
    answer: "asyncio.Future[AgentAnswer]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)  # more was sampled, or all

    def hear(self, place: int, ids: IntArray, logprobs: FloatArray) -> None:
        """Take in tokens from `place` on; what does not follow what is here comes with the whole turn."""
        if self.listens and place == len(self.ids):
            self.ids.extend(ids.tolist())
            self.logprobs.extend(logprobs.tolist())
            self.news.set()

    def end(self, answer: AgentAnswer) -> None:
        """Have its answer; all else that was kept for it goes."""
        self.prompt, self.ids, self.logprobs = None, [], []
        self.answer.set_result(answer)
        self.news.set()

    def refuse(self, error: Exception) -> None:
        """Have none, unless it has one; what was kept for it goes."""
        self.prompt = None
        if not self.answer.done():
            self.answer.set_exception(error)
            self.answer.exception()  # nobody may wait for it
        self.news.set()


class Keys:
    """Keys of the agents whose trajectories go on, e.g. `keys.agent("sk-...")`."""

    def __init__(self) -> None:
        self._agents: dict[str, AgentEnvironment] = {}

    def admit(self, agent: "AgentEnvironment") -> str:
        """A key for its requests."""
        key = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
        self._agents[key] = agent
        return key

    def remove(self, key: str) -> None:
        """Refuse it from here on."""
        self._agents.pop(key, None)

    def agent(self, key: str) -> "AgentEnvironment | None":
        """The agent that has it."""
        return self._agents.get(key)


class StartedAgent(Protocol):
    """An agent that was started, or for which one is looked."""

    async def end(self) -> None:
        """End it, whatever it does."""
        ...


class Agents(Protocol):
    """Whoever starts the agents of trajectories, or has them started elsewhere."""

    async def start(self, problem: Problem, *, key: str, ended: Callable[[str], None]) -> StartedAgent:
        """The agent of a trajectory, whose requests have `key`; calls `ended` with its fault, or ""."""
        ...


class AgentEnvironment:
    """Environment whose words are the requests of an agent.

    `keys` gives the key that its requests are to have; `agents` starts it. One that says more than `most_bytes`
    anew is refused. `session` runs code for it.
    """

    def __init__(
        self,
        agents: Agents,
        messages: AssistantMessages,
        words: Words,
        *,
        keys: "Keys",
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
        # at most MOST_WAITING, and the end: what is more is refused, and its sender tries again
        self._inbox: asyncio.Queue[AgentRequest | None] = asyncio.Queue()
        self._last: End | AgentFailedError | None = None  # once there is one, nothing that waits is answered
        self._requests: dict[bytes, AgentRequest] = {}  # all, by digest
        self._present: AgentRequest | None = None  # that the model answers next
        self._roles: list[str] = []  # of the turns that the model took
        self._sampled: SampledTurn | None = None
        self._newest: AgentAnswer | None = None
        self._agent: StartedAgent | None = None
        self._key = ""
        self._ended = False

    # ---- called by the host

    async def reset(self, problem: Problem) -> Begin:
        """Start the agent; its first request begins the conversation."""
        self.trajectory_id = problem.trajectory_id
        self._key = self._keys.admit(self)
        self._agent = await self._agents.start(problem, key=self._key, ended=self._left)
        first = await self._next()
        if isinstance(first, End):
            raise AgentFailedError("the agent ended before it asked its model anything")
        return first

    @property
    def listens(self) -> bool:
        """True where somebody waits for the next turn token by token."""
        return self._present is not None and self._present.listens

    def hear(self, place: int, ids: IntArray, logprobs: FloatArray) -> None:
        """Pass tokens of the present turn on to whoever waits for them."""
        if self._present is not None:
            self._present.hear(place, ids, logprobs)

    def take(self, turn: SampledTurn) -> None:
        """Note a turn as it was sampled."""
        self._sampled = turn

    async def step(self, action: str) -> Answer:
        """Answer the request with a turn of the model; the next request is what is said to that."""
        present, turn = self._present, self._sampled
        assert present is not None, "a turn of the model answers a request"
        assert turn is not None, "its tokens come before its text"
        self._present = None
        assert present.prompt is not None, "it is answered once"
        self._roles.append(present.role)
        message = self._messages.read(action, turn=len(self._roles), has_tools=present.prompt.has_tools)
        present.prompt.note_answer(self._history, turn, message, turn=len(self._roles))
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
        present.end(self._newest)
        return await self._next()

    async def close(self) -> None:
        """End the agent; its requests are refused from here on."""
        self._finish()
        async with AsyncExitStack() as stack:  # the last first, and each of them whatever becomes of the others
            stack.callback(self._keys.remove, self._key)
            if self._agent is not None:
                stack.push_async_callback(self._agent.end)
            if self._session is not None:
                stack.push_async_callback(self._session.close)

    # ---- called by the endpoint

    def ask(
        self, digests: Sequence[bytes], prompt: Prompt, *, role: str, listens: bool = False
    ) -> list[AgentRequest]:
        """Requests for as many answers to the same, or none; those that were sent before are these again.

        Raises `HttpStatusError`.
        """
        new = [digest for digest in digests if digest not in self._requests]
        if new and self._ended:
            raise HttpStatusError(410, ENDED)
        if self._inbox.qsize() + len(new) > MOST_WAITING:
            raise HttpStatusError(429, f"{MOST_WAITING} requests wait already; try again")
        for digest in new:
            request = AgentRequest(digest=digest, prompt=prompt, role=role, listens=listens)
            self._requests[digest] = request
            self._inbox.put_nowait(request)
        return [self._requests[digest] for digest in digests]

    async def python(self, code: str) -> str:
        """Run code in the sandbox, in a session of this agent; its output, as a terminal shows it.

        Raises `HttpStatusError`, also where the sandbox itself fails.
        """
        if self._session is None:
            raise HttpStatusError(404, "the run has no sandbox for agents; set environment.python")
        return await self._inside(self._session.python, code)

    async def shell(self, command: str) -> str:
        """`python`, with a command of a shell."""
        if self._session is None or not self._session.has_shell:
            absent = "no shell for agents; set environment.python and sandbox.programs"
            raise HttpStatusError(404, f"the run has {absent}")
        return await self._inside(self._session.shell, command)

    async def _inside(self, run: Callable[[str], Awaitable[str]], text: str) -> str:
        if self._ended:
            raise HttpStatusError(410, ENDED)
        try:
            return await run(text)
        except SessionClosedError:
            raise HttpStatusError(410, ENDED) from None
        except SandboxError as error:
            raise HttpStatusError(503, f"the sandbox failed: {error}") from None

    def reward(self, value: float | dict[str, float] | None) -> None:
        """End the trajectory with a reward, one for each role, or none.

        Raises `HttpStatusError` where it has ended, and where a role that has turns has no reward.
        """
        if self._ended or self._last is not None:
            raise HttpStatusError(410, ENDED)
        if isinstance(value, dict):
            roles = self._roles if self._present is None else [*self._roles, self._present.role]
            try:
                credits_of(value, roles)
            except ValueError as error:
                raise HttpStatusError(400, f"reward: {error}") from None
        self._end(End(value))

    def _left(self, fault: str) -> None:
        """Note that the agent has ended by itself: other terms judge the response, unless it said its reward."""
        if self._last is None:
            self._end(AgentFailedError(fault) if fault else End())

    def _end(self, last: End | AgentFailedError) -> None:
        self._last = last
        self._inbox.put_nowait(None)  # for who waits for a request

    async def _next(self) -> Answer:
        while True:
            given = await self._inbox.get()
            if isinstance(self._last, AgentFailedError):
                raise self._last
            if self._last is not None:
                self._finish()
                return End(self._last.reward, roles=tuple(self._roles))
            assert given is not None, "only the end wakes who waits for nothing"
            assert given.prompt is not None, "it was not answered yet"
            try:
                words = given.prompt.join(self._history, turn=len(self._roles) + 1)
            except WordsTooLongError as error:
                del self._requests[given.digest]
                given.refuse(HttpStatusError(413, str(error)))
                continue
            self._present = given
            return words

    def _finish(self) -> None:
        self._ended = True
        for request in self._requests.values():
            request.refuse(HttpStatusError(410, ENDED))
