"""An agent as the environment of a trajectory: its requests are said to the model, whose turns answer them.

Owned by `agents.kind`; the endpoint hands it requests. Invariant: requests are answered one after another, in the
order in which they came, each by one turn of the model; a request that is repeated has the answer of the first.
"""

import asyncio
import secrets
from dataclasses import dataclass

from laminar_py.environment.agents.conversation import Conversation, Message
from laminar_py.environment.agents.messages import AssistantMessages
from laminar_py.environment.agents.runner import AgentRunner, RunningAgent
from laminar_py.environment.protocol import Answer, End, Observation, Problem, Rewrite

KEY_BYTES = 24
MOST_WAITING = 16  # requests of one agent, for those before them


class TrajectoryEndedError(Exception):
    """A request of an agent whose trajectory has ended."""


class TooManyWaitingError(Exception):
    """A request of an agent of which as many wait as may."""


class AgentFailedError(Exception):
    """An agent that ended with an error."""


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """A request for a turn, by the digest of what was sent."""

    digest: bytes
    messages: list[Message]
    tools: list[Message]


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


class AgentEnvironment:
    """Environment whose words are the requests of an agent.

    `keys` gives the key that its requests are to have; `runner` starts the agent.
    """

    def __init__(
        self, runner: AgentRunner, messages: AssistantMessages, *, keys: "Keys", deterministic: bool
    ) -> None:
        self.deterministic = deterministic
        self._runner = runner
        self._keys = keys
        self._messages = messages
        self._conversation = Conversation()
        # at most MOST_WAITING, and the end: what is more is refused, and its sender tries again
        self._inbox: asyncio.Queue[AgentRequest | None] = asyncio.Queue()
        self._last: End | AgentFailedError | None = None  # once there is one, nothing that waits is answered
        self._answers: dict[bytes, asyncio.Future[Message]] = {}
        self._digests: list[bytes] = []  # of the requests that have a turn, in order
        self._agent: RunningAgent | None = None
        self._key = ""
        self._has_tools = False  # of the last request
        self._ended = False

    # ---- called by the host

    async def reset(self, problem: Problem) -> Observation | Rewrite:
        """Start the agent; its first request begins the conversation."""
        self._key = self._keys.admit(self)
        self._agent = await self._runner.start(problem, key=self._key, ended=self._left)
        first = await self._next()
        if isinstance(first, End):
            raise AgentFailedError("the agent ended before it asked its model anything")
        return first

    async def step(self, action: str) -> Answer:
        """Answer the request with a turn of the model; the next request is what is said to that."""
        message = self._messages.read(action, turn=len(self._digests), has_tools=self._has_tools)
        self._conversation.answered(message)
        self._answers[self._digests[-1]].set_result(message)
        return await self._next()

    async def close(self) -> None:
        """End the agent; its requests are refused from here on."""
        self._finish()
        try:
            if self._agent is not None:
                await self._agent.end()
        finally:
            self._keys.remove(self._key)

    # ---- called by the endpoint

    async def ask(self, request: AgentRequest) -> Message:
        """The model's answer to a request. Raises `TrajectoryEndedError`, `TooManyWaitingError`."""
        answer = self._answers.get(request.digest)
        if answer is None:
            if self._ended:
                raise TrajectoryEndedError
            if self._inbox.qsize() >= MOST_WAITING:
                raise TooManyWaitingError
            answer = self._answers[request.digest] = asyncio.get_running_loop().create_future()
            self._inbox.put_nowait(request)
        return await asyncio.shield(answer)

    def reward(self, value: float) -> None:
        """End the trajectory with a reward. Raises `TrajectoryEndedError` where it has ended."""
        if self._ended or self._last is not None:
            raise TrajectoryEndedError
        self._end(End(value))

    def _left(self, fault: str) -> None:
        """Note that the agent has ended by itself: other terms judge the response, unless it said its reward."""
        if self._last is None:
            self._end(AgentFailedError(fault) if fault else End())

    def _end(self, last: End | AgentFailedError) -> None:
        self._last = last
        self._inbox.put_nowait(None)  # for who waits for a request

    async def _next(self) -> Answer:
        given = await self._inbox.get()
        if isinstance(self._last, AgentFailedError):
            raise self._last
        if self._last is not None:
            self._finish()
            return self._last
        assert given is not None, "only the end wakes who waits for nothing"
        self._digests.append(given.digest)
        self._has_tools = bool(given.tools)
        return self._conversation.join(given.messages, given.tools)

    def _finish(self) -> None:
        self._ended = True
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(TrajectoryEndedError())
                answer.exception()  # nobody may wait for it
