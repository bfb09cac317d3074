"""The interface of an environment: `reset` and `step`, each of them synchronous or a coroutine.

    class Guess:
        deterministic = True

        def reset(self, problem):
            self.number = problem.fields["number"]
            return Observation("Guess a number below 10.")

        def step(self, action):
            return End(1.0) if action.strip() == str(self.number) else Observation("No. Again.")

One instance answers one trajectory, from its first turn to its end.
"""

from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.environment import Problem as Problem

MOST_TOKENS = 2**31 - 1  # of a turn, that an environment may name as its limit


class Role(StrEnum):
    """Speaker of an observation, for the chat template."""

    USER = "user"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Observation:
    """Messages of an environment to the model, e.g. `Observation("391", role=Role.TOOL)`; each text is a message.

    Only `reset` may return an observation without a text: then the model sees the prompt alone. `after` goes back
    in the conversation: the messages follow that turn of the model (1 is its first) and its context, and the model
    no longer sees later turns. `Observation("Think briefly.", max_tokens=64)` limits the model's next turn.
    """

    texts: str | tuple[str, ...] = ()
    role: Role = Role.USER
    after: int | None = None
    max_tokens: int | None = None  # of the model's next turn, at least 1

    @property
    def messages(self) -> tuple[str, ...]:
        """Texts, one for each message."""
        return (self.texts,) if isinstance(self.texts, str) else self.texts


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A conversation that replaces everything the model saw, the prompt included, e.g. after a summary:

    `Rewrite((("user", "You have read 40 files. In short: ... Continue."),))`, or a text if prompts are text.
    """

    messages: str | tuple[tuple[str, str] | Mapping[str, object], ...]  # (role, text), or dicts for the template
    tools: tuple[Mapping[str, object], ...] = ()  # tools for the chat template, in place of the run's
    max_tokens: int | None = None  # of the model's next turn, at least 1

    @property
    def turns(self) -> tuple[Mapping[str, object], ...]:
        """Messages as dicts for a chat template."""
        if isinstance(self.messages, str):
            return ({"role": Role.USER.value, "content": self.messages},)
        return tuple(
            message if isinstance(message, Mapping) else {"role": message[0], "content": message[1]}
            for message in self.messages
        )


@dataclass(frozen=True, slots=True)
class TokenWords:
    """Token ids that the model reads before its next turn, used as they are.

    They follow the model's turn `after` (1 is its first) and the context of that turn; 0: they begin a
    conversation.
    """

    ids: IntArray  # [n]
    after: int
    max_tokens: int | None = None  # of the model's next turn, at least 1


@dataclass(frozen=True, slots=True)
class End:
    """End of a trajectory, e.g. `End(1.0)`. Without a reward, other terms of the task score the response.

    If the model played several roles, give each its reward, and name the role of each turn: `End({"first": 1.0,
    "second": 0.0}, roles=("first", "second", "first"))`.
    """

    reward: float | Mapping[str, float] | None = None
    roles: tuple[str, ...] = ()


Begin: TypeAlias = Observation | Rewrite | TokenWords
Answer: TypeAlias = Begin | End


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """Tokens that the model sampled in one turn."""

    context: IntArray  # [c] tokens before the turn, without the prompt of the data set
    ids: IntArray  # [n] with the token that ended it
    logprobs: FloatArray  # [n], or [0] for a turn that is replayed
    is_cut: bool = False  # True if the environment's `max_tokens` ended the turn, so that no stop token is in it


class Environment(Protocol):
    """Counterpart of a model in one trajectory.

    A class with `deterministic = True` always answers the same actions alike. If its process crashes, a new
    instance replays the actions. A `Restorable` environment is restored from its last snapshot instead.
    """

    def reset(self, problem: Problem) -> Begin | Awaitable[Begin]:
        """Begin the trajectory and return the messages before the model's first turn."""
        ...

    def step(self, action: str) -> Answer | Awaitable[Answer]:
        """Answer a turn of the model: its text, without the token that ended it."""
        ...


@runtime_checkable
class Restorable(Protocol):
    """An environment that can save its state between turns."""

    def snapshot(self) -> bytes:
        """Return the state as bytes, from which a new instance in another process can continue."""
        ...

    def restore(self, state: bytes) -> None:
        """Continue from the state of a snapshot, in place of `reset`."""
        ...


@runtime_checkable
class TurnListener(Protocol):
    """An environment that reads the tokens of the model's turns, too."""

    def receive_turn(self, turn: SampledTurn) -> None:
        """Receive the tokens of a finished turn, before `step` gets its text."""
        ...
