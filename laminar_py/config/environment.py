"""Settings of environments, which answer the turns of the model.

A section is raw until `kind` names its own settings; a kind is built in or announced by an installed package as
`laminar_py.environments`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, TypeAlias

from pydantic import JsonValue, PlainValidator, SerializeAsAny, WithJsonSchema

from laminar_py.config.registry import Registry, named_section
from laminar_py.config.sandbox import SandboxConfig
from laminar_py.config.section import ConfigError, Count, Seconds, Section

CLASS = "class"
UNEVEN = 4  # deviations that a process may have above the mean: names choose it by a hash


class EnvironmentConfig(Section):
    """Counterpart of the model, which answers its turns, and the processes that it runs in."""

    kind: str = CLASS
    """`class`, `tools`, `agent`, `gymnasium`, `openenv`, `reasoning_gym`, `trl`, or one that an installed package
    announces as `laminar_py.environments`."""
    workers: Count = 1
    """Processes that environments run in, each with many at a time."""
    at_once: Count = 64
    """Environments of a process that work on a turn at the same time; others wait."""
    starts_per_s: Seconds | None = None
    """Environments that a process begins in a second at most, where beginning one is dear to somebody."""
    timeout_s: Seconds = 30.0
    """Longest time of a turn; what takes longer is dropped as `environment_timeout`."""
    hold_s: Seconds = 10.0
    """Longest time that a draining replica keeps its version while all of its trajectories are with their
    environments; then repacking gathers them on others of that version, where there are some."""
    max_turns: Count = 16
    """Turns of the model in a trajectory; one that has not ended by then is cut, with an event."""
    max_observation_bytes: Count = 65_536
    """Longest text of one answer; a longer one is dropped as `environment_failed`."""
    memory_bytes: Count | None = None
    """Memory of a process, beyond which it is ended and begun anew. Default: no limit of its own."""
    most_kept: Count = 4096
    """Environments that a process keeps between turns; the longest idle ones make room, and are rebuilt where
    their trajectory goes on."""

    @property
    def definitions(self) -> Sequence[dict[str, JsonValue]]:
        """Tools that the chat template is told of, as it takes them."""
        return ()

    @property
    def has_session(self) -> bool:
        """True where a trajectory keeps a slot of the sandbox until it ends."""
        return False


class ClassEnvironment(EnvironmentConfig):
    """A class of your own in a Python file."""

    path: str
    """`path/to/file.py:Class`."""
    arguments: dict[str, JsonValue] = {}  # noqa: RUF012 - pydantic copies it
    """Arguments of the class."""


class Words(Protocol):
    """Tokenizer of the run's model, as an environment may need it. `environment.writer` implements it."""

    def decode_turn(self, ids: Any) -> str:
        """Decode [n] tokens of a turn, without the token that ended it."""
        ...

    def encode_text(self, text: str, *, begins: bool) -> Any:
        """Encode a text; if it `begins` a conversation, put the tokenizer's begin-of-text tokens before it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentHome:
    """Process that environments run in: the sandbox that it may use, its folder of the run, the run's model.

    `index` is its number, of several.
    """

    index: int = 0
    sandbox: SandboxConfig
    folder: Path
    model: Path  # a folder, with the tokenizer
    words: Words


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """A kind of environment, e.g. `EnvironmentKind(settings=ClassEnvironment, open=open_class)`.

    `open` is entered once in each process, with the settings and its home; it gives what makes an environment for
    a trajectory. What it raises as `ConfigError` ends the run.
    """

    settings: type[EnvironmentConfig]
    open: Callable[[Any, EnvironmentHome], AbstractAsyncContextManager[Callable[[], Any]]]


ENVIRONMENTS = Registry(
    EnvironmentKind,
    field="environment.kind",
    group="laminar_py.environments",
    built_in={
        "agent": "laminar_py.environment.agents.kind:AGENT",
        CLASS: "laminar_py.environment.host:CLASS_KIND",
    },
)
_read_section = named_section(EnvironmentConfig, key="kind", registry=ENVIRONMENTS)


def _read_environment(given: object) -> EnvironmentConfig:
    """Settings, also where they are no more than the path of a class."""
    if isinstance(given, str):
        if ".py:" not in given:
            raise ConfigError("names no class; write path/to/file.py:Class")
        given = {"kind": CLASS, "path": given}
    return _read_section(given)


AnyEnvironmentConfig: TypeAlias = Annotated[
    SerializeAsAny[EnvironmentConfig], PlainValidator(_read_environment), WithJsonSchema({"type": "object"})
]
"""A section that is raw until the model of its kind has validated it; JSON keeps all of its fields."""


def check_environment(
    environment: EnvironmentConfig | None,
    terms: Iterable[str],
    *,
    emulated: bool,
    in_flight: int,
    sandbox: SandboxConfig,
) -> None:
    """Refuse a reward of environments where there are none, environments beside emulated engines, and processes
    that cannot hold what is in flight.

    `terms` are the kinds of the reward's terms.
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
    if environment is not None and emulated:
        raise ConfigError(
            f"environment.kind={environment.kind}: emulated engines generate no text; leave it out, or the section"
            " emulation, whose emulation.turns has turns without text"
        )


def _check_code(environment: EnvironmentConfig, sandbox: SandboxConfig) -> None:
    """Refuse code that may take as long as a turn."""
    if environment.has_session and sandbox.wall_s >= environment.timeout_s:
        raise ConfigError(
            f"sandbox.wall_s={sandbox.wall_s:g}: not below environment.timeout_s={environment.timeout_s:g};"
            " lower it, or slow code drops its trajectory"
        )


def _check_room(environment: EnvironmentConfig, *, each: int, sandbox: SandboxConfig) -> None:
    """Refuse processes with less room than the trajectories that `each` of them has at a time."""
    has = f"up to {each} trajectories are in flight for each of environment.workers={environment.workers}"
    fewer = "raise environment.workers, or lower rollout.batch_per_replica"
    if environment.most_kept < each:
        raise ConfigError(f"environment.most_kept={environment.most_kept}: {has}; raise it to {each}, {fewer}")
    if environment.has_session and sandbox.slots < each:
        raise ConfigError(
            f"sandbox.slots={sandbox.slots}: {has}, and each keeps a slot for its session of python; raise it to"
            f" {each}, {fewer}"
        )
