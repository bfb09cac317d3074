"""Settings of the phase before RL, the registry of its kinds, and the record that a kind fills."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

from pydantic import PlainValidator, SerializeAsAny, WithJsonSchema

from laminar_py.config.registry import Registry, named_section
from laminar_py.config.section import Section


class WarmStartConfig(Section):
    """A phase before RL, which makes the model that RL begins with. Each kind adds settings of its own."""

    kind: str = "supervised"
    """`supervised` imitates demonstrations; or a kind of an installed package."""
    cache: Path = Path(".cache/warm_start")
    """Folder of cached results."""


OnStep: TypeAlias = Callable[[int, int, float], None]
"""Function that is called after each step with the steps done, all steps, and the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartKind:
    """A kind of warm start. All functions get the `RunConfig`, and raise `ConfigError`."""

    settings: type[WarmStartConfig]  # model of `warm_start`
    read: Callable[[Any, Any], Any]
    """Read the `data.Demonstrations` of a run with its `data.PromptEncoder`."""
    check: Callable[[Any, Any], Any]
    """Read them before a run, and refuse demonstrations or a model that this kind cannot train."""
    folder: Callable[[Any], Path]
    """Return the folder of the result, whose name depends on all inputs. It appears when it is complete."""
    make: Callable[[Any, OnStep], None]
    """Make the folder, unless it is there. The process of the learner's rank 0 calls it; the other ranks wait."""


WARM_STARTS = Registry(WarmStartKind, field="warm_start.kind", group="laminar_py.warm_starts", built_in={})
AnyWarmStartConfig: TypeAlias = Annotated[
    SerializeAsAny[WarmStartConfig],
    PlainValidator(named_section(WarmStartConfig, key="kind", registry=WARM_STARTS)),
    WithJsonSchema({"type": "object"}),
]
"""Section that the named kind's model validates; its JSON keeps all fields of that model."""
