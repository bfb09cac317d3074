"""Settings of trackers."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.section import ConfigError, Section


class TrackerKind(StrEnum):
    """Trackers; the value is the package."""

    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    MLFLOW = "mlflow"


class TrackingConfig(Section):
    """Trackers that get the metrics besides `metrics.jsonl`, see docs/metrics.md. Servers and keys are what the
    packages' own environment variables say."""

    kinds: tuple[TrackerKind, ...] = ()
    """Any of `tensorboard` (files in the run folder), `wandb`, and `mlflow` (a server, or `runs/mlflow.db`)."""
    project: Annotated[str, Field(min_length=1)] | None = None
    """Project in wandb, experiment in MLflow; default: `name`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.kinds)) < len(self.kinds):
            raise ConfigError(f"tracking.kinds={','.join(self.kinds)}: one is named twice; name each once")
        return self
