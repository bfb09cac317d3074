"""The settings that all inference engines share, and what the rest of a run asks of an engine's section.

`rollout.engine` is raw until `kind` names its backend, whose own section reads it (in `engines/<kind>`, or in an
installed package). Sections answer by their values what placement, replicas and reports ask, so that nobody else
needs to know one backend from another.
"""

import json
from typing import Annotated, TypeAlias

from pydantic import Field, PlainValidator, SerializeAsAny, WithJsonSchema

from laminar_py.config.registry import find_registry
from laminar_py.config.section import ConfigError, Section

BACKENDS = "laminar_py.engines.registry:BACKENDS"


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
    def yields_cpus(self) -> bool:
        """True where the engine computes on CPUs, in a process that lets the learner's go first."""
        return self.gpus == 0

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts of servers that run already, one for each replica; empty where the run starts its engines."""
        return ()

    @property
    def start_limit_s(self) -> float:
        """Longest start of an engine, beyond that of its process."""
        return 0.0

    @property
    def secret_env(self) -> str | None:
        """Environment variable of the controller whose value every replica is given when it opens its engine."""
        return None

    def remedies(self) -> tuple[tuple[str, str, str], ...]:
        """Settings to change where generation is what limits a run: (setting, change, reason)."""
        return ()


def read_engine(given: object) -> EngineConfig:
    """The section as its backend reads it, e.g. of `{"kind": "sglang", "tensor_parallel": 2}`."""
    if isinstance(given, EngineConfig):
        return given
    if not isinstance(given, dict):
        raise ConfigError("Input should be a section that names a `kind`")
    kind = given.get("kind", EngineConfig.model_fields["kind"].default)
    section: type[EngineConfig] = find_registry(BACKENDS).get(str(kind)).settings
    return section.model_validate_json(json.dumps(given, default=str))


AnyEngineConfig: TypeAlias = Annotated[
    SerializeAsAny[EngineConfig], PlainValidator(read_engine), WithJsonSchema({"type": "object"})
]
