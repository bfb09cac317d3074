"""Settings of the model and of the supervised phase before RL."""

from pathlib import Path
from typing import Annotated, Self

from pydantic import BeforeValidator, Field, model_validator

from laminar_py.config.data import SourceConfig, read_source
from laminar_py.config.section import ConfigError, Count, Section


class ModelConfig(Section):
    """The model that is trained: a Hugging Face folder."""

    path: Path
    """Folder with `config.json`, `tokenizer.json` and, unless `from_scratch`, safetensors."""
    from_scratch: bool = False
    """Initialise the weights from `seed` instead of loading them; the folder needs no safetensors then."""


class DemonstrationConfig(SourceConfig):
    """Demonstrations: a source like those of `data.train`, or just its path, but without a `task`. A row has a
    `prompt`, text or a list of messages, and a `response`; or `messages` that end with the assistant's. A cached
    result knows a data set on the hub by its name alone."""


class WarmStartConfig(Section):
    """A short supervised phase before RL; its result is cached by the hash of all that it depends on."""

    data: Annotated[DemonstrationConfig, BeforeValidator(read_source)]
    """Demonstrations to imitate."""
    steps: Count = 500
    """Optimizer steps."""
    tokens_per_step: Count = 1024
    """Tokens of prompts and responses in one step, at most."""
    lr: Annotated[float, Field(gt=0)] = 4e-3
    """Peak learning rate: linear warm-up over 20 steps, linear decay over the last 40 %."""
    cache: Path = Path(".cache/warm_start")
    """Folder that keeps finished warm starts."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.data.task is not None:
            raise ConfigError(f"warm_start.data.task={self.data.task}: demonstrations have no task; leave it out")
        return self
