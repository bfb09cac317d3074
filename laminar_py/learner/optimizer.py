"""AdamW with clipped gradients and a learning rate by the number of steps. `step` and `critic` use it."""

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from laminar_py.config.learner import Decay, LearnerConfig
from laminar_py.learner.schedule import lr_factor


class Optimizer:
    """AdamW on a model's trainable parameters, with clipped gradients and a learning-rate schedule."""

    def __init__(self, model: nn.Module, settings: LearnerConfig, *, total_steps: int | None = None) -> None:
        """`total_steps` counts the whole run's steps; a decay of the learning rate needs it."""
        assert total_steps is not None or settings.decay is Decay.NONE, f"decay={settings.decay}: no total_steps"
        self._settings = settings
        self._total_steps = total_steps
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.adamw = torch.optim.AdamW(
            self._trained, lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay, fused=True
        )
        self.lr = 0.0  # of the last update
        self.updates = 0  # since the start of the run, without skipped ones

    def update(self, step: int, *, loss: float) -> float | None:
        """Clip the gradients, make an AdamW step, and clear the gradients.

        `step` counts learner steps from 0 and gives the learning rate; `loss` is the sum over ranks. Returns the
        gradient norm before clipping. If this norm or the loss is not finite, changes no weight and returns None.
        """
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        total_norm = torch.nn.utils.get_total_norm(gradients)
        norm = float(total_norm.full_tensor() if isinstance(total_norm, DTensor) else total_norm)
        finite = math.isfinite(norm) and math.isfinite(loss)
        if finite:
            torch.nn.utils.clip_grads_with_norm_(self._trained, self._settings.grad_clip, total_norm)
            self.lr = self._settings.lr * lr_factor(step, self._settings, total_steps=self._total_steps)
            for group in self.adamw.param_groups:
                group["lr"] = self.lr
            self.adamw.step()
            self.updates += 1
        self.adamw.zero_grad()
        return norm if finite else None

    def recount(self) -> None:
        """Count the updates that AdamW has made, after its state has been restored."""
        steps = [int(state["step"]) for state in self.adamw.state.values()]
        self.updates = max(steps, default=0)
