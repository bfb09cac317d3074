"""Settings of environments, which answer the turns of the model, and the registry of their kinds.

The settings of the kind that `kind` names validate the section. A kind is built in, or an installed package
announces it in the entry point group `laminar_py.environments`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import JsonValue, PlainValidator, SerializeAsAny, WithJsonSchema

from laminar_py.config.cluster import SandboxConfig
from laminar_py.config.registry import Registry, named_section
from laminar_py.config.section import ConfigError, Count, Seconds, Section

CLASS = "class"
UNEVEN = 4  # standard deviations of room above a process's mean load: a hash of the id chooses the process


class EnvironmentConfig(Section):
    """Environment that answers the turns of the model, and the processes that run it."""

    kind: str = CLASS
    """`class`, `tools`, `agent`, `gymnasium`, `openenv`, `reasoning_gym`, `trl`, or a kind of another installed
    package."""
    workers: Count = 1
    """Processes of environments; each runs many environments at a time."""
    at_once: Count = 64
    """Environments of one process that work on a turn at the same time; others wait."""
    timeout_s: Seconds = 30.0
    """Longest time of a turn, seconds; a trajectory above it is dropped as `environment_timeout`."""
    hold_s: Seconds = 10.0
    """Longest time that a draining replica keeps its version while all of its trajectories wait for environments,
    seconds. Then repacking moves them to other replicas of that version, if there are any."""
    max_turns: Count = 16
    """Most turns of the model in a trajectory; then the trajectory is cut, with an event."""
    max_observation_bytes: Count = 65_536
    """Longest text of one answer; a trajectory with a longer one is dropped as `environment_failed`."""
    memory_bytes: Count | None = None
    """Most memory of a process, bytes; a process above it is restarted. Default: no limit."""
    most_kept: Count = 4096
    """Most environments that a process keeps between turns. The longest idle ones make room; they are rebuilt when
    their trajectory continues."""

    @property
    def definitions(self) -> Sequence[dict[str, JsonValue]]:
        """Definitions of tools for the chat template."""
        return ()

    @property
    def system_text(self) -> str:
        """Text about tools that ends the system message of each prompt; "" adds nothing."""
        return ""

    def check_call(self, text: str, name: str, arguments: dict[str, str]) -> None:
        """Raise `ConfigError` if the environment reads no such call in `text`, which the chat template wrote."""

    @property
    def calls_tools(self) -> bool:
        """True where each turn but the last calls a tool."""
        return False

    @property
    def has_session(self) -> bool:
        """True where each trajectory keeps a slot of the sandbox until it ends."""
        return False


class ClassEnvironment(EnvironmentConfig):
    """A class of your own in a Python file."""

    path: str
    """`path/to/file.py:Class`."""
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of the class, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentHome:
    """Inputs from one process for its environments, e.g. `EnvironmentHome(index=1, folder=folder, model=model,
    ...)`."""

    index: int = 0  # number of the process
    sandbox: SandboxConfig  # for programs of the model
    folder: Path  # for files of this process, in the run folder
    model: Path  # folder with the tokenizer
    decode_turn: Callable[[Any], str]  # text of [n] token ids, without the token that ends a turn


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """A kind of environment, e.g. `EnvironmentKind(settings=ClassEnvironment, open=open_class)`.

    `open` is entered once in each process, with the settings and the home. It gives a function that makes an
    environment for one trajectory. A `ConfigError` in it ends the run.
    """

    settings: type[EnvironmentConfig]
    open: Callable[[Any, EnvironmentHome], AbstractAsyncContextManager[Callable[[], Any]]]


ENVIRONMENTS = Registry(
    EnvironmentKind,
    field="environment.kind",
    group="laminar_py.environments",
    built_in={
        CLASS: "laminar_py.environment.host:CLASS_KIND",
    },
)
_read_section = named_section(EnvironmentConfig, key="kind", registry=ENVIRONMENTS)


def _read_environment(given: object) -> EnvironmentConfig:
    """Read an environment's section, or only the path of a class. Raises `ConfigError`."""
    if isinstance(given, str):
        if ".py:" not in given:
            raise ConfigError("names no class; write path/to/file.py:Class")
        given = {"kind": CLASS, "path": given}
    return _read_section(given)


AnyEnvironmentConfig: TypeAlias = Annotated[
    SerializeAsAny[EnvironmentConfig], PlainValidator(_read_environment), WithJsonSchema({"type": "object"})
]
"""Section that the settings of its kind validate; its JSON keeps all of their fields."""


def check_environment(
    environment: EnvironmentConfig | None,
    terms: Iterable[str],
    *,
    in_flight: int,
    sandbox: SandboxConfig,
) -> None:
    """Raise `ConfigError` if a reward needs an environment and there is none, or its processes lack room.

    `terms` are the kinds of the reward's terms; `in_flight` is the most trajectories of all replicas at a time.
    """
    if environment is None and "environment" in terms:
        raise ConfigError(
            "reward.use=environment: no environment ends a trajectory with a reward; set `environment`, or name"
            " another term"
        )
    if environment is not None:
        mean = in_flight / environment.workers
        uneven = UNEVEN * math.sqrt(mean) if environment.workers > 1 else 0.0
        _check_room(environment, each=math.ceil(mean + uneven), sandbox=sandbox)
        _check_code(environment, sandbox)


def _check_code(environment: EnvironmentConfig, sandbox: SandboxConfig) -> None:
    """Raise `ConfigError` if one program of the model may run for the whole time of a turn."""
    if environment.has_session and sandbox.wall_s >= environment.timeout_s:
        raise ConfigError(
            f"sandbox.wall_s={sandbox.wall_s:g}: not below environment.timeout_s={environment.timeout_s:g};"
            " lower wall_s, or slow code drops its trajectory"
        )


def _check_room(environment: EnvironmentConfig, *, each: int, sandbox: SandboxConfig) -> None:
    """Raise `ConfigError` if a process has no room for `each` trajectories at a time."""
    has = f"up to {each} trajectories are in flight for each of environment.workers={environment.workers}"
    fewer = "raise environment.workers, or lower rollout.batch_per_replica"
    if environment.most_kept < each:
        raise ConfigError(f"environment.most_kept={environment.most_kept}: {has}; raise it to {each}, {fewer}")
    if environment.has_session and sandbox.slots < each:
        raise ConfigError(
            f"sandbox.slots={sandbox.slots}: {has}, and each keeps a slot for its session of python; raise it to"
            f" {each}, {fewer}"
        )
