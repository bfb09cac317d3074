"""Settings of microbatches."""

from typing import Annotated

from pydantic import Field

from laminar_py.config.rollout import RolloutConfig
from laminar_py.config.section import ConfigError, Count, Section


class PackerConfig(Section):
    """How finished trajectories become microbatches."""

    max_tokens: Count = 8192
    """Tokens of one microbatch, at most."""
    look_ahead: Annotated[int, Field(ge=0)] = 0
    """Ready groups beyond those of a step that may be taken in place of older ones, so that a step fills whole
    microbatches on all ranks; none is passed over more than twice. 0: staleness order alone. It pays where a step
    has few microbatches."""


def check_microbatches(packer: PackerConfig, rollout: RolloutConfig) -> None:
    """Refuse microbatches that the longest trajectory does not fit."""
    if rollout.max_len > packer.max_tokens:
        raise ConfigError(
            f"packer.max_tokens={packer.max_tokens} is below rollout.max_len={rollout.max_len}, so a long"
            " trajectory fits no microbatch; raise packer.max_tokens"
        )
