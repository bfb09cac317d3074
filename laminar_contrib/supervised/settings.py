"""Settings of the warm start `supervised`."""

from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from laminar_py.config import ConfigError, Count
from laminar_py.config.data import ModelConfig, SourceConfig, read_source
from laminar_py.config.warm_start import WarmStartConfig

SCRATCH_LR, PRETRAINED_LR = 4e-3, 2e-5
RUINOUS_LR = 1e-3  # above it a pretrained model forgets much


class DemonstrationConfig(SourceConfig):
    """Demonstrations: a source as in `data.train`, or just its path, but without a `task`. A row has a
    `prompt` (text, or a list of messages) and a `response`, or `messages` that end with the assistant's. The cache
    identifies a data set on the hub by its name alone."""

    @field_validator("task")
    @classmethod
    def _check_task(cls, task: str | None) -> None:
        if task is not None:
            raise ConfigError("demonstrations have no task; leave it out")


class SupervisedConfig(WarmStartConfig):
    """A short supervised phase before RL; its result is cached by a hash of its inputs."""

    data: Annotated[DemonstrationConfig, BeforeValidator(read_source)]
    """Demonstrations to imitate."""
    steps: Count = 500
    """Optimizer steps."""
    tokens_per_step: Count = 1024
    """Most tokens of prompts and responses in one step."""
    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate: linear warm-up over 20 steps, linear decay over the last 40 %. Default: 4e-3 with
    `model.from_scratch`, else 2e-5. All weights are trained, also where RL trains adapters."""

    def peak_lr(self, model: ModelConfig) -> float:
        """Return the peak learning rate for a model."""
        return self.lr or (SCRATCH_LR if model.from_scratch else PRETRAINED_LR)
