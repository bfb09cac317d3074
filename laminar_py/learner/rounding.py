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


class _RoundedProduct(torch.autograd.Function):
    """Product of rows and rounded weights; the backward pass rounds them again, so that no copy is kept."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, rounded: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(rows, weight)
        ctx.rounded = rounded
        return F.linear(rows, rounded(weight))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,), (rows, weight) = gradients, ctx.saved_tensors
        of_weight = gradient.flatten(0, -2).T @ rows.flatten(0, -2)
        return gradient @ ctx.rounded(weight), of_weight, None


class _RoundedLinear(nn.Linear):
    rounded: Callable[[Tensor], Tensor]

    def forward(self, input: Tensor) -> Tensor:
        product: Tensor = _RoundedProduct.apply(input, self.weight, self.rounded)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


def round_weights(model: nn.Module, rounding: Rounding) -> None:
    """Let the matrices of a model's layers compute with rounded weights."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and rounding.is_rounded(f"{name}.weight"):
            module.__class__ = _RoundedLinear
            module.rounded = rounding.rounded  # type: ignore[assignment]
