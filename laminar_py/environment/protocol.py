"""An environment, as whoever writes one sees it: `reset` and `step`, each of them synchronous or a coroutine.

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
    """Words of an environment, e.g. `Observation("391", role=Role.TOOL)`; several texts are as many messages.

    Without a text it says nothing, which `reset` alone may do: the prompt of the data set is all there is. With
    `after` it goes back: it is said behind that turn of the model, 1 the first that it took, and what that was
    behind; all else is out of sight. `Observation("Think briefly.", max_tokens=64)` limits the turn that answers.
    """

    texts: str | tuple[str, ...] = ()
    role: Role = Role.USER
    after: int | None = None
    max_tokens: int | None = None  # the most of the turn that answers it, from 1 on

    @property
    def messages(self) -> tuple[str, ...]:
        """Texts, one for each message."""
        return (self.texts,) if isinstance(self.texts, str) else self.texts


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Conversation that takes the place of all that was said, the prompt too, e.g. after a summary:

    `Rewrite((("user", "You have read 40 files. In short: ... Go on."),))`, or a text where prompts are text.
    """

    messages: str | tuple[tuple[str, str] | Mapping[str, object], ...]  # (role, text), or for a template
    tools: tuple[Mapping[str, object], ...] = ()  # in place of those that the chat template is told of, if any
    max_tokens: int | None = None  # the most of the turn that answers it, from 1 on

    @property
    def turns(self) -> tuple[Mapping[str, object], ...]:
        """Messages as chat templates take them."""
        if isinstance(self.messages, str):
            return ({"role": Role.USER.value, "content": self.messages},)
        return tuple(
            one if isinstance(one, Mapping) else {"role": one[0], "content": one[1]} for one in self.messages
        )


@dataclass(frozen=True, slots=True)
class TokenWords:
    """Conversation in ids of the model, up to its next turn, written as they are.

    They stand behind the model's turn `after`, 1 the first that it took, and what that was behind; 0: behind
    nothing.
    """

    ids: IntArray  # [n]
    after: int
    max_tokens: int | None = None  # the most of the turn that answers them, from 1 on


@dataclass(frozen=True, slots=True)
class End:
    """End of a trajectory, e.g. `End(1.0)`; without a reward the other terms of the task judge the response.

    Where the model has played several roles, each has its own: `End({"first": 1.0, "second": 0.0}, roles=("first",
    "second", "first"))`, with the role of each of its turns.
    """

    reward: float | Mapping[str, float] | None = None
    roles: tuple[str, ...] = ()


Begin: TypeAlias = Observation | Rewrite | TokenWords
Answer: TypeAlias = Begin | End


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """Tokens of a turn of the model."""

    context: IntArray  # [c] of the conversation that it was sampled behind, without the prompt of the data set
    ids: IntArray  # [n] with what ended it
    logprobs: FloatArray  # [n] or, of a turn that is taken over again, [0]
    is_cut: bool = False  # by the limit that its environment gave it, so that no token ends it


class Environment(Protocol):
    """Counterpart of a model in one trajectory.

    `deterministic = True` in its class says that the same actions always have the same answers: then one that died
    is rebuilt by repeating them. One that is `Restorable` is rebuilt from its last snapshot.
    """

    def reset(self, problem: Problem) -> Begin | Awaitable[Begin]:
        """Begin; what it says precedes the model's first turn."""
        ...

    def step(self, action: str) -> Answer | Awaitable[Answer]:
        """Answer a turn of the model: its text, without the token that ended it."""
        ...


@runtime_checkable
class Restorable(Protocol):
    """An environment whose state can be saved between turns."""

    def snapshot(self) -> bytes:
        """State, as bytes that a new instance of another process understands."""
        ...

    def restore(self, state: bytes) -> None:
        """Go on from such a state, in place of `reset`."""
        ...


@runtime_checkable
class HearsTokens(Protocol):
    """An environment that is told the tokens of the model's turns."""

    @property
    def listens(self) -> bool:
        """True where it is to `hear` the next turn as that is sampled."""
        ...

    def hear(self, place: int, ids: IntArray, logprobs: FloatArray) -> None:
        """[n] tokens of a turn that goes on, from its token `place` on; some may be missing, or come twice."""
        ...

    def take(self, turn: SampledTurn) -> None:
        """Take a whole turn as it was sampled, before `step` has its text."""
        ...
