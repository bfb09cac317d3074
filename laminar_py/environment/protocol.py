"""The interface of an environment: `reset` and `step`, each of them synchronous or a coroutine.

    class Guess:
        deterministic = True

        def reset(self, problem):
            self.number = problem.fields["number"]
            return Observation("Guess a number below 10.")

        def step(self, action):
            return End(1.0) if action.strip() == str(self.number) else Observation("No. Again.")

One instance answers one trajectory, from its first turn to its end. pydantic checks an answer when it is made,
so a wrong answer raises in the environment's own code.
"""

import dataclasses
from collections.abc import Awaitable, Mapping
from enum import StrEnum
from typing import Annotated, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from pydantic import BeforeValidator, Field, JsonValue, Strict
from pydantic.dataclasses import dataclass

from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.credit import MOST_ROLES, ROLE_CHARS
from laminar_py.records.environment import Problem as Problem

MAX_TURN_TOKENS = 2**31 - 1  # that an environment may name as the limit of a turn
MAX_STOPS, MAX_STOP_CHARS = 4, 256  # stop strings of a turn, and characters of each
MAX_REWARD = 1e30  # differences of rewards must stay finite in float32


def _refuse_text(value: object) -> object:
    if isinstance(value, str | bytes):
        raise ValueError("a reward is a number, not a text")
    return value


Text: TypeAlias = Annotated[str, Strict()]
TurnNumber: TypeAlias = Annotated[int, Field(ge=1, strict=True)]
TurnLimit: TypeAlias = Annotated[int, Field(ge=1, le=MAX_TURN_TOKENS, strict=True)]
StopString: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS, strict=True)]
StopStrings: TypeAlias = Annotated[tuple[StopString, ...], Field(max_length=MAX_STOPS)]
RoleName: TypeAlias = Annotated[str, Field(max_length=ROLE_CHARS, pattern=r"^\P{C}*$")]  # printable
RewardValue: TypeAlias = Annotated[  # any number, e.g. of numpy, but no text
    float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False), BeforeValidator(_refuse_text)
]
RoleRewards: TypeAlias = Annotated[dict[RoleName, RewardValue], Field(min_length=1, max_length=MOST_ROLES)]
Speaker: TypeAlias = Literal["system", "assistant", "user", "tool"]
TemplateMessage: TypeAlias = dict[str, JsonValue]


class Role(StrEnum):
    """Role of an observation's messages in the chat template."""

    USER = "user"
    TOOL = "tool"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEnds:
    """Limits of the model's next turn, in an `Observation` or a `Rewrite`."""

    max_tokens: TurnLimit | None = None
    stop: StopStrings = ()


@dataclass(frozen=True, slots=True)
class Observation(TurnEnds):
    """Messages of an environment to the model, e.g. `Observation("391", role=Role.TOOL)`; each text is a message.

    Only `reset` may return an observation without a text: then the model sees the prompt alone. `after` goes back
    in the conversation: the messages follow that turn of the model (1 is its first) and its context, and the model
    no longer sees later turns. `Observation("Think briefly.", max_tokens=64)` limits the model's next turn, and
    `stop=("Observation:",)` ends that turn at the first of these texts, which its action then lacks.
    """

    texts: Text | tuple[Text, ...] = ()
    role: Role = Role.USER
    after: TurnNumber | None = None

    @property
    def messages(self) -> tuple[str, ...]:
        """Texts, one for each message."""
        return (self.texts,) if isinstance(self.texts, str) else self.texts


@dataclass(frozen=True, slots=True)
class Rewrite(TurnEnds):
    """A conversation that replaces everything the model saw, the prompt included, e.g. after a summary:

    `Rewrite((("user", "You have read 40 files. In short: ... Continue."),))`, or a text if prompts are text.
    """

    messages: Text | Annotated[tuple[tuple[Speaker, Text] | TemplateMessage, ...], Field(min_length=1)]
    tools: tuple[TemplateMessage, ...] = ()  # tools for the chat template, in place of the run's

    def __post_init__(self) -> None:
        """Check the roles of messages. Raises `ValueError`."""
        for turn in self.turns:
            if turn.get("role") not in get_args(Speaker):
                raise ValueError(f"role {turn.get('role')!r}: choose one of {', '.join(get_args(Speaker))}")

    @property
    def turns(self) -> tuple[Mapping[str, object], ...]:
        """Messages as dicts for a chat template."""
        if isinstance(self.messages, str):
            return ({"role": Role.USER.value, "content": self.messages},)
        return tuple(
            {"role": message[0], "content": message[1]} if isinstance(message, tuple) else message
            for message in self.messages
        )


@dataclasses.dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids that the model reads before its next turn, used as they are.

    They follow the model's turn `after` (1 is its first) and the context of that turn. With `after=0` they begin a
    new conversation.
    """

    ids: IntArray  # [n]
    after: int
    max_tokens: int | None = None  # of the model's next turn, at least 1
    stop: tuple[str, ...] = ()  # of the model's next turn


@dataclass(frozen=True, slots=True)
class End:
    """End of a trajectory, e.g. `End(1.0)`. Without a reward, other terms of the task score the response.

    If the model played several roles, give each its reward, and name the role of each turn: `End({"first": 1.0,
    "second": 0.0}, roles=("first", "second", "first"))`.
    """

    reward: RewardValue | RoleRewards | None = None
    roles: tuple[RoleName, ...] = ()


Begin: TypeAlias = Observation | Rewrite | TokenPrompt
Answer: TypeAlias = Begin | End


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampledTurn:
    """A turn of the model as it was sampled."""

    text: str  # without the token that ended it, or up to its stop string
    context: IntArray  # [c] tokens before the turn, without the prompt of the data set
    ids: IntArray  # [n] with the token that ended it
    logprobs: FloatArray  # [n], or [0] for a turn that is replayed
    is_cut: bool = False  # True if the environment's `max_tokens` ended the turn


class Environment(Protocol):
    """Counterpart of a model in one trajectory.

    A class with `deterministic = True` always answers the same actions alike. If its process crashes, a new
    instance replays the actions. A `Restorable` environment is restored from its last snapshot instead. A
    `TokenEnvironment` has `step_tokens` in place of `step`.
    """

    def reset(self, problem: Problem) -> Begin | Awaitable[Begin]:
        """Begin the trajectory and return the messages before the model's first turn."""
        ...

    def step(self, action: str) -> Answer | Awaitable[Answer]:
        """Answer a turn of the model: its text, without the token that ended it."""
        ...


@runtime_checkable
class TokenEnvironment(Protocol):
    """An environment that gets the tokens of a turn, e.g. to send them over a socket."""

    def reset(self, problem: Problem) -> Begin | Awaitable[Begin]:
        """Begin the trajectory and return the messages before the model's first turn."""
        ...

    def step_tokens(self, turn: SampledTurn) -> Answer | Awaitable[Answer]:
        """Answer a turn of the model, given with its tokens."""
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
