"""Settings of low-rank adapters."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.model import ModelConfig, WarmStartConfig
from laminar_py.config.section import ConfigError, Count, Section


class LoraTarget(StrEnum):
    """Projections of a layer."""

    Q_PROJ = "q_proj"
    K_PROJ = "k_proj"
    V_PROJ = "v_proj"
    O_PROJ = "o_proj"
    GATE_PROJ = "gate_proj"
    UP_PROJ = "up_proj"
    DOWN_PROJ = "down_proj"


class LoraConfig(Section):
    """Low-rank adapters: they alone are trained, checkpointed and published. Engines get the base from the folder
    that the learner has it from, `model.path` or the warm start's cache, which all hosts see under that path."""

    rank: Count = 16
    """Rows of A and columns of B: the adapted weight is `W + alpha / rank * B A`."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapters, times `rank`."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] = tuple(LoraTarget)
    """Projections that are adapted in every layer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.targets)) < len(self.targets):
            raise ConfigError(f"learner.lora.targets={','.join(self.targets)}: one is named twice; name each once")
        return self


def check_lora(
    lora: LoraConfig | None, model: ModelConfig, warm_start: WarmStartConfig | None, *, emulated: bool
) -> None:
    """Refuse adapters without a base. A backend checks which adapters its engines can serve."""
    if lora is None:
        return
    if model.from_scratch and warm_start is None:
        raise ConfigError(
            "model.from_scratch=true: with learner.lora only adapters are published, and engines would have no"
            " base; name a folder with weights, or a warm_start"
        )
    if emulated:
        raise ConfigError("learner.lora: an emulated learner has no weights to adapt; leave learner.lora out")
