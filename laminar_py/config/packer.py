"""Settings of microbatches."""

from typing import Annotated

from pydantic import Field

from laminar_py.config.section import Count, Section


class PackerConfig(Section):
    """How finished trajectories become microbatches."""

    max_tokens: Count = 8192
    """Tokens of one microbatch, at most."""
    look_ahead: Annotated[int, Field(ge=0)] = 0
    """Ready groups beyond those of a step that may be taken in place of older ones, so that a step fills whole
    microbatches on all ranks; 0: staleness order alone. It pays where a step has few microbatches."""
    max_passes: Count = 2
    """Times that `look_ahead` may pass over the same group."""
