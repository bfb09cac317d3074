"""Settings of trackers, the registry of their kinds, and the protocol that a kind implements.

A tracker that opens again for a run folder continues its earlier run. It runs in a process of its own beside the
controller (`runtime.workers.trackers`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Protocol, Self, TypeAlias

import msgspec
from pydantic import Field, model_validator

from laminar_py.config.registry import Registry
from laminar_py.config.section import ConfigError, Section

Setting: TypeAlias = bool | int | float | str


class Opening(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters with which a tracker begins or continues its run.

    E.g. `Opening(kind="wandb", folder="runs/math-3", name="math-3", project="math", settings={"seed": 0})`.
    """

    kind: str
    folder: str  # of the run
    name: str
    project: str
    settings: dict[str, Setting]  # the resolved config


class Tracker(Protocol):
    """A run in a tracker. An error ends the tracker's process."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write values of a learner step, e.g. `log(3, {"tokens/entropy": 1.2})`."""
        ...

    def undo(self, step: int) -> None:
        """Note that the run has undone all steps after `step` and will repeat them."""
        ...

    def close(self, summary: Mapping[str, float] | None) -> None:
        """End the run. Without a summary it failed; with `summary/finished` of 0 it was interrupted."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerKind:
    """A kind of tracker, e.g. `TrackerKind(open=Wandb)`."""

    open: Callable[[Opening], Tracker]
    """Begin the tracker's run, or continue the run of that folder. The tracker's process calls it."""
    check: Callable[[], None] = lambda: None
    """Raise `ConfigError` if the kind's package is missing, without an import of it. Called before a run."""


TRACKERS = Registry(TrackerKind, field="tracking.kinds", group="laminar_py.trackers", built_in={})


class TrackingConfig(Section):
    """Trackers that get the metrics of `metrics.jsonl` too, see docs/metrics.md. Servers and keys come from the
    packages' own environment variables."""

    kinds: tuple[str, ...] = ()
    """Any of `tensorboard` (files in the run folder), `wandb`, `mlflow` (a server, or `runs/mlflow.db`), or a kind
    of an installed package."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """Project in wandb, experiment in MLflow; default: `name`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.kinds)) < len(self.kinds):
            raise ConfigError(f"tracking.kinds={','.join(self.kinds)}: a tracker occurs twice; name each once")
        for kind in self.kinds:
            TRACKERS.get(kind)
        return self
