"""AdamW and what surrounds it: schedule of the learning rate, clipping, refusal of bad gradients. Owned by `step`.

Invariant: the learning rate is a function of the number of steps alone, so that a resumed run need not be told it;
an update whose loss or gradient is not finite changes nothing.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from laminar_py.config.learner import Decay, LearnerConfig

DECAYS: dict[Decay, Callable[[float], float]] = {  # of the share of the decay that is behind, in [0, 1]
    Decay.NONE: lambda share: 1.0,
    Decay.LINEAR: lambda share: 1.0 - share,
    Decay.COSINE: lambda share: (1.0 + math.cos(math.pi * share)) / 2.0,
}


class Optimizer:
    """AdamW on the trained parameters of a model; `adamw` is what a checkpoint keeps."""

    def __init__(self, model: nn.Module, settings: LearnerConfig, *, num_steps: int | None = None) -> None:
        """`num_steps` of the whole run, for a decay."""
        assert num_steps is not None or settings.decay is Decay.NONE, f"decay={settings.decay} needs an end"
        self._settings = settings
        self._num_steps = num_steps
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.adamw = torch.optim.AdamW(
            self._trained, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )

    def update(self, step: int, *, loss: float) -> float | None:
        """Clip, step, clear, as part of step `step` (0 for the first of the run); `loss` is that of all ranks.

        Returns the gradient norm before clipping; None if that or the loss is not finite, and nothing has changed.
        """
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        total = torch.nn.utils.get_total_norm(gradients)
        norm = float(total.full_tensor() if isinstance(total, DTensor) else total)
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite:
            torch.nn.utils.clip_grads_with_norm_(self._trained, self._settings.grad_clip, total)
            factor = schedule(step, self._settings, num_steps=self._num_steps)
            for group in self.adamw.param_groups:
                group["lr"] = self._settings.lr * factor
            self.adamw.step()
        self.adamw.zero_grad()
        return norm if finite else None


def schedule(step: int, settings: LearnerConfig, *, num_steps: int | None) -> float:
    """Factor on the learning rate at a step (0 for the first): linear warm-up, then the decay, to 0 at the end.

    With 2 of 10 steps of warm-up and `linear` it is 0.5, 1, 1, 0.875, ..., 0.125.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    if num_steps is None:
        return 1.0
    behind = (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
    return DECAYS[settings.decay](min(1.0, behind))
