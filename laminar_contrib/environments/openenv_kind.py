"""The kind `openenv`: an environment of OpenEnv, which a server has, played in words.

Invariants: a trajectory is one session of the server; a turn takes one step at most, and none where no action is
read from it, or where the server takes it for none.
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import msgspec
from pydantic import JsonValue, model_validator

from laminar_contrib.environments.openenv_session import (
    INVALID,
    Observed,
    OpenEnvServer,
    OpenEnvSession,
    ServerFaultError,
    connected,
)
from laminar_py.config import ConfigError, EnvironmentConfig, EnvironmentHome, EnvironmentKind
from laminar_py.environment import (
    Answer,
    End,
    Environment,
    Observation,
    Problem,
    check_pattern,
    last_group,
    outside_reasoning,
)

OBJECT = re.compile(r"(\{.*\})", re.DOTALL)
ESCAPED = 6  # bytes of JSON for one of text, at most
MORE_BYTES = 2**20  # of a message, for what is not shown of an observation
FAULT_CHARS = 400  # of what is wrong with an action


class OpenEnvEnvironment(EnvironmentConfig):
    """An environment that a server of OpenEnv has; the reward is the sum of those of its steps."""

    kind: str = "openenv"
    url: str
    """Address of the server, e.g. `http://10.0.0.4:8000`. It is to take as many sessions as trajectories are in
    flight (`max_concurrent_envs`)."""
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of `reset`, beside the seed and the fields of the problem."""
    action_field: str | None = None
    """Field of an action that the text of a turn is, e.g. `message`. Default: the only one that the server's
    schema requires, if that is a text; else a turn has the whole action, as a JSON object."""
    pattern: str | None = None
    """Regular expression whose first group is the action: its last match in a turn, outside of reasoning, counts.
    Default: the whole turn, or the object in it."""
    opens_reasoning: bool = False
    """True where the chat template itself writes the `<think>` that a turn begins in."""
    form: str | None = None
    """An observation as the model reads it, with `{name}` for its fields, e.g. `{hint}`. Default: all of them but
    `metadata`, as JSON."""
    deterministic: bool = False
    """The same actions always have the same answers: a trajectory goes on, by its actions over again, after the
    death of its process. Else it is dropped as `environment_lost`."""

    @model_validator(mode="after")
    def _check_openenv(self) -> Self:
        check_pattern(self.pattern)
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"environment.url={self.url}: no URL; write for example http://10.0.0.4:8000")
        return self


@dataclass(frozen=True, slots=True)
class TurnActions:
    """Actions in turns: their text is the field `name` of one, or else they have it as JSON.

    E.g. `TurnActions(settings, "message").read("4")` is `{"message": "4"}`.
    """

    settings: OpenEnvEnvironment
    name: str | None

    def read(self, turn: str) -> dict[str, Any] | None:
        """Action of a turn; None where it has none."""
        said = outside_reasoning(turn, begun=self.settings.opens_reasoning).strip()
        if self.settings.pattern is not None:
            said = last_group(re.compile(self.settings.pattern), said) or ""
        if self.name is not None:
            return {self.name: said} if said else None
        try:
            return msgspec.json.decode(last_group(OBJECT, said) or "", type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return None


class OpenEnvTurns:
    """Trajectory in a session of its own."""

    def __init__(self, server: OpenEnvServer, actions: TurnActions, settings: OpenEnvEnvironment) -> None:
        self._server = server
        self._actions = actions
        self._settings = settings
        self._session: OpenEnvSession | None = None
        self._earned: float | None = None  # of the steps so far; None where none of them said
        self.deterministic = settings.deterministic

    async def reset(self, problem: Problem) -> Observation:
        """Begin a session with the fields of the problem, of which the server takes what its `reset` does."""
        given = {"prompt": problem.prompt, "answer": problem.answer, "task": problem.task}
        row = {name: value for name, value in given.items() if value}
        named = {"seed": problem.seed, "episode_id": problem.trajectory_id}
        self._session, observed = await self._server.begin(
            {**named, **row, **self._settings.arguments, **problem.fields}
        )
        if observed.done:
            raise ValueError("it is over before the first turn")
        return Observation(self._text(observed))

    async def step(self, action: str) -> Answer:
        """Take the action of a turn, or say that it has none."""
        assert self._session is not None, "reset has begun it"
        data = self._actions.read(action)
        if data is None:
            what = "one" if self._actions.name is not None else "one as a JSON object"
            return Observation(f"No action. Write {what}.")
        try:
            observed = await self._session.ask("step", data)
        except ServerFaultError as error:
            if error.fault.code != INVALID:
                raise
            return Observation(f"No action: {error.fault.line[:FAULT_CHARS]}")
        if observed.reward is not None:
            self._earned = (self._earned or 0.0) + float(observed.reward)
        return End(self._earned) if observed.done else Observation(self._text(observed))

    async def close(self) -> None:
        """End the session."""
        if self._session is not None:
            await self._session.close()

    def _text(self, observed: Observed) -> str:
        fields = {name: value for name, value in observed.observation.items() if name != "metadata"}
        if self._settings.form is None:
            return msgspec.json.encode(fields).decode()
        try:
            return self._settings.form.format(**observed.observation)
        except (LookupError, AttributeError) as error:
            known = ", ".join(fields)
            raise ValueError(f"environment.form has {error}, and an observation has {known}") from error


@asynccontextmanager
async def open_openenv(
    settings: OpenEnvEnvironment, home: EnvironmentHome
) -> AsyncIterator[Callable[[], Environment]]:
    """Maker of environments. Raises `ConfigError` where no server answers, or where its actions are others."""
    most = ESCAPED * settings.max_observation_bytes + MORE_BYTES
    async with connected(settings.url, max_message_bytes=most) as server:
        try:
            schema = await server.action_schema()
        except OSError as error:
            remedy = "start one there, or mend the address"
            raise ConfigError(f"environment.url={settings.url}: no OpenEnv server ({error}); {remedy}") from error
        actions = TurnActions(settings, _action_field(settings, schema))
        yield lambda: OpenEnvTurns(server, actions, settings)


def _action_field(settings: OpenEnvEnvironment, schema: Mapping[str, Any]) -> str | None:
    """Field that the text of a turn is; None where turns are JSON. Raises `ConfigError` for one that cannot be."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if settings.action_field is None:
        is_text = len(required) == 1 and properties.get(required[0], {}).get("type") == "string"
        return str(required[0]) if is_text else None
    given = f"environment.action_field={settings.action_field}"
    if settings.action_field not in properties:
        raise ConfigError(f"{given}: no field of an action; choose of {', '.join(properties)}")
    if more := [name for name in required if name != settings.action_field]:
        raise ConfigError(f"{given}: an action needs {', '.join(more)} too; leave it out, and have turns of JSON")
    return settings.action_field


OPENENV = EnvironmentKind(settings=OpenEnvEnvironment, open=open_openenv)
