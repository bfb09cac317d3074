"""Times of an emulated GPU and model: the figures of a profile in YAML, and their arithmetic.

Read before a run, and in each emulated process. Pure, all in emulated seconds.
Invariant: `StepTimes.within` is the inverse of `StepTimes.seconds`.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from laminar_py.config.loading import load_settings
from laminar_py.config.section import ConfigError, Section

Time = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Extra = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Size = Annotated[int, Field(ge=1)]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of decoding steps, as in `EngineTimes`, in plain numbers: an engine asks at every event."""

    step_s: float
    sequence_s: float
    kv_token_s: float

    def seconds(self, steps: int, *, running: int, kv_used: int) -> float:
        """Seconds of `steps` steps that begin with `kv_used` tokens and add one for each of `running`."""
        first_s = self.step_s + self.sequence_s * running + self.kv_token_s * kv_used
        grown = running * steps * (steps - 1) / 2
        return steps * first_s + self.kv_token_s * grown

    def within(self, seconds: float, *, running: int, kv_used: int) -> int:
        """The most steps that take at most `seconds`."""
        first_s, half = self.seconds(1, running=running, kv_used=kv_used), self.kv_token_s * running / 2
        if first_s > seconds:
            return 0
        slope = first_s - half
        divisor = slope + math.sqrt(slope * slope + 4 * half * seconds)
        steps = int(2 * seconds / divisor) if divisor > 0 else 0
        while self.seconds(steps + 1, running=running, kv_used=kv_used) <= seconds:
            steps += 1
        while steps and self.seconds(steps, running=running, kv_used=kv_used) > seconds:
            steps -= 1
        return steps


class EngineTimes(Section):
    """Times of an engine. A decoding step of N sequences over T tokens of KV takes
    `step_s + sequence_s * N + kv_token_s * T`."""

    step_s: Time
    """A step on an empty cache: what reading the weights takes, seconds."""
    sequence_s: Extra = 0.0
    """What each sequence of a batch adds, seconds."""
    kv_token_s: Extra
    """Reading the keys and values of one token, seconds."""
    prefill_tokens_per_s: Time
    """Tokens put into the cache in a second, during which no step is made."""
    load_s: Extra
    """Taking up new weights that lie in this host's memory, seconds."""
    reserve_tokens: Size
    """Room that must be free for the growth of a request when it is admitted, in tokens."""
    gpus: Size = 1
    """GPUs of the one replica that these times are of; only `laminar plan` reads it."""

    @property
    def steps(self) -> "StepTimes":
        """Arithmetic of its decoding steps."""
        return StepTimes(self.step_s, self.sequence_s, self.kv_token_s)

    def slower(self, times: float) -> "EngineTimes":
        """Times of an engine that computes for so many times as long, e.g. 1.5; loads are as fast."""
        return self.model_copy(
            update={
                "step_s": self.step_s * times,
                "sequence_s": self.sequence_s * times,
                "kv_token_s": self.kv_token_s * times,
                "prefill_tokens_per_s": self.prefill_tokens_per_s / times,
            }
        )


class LearnerTimes(Section):
    """The learner, on devices that divide the microbatches of a step among them."""

    train_tokens_per_s: Time
    """Tokens of short sequences that one device trains on in a second, recomputation and all included."""
    num_parameters: Size
    """Of the model; with the next two it says how much more attention makes of a long sequence."""
    hidden_size: Size
    """Of the model."""
    num_layers: Size
    """Of the model."""
    optimizer_s: Extra
    """What a step takes whatever its size: optimizer, collectives and copy of the weights, seconds."""


class EmulationProfile(Section):
    """A GPU and a model, e.g. `configs/emulation/h100_7b.yaml`."""

    engine: EngineTimes
    """Of each replica."""
    learner: LearnerTimes
    """Of the learner."""


def read_profile(path: Path, *, setting: str = "emulation.profile") -> EmulationProfile:
    """The profile in a YAML file, which this setting names. Raises `ConfigError`."""
    if not path.is_file():
        raise ConfigError(f"{setting}={path}: no such file; name one such as configs/emulation/h100_7b.yaml")
    try:
        return load_settings(EmulationProfile, path, [], help_at="laminar_py/config/emulated_profile.py")
    except ConfigError as error:
        raise ConfigError(f"{setting}={path}: {error}") from None
