"""Settings of emulated engines and learner."""

from pathlib import Path
from typing import Annotated

from pydantic import Field

from laminar_py.config.section import Count, Section


class EmulationConfig(Section):
    """Engines and a learner that take the time which GPUs would take, and compute nothing: for measuring
    schedules, with the real controller, processes, relays and ledger."""

    profile: Path
    """YAML with the times of a GPU and a model, e.g. `configs/emulation/h100_7b.yaml`; `rollout.kv_capacity` and
    `rollout.max_batch` bound the engine as ever."""
    compression: Annotated[float, Field(ge=1, le=20)] = 1.0
    """Emulated seconds in one second; all other settings are in real seconds."""
    start_spread_s: Annotated[float, Field(ge=0)] = 0.0
    """Emulated seconds over which the replicas begin, one after another; 0: all at once, in step at first."""
    learner_devices: Count = 1
    """GPUs that share a learner step."""
    median_tokens: Count = 1500
    """Median of the response lengths, which are log-normal and cut at `rollout.sampling.max_new_tokens`."""
    sigma: Annotated[float, Field(ge=0)] = 0.99
    """Standard deviation of their logarithm; 0.99 makes p99 10 times the median."""
