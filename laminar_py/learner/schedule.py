"""The schedule of the learning rate. `step` sets the rate by it, and `control.alarms.learning` checks the rate.

The rate depends on the number of steps alone, so nothing here imports torch.
"""

import math
from collections.abc import Callable

from laminar_py.config.learner import Decay, LearnerConfig

# kind of decay -> factor on the learning rate, for the share of the decay's steps that are done, in [0, 1]
DECAYS: dict[Decay, Callable[[float], float]] = {
    Decay.NONE: lambda share: 1.0,
    Decay.LINEAR: lambda share: 1.0 - share,
    Decay.COSINE: lambda share: (1.0 + math.cos(math.pi * share)) / 2.0,
}


def lr_factor(step: int, settings: LearnerConfig, *, total_steps: int | None) -> float:
    """Factor on the learning rate at a step (0 for the first): linear warm-up, then the decay of `settings`.

    E.g. 0.5, 1, 1, 0.875, ..., 0.125 for 10 steps with 2 of warm-up and a `linear` decay. None for `total_steps`
    means no decay.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if total_steps is None:
        return 1.0
    past = (step - settings.warmup_steps) / max(1, total_steps - settings.warmup_steps)
    return DECAYS[settings.decay](min(1.0, past))
