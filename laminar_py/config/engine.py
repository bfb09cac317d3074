"""Backends by name: what makes an inference engine one that a run can use, and the settings that all share.

A backend is one folder with a `Backend` in its `backend.py` and a line in `BACKENDS`, or an installed package that
announces one as `laminar_py.backends`. `rollout.engine` is raw until `kind` names its backend, whose own section
reads it. Sections answer by their values what placement, replicas and reports ask, so that nobody else needs to
know one backend from another. The controller, `laminar doctor` and every node's survey import a backend's module,
without torch and without an HTTP client; only `open` imports its implementation, in the replica's process.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import Field, PlainValidator, SerializeAsAny, WithJsonSchema

from laminar_py.config.registry import Registry, named_section
from laminar_py.config.section import Section
from laminar_py.records.engine import InferenceEngine


class EngineConfig(Section):
    """Inference engines. The settings of this table belong to every backend."""

    kind: str = "local"
    """`local`: the embedded engine, in the replica's process. `sglang`: one SGLang server per replica. Or what an
    installed package announces as `laminar_py.backends`. The section `emulation` chooses `emulated`."""
    verify_every: Annotated[int, Field(ge=0)] = 20
    """The engine's own tensors are hashed after its first load and once in so many versions, and must agree among
    replicas that hash the same version; 0: never."""

    @property
    def gpus(self) -> int:
        """GPUs that one engine computes on."""
        return 0

    @property
    def static_share(self) -> float:
        """Share of each of its GPUs that weights and KV cache may take; the rest is for activations."""
        return 0.85

    @property
    def yields_cpus(self) -> bool:
        """True where the engine computes on CPUs, in a process that lets the learner's go first."""
        return self.gpus == 0

    @property
    def servers(self) -> tuple[str, ...]:
        """Addresses of servers that run already, one for each replica; empty where the run starts its engines."""
        return ()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of servers that run already, one for each replica; empty where the run starts its engines."""
        return ()

    @property
    def placed_by(self) -> str:
        """The setting that says how many `gpus` an engine has, or on which `hosts` they are."""
        return "rollout.engine"

    @property
    def start_limit_s(self) -> float:
        """Longest start of an engine, beyond that of its process."""
        return 0.0

    @property
    def secret_env(self) -> str | None:
        """Environment variable of the controller whose value every replica is given when it opens its engine."""
        return None

    def secret(self) -> str | None:
        """The value of `secret_env` in the environment of this process."""
        return (os.environ.get(self.secret_env) or None) if self.secret_env is not None else None

    def remedies(self) -> tuple[tuple[str, str, str], ...]:
        """Settings to change where generation is what limits a run: (setting, change, reason)."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLaunch:
    """Facts for opening an engine, e.g. of replica 3:

    `EngineLaunch(model_dir=Path("model"), logs=Path("logs"), index=3, secret=None)`.
    """

    model_dir: Path
    logs: Path  # folder for what the engine writes of itself
    index: int  # of the replica
    secret: str | None  # the section's `secret()` in the controller
    server: str = ""  # of the section's `servers`, the one that is this replica's


Check: TypeAlias = Callable[[Any], None]  # of a `RunConfig`


def accept(config: object) -> None:
    """The check of a backend that has nothing to check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """A kind of engine, e.g. `Backend(settings=EngineConfig, open=open_engine)`.

    Checks raise `ConfigError` with one line that names field, value and remedy.
    """

    settings: type[EngineConfig]  # the model of `rollout.engine`, whose properties tell what an engine takes
    open: Callable[[Any, EngineLaunch], Awaitable[InferenceEngine]]  # of a `RunConfig`
    """A started engine without weights, in the replica's process; `EngineLostError` if it cannot start."""
    check: Check = accept
    """Refuses what the rest of the config asks and it cannot do: called whenever a config is read."""
    check_node: Check = accept
    """Refuses a host that cannot start its engines: called on every node that gets a replica."""
    check_start: Check = accept
    """Refuses a run whose engines lack something that the controller's host can see: called before it starts."""


BACKENDS = Registry(
    Backend,
    field="rollout.engine.kind",
    group="laminar_py.backends",
    built_in={
        "local": "laminar_py.engines.local.backend:LOCAL",
        "sglang": "laminar_py.engines.sglang.backend:SGLANG",
        "emulated": "laminar_py.engines.emulated.backend:EMULATED",
    },
)
AnyEngineConfig: TypeAlias = Annotated[
    SerializeAsAny[EngineConfig],
    PlainValidator(named_section(EngineConfig, key="kind", registry=BACKENDS)),
    WithJsonSchema({"type": "object"}),
]
"""A section that is raw until the model of its backend has validated it; JSON keeps all of its fields."""
