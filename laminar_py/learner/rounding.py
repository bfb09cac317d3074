"""A forward on rounded weights, as engines compute it (`learner.rounds_weights`). Called when a model is opened.

The optimizer keeps the weights as they are, and the gradient of a rounded weight is used for its own
(straight-through). Names and types of parameters stay, so sharding, checkpoints and publishing do not differ.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Rounding:
    """Which Hugging Face names are rounded, and how: `weight [out, in]` to as many values of its dtype."""

    is_rounded: Callable[[str], bool]
    rounded: Callable[[Tensor], Tensor]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        return rounded(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _RoundedLinear(nn.Linear):
    rounded: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        weight = _StraightThrough.apply(self.weight, self.rounded)  # type: ignore[no-untyped-call]
        return F.linear(input, weight, self.bias)


def round_weights(model: nn.Module, rounding: Rounding) -> None:
    """Let the matrices of a model's layers compute with rounded weights."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and rounding.is_rounded(f"{name}.weight"):
            module.__class__ = _RoundedLinear
            module.rounded = rounding.rounded  # type: ignore[assignment]
