"""Policy losses: pure functions of log-probabilities, advantages and weights. Called by `step`.

Invariant: a loss is a sum over tokens weighted by `loss_weights`, which sum to 1 over the whole step. So packing,
gradient accumulation and data parallelism only split the sum and never change its value.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss and what it did, each a weighted sum over the tokens of one microbatch (scalars)."""

    loss: Tensor  # differentiable
    ratio_deviation: Tensor  # of |ratio - 1|
    clip_fraction: Tensor  # of tokens whose ratio is outside [1 - clip_low, 1 + clip_high]
    truncated_fraction: Tensor  # of tokens whose ratio is above importance_cap


def grpo_loss(
    logprobs: Tensor,
    *,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_weights: Tensor,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
) -> PolicyLoss:
    """Clipped policy gradient with the behaviour policy as the ratio's denominator; all tensors are [T].

    With r = pi(token) / mu(token), mu the policy that sampled it, and r' = min(r, importance_cap):

        loss = -sum_t w_t min(r'_t A_t, clip(r'_t, 1 - clip_low, 1 + clip_high) A_t)

    A > 0: the clip stops the gradient above 1 + clip_high; the cap, which is not below that, changes nothing.
    A < 0: the clip stops it below 1 - clip_low but leaves large r alone, where the plain product is unbounded.
    There the cap truncates the importance weight: value r' A and gradient r' A grad log pi, so a bad token that
    the policy came to favour is still pushed down, with bounded force (dual-clip has the same value there and
    no gradient). A staleness correction needs no further factor, because r already corrects from mu.

    PPO, Schulman et al. 2017, eq. 7; two clip bounds, DAPO, Yu et al. 2025, section 3.1; truncated importance
    weights, IMPALA, Espeholt et al. 2018, section 4.1; dual clip, Ye et al. 2020; GRPO, Shao et al. 2024.
    """
    low, high = 1.0 - clip_low, 1.0 + clip_high
    assert importance_cap >= high, (
        f"importance_cap {importance_cap} below 1 + clip_high {high} would undo the clip"
    )
    ratio = (logprobs.detach() - behaviour_logprobs).exp()
    capped = ratio.clamp(max=importance_cap)
    # Its value is r' and its gradient r' grad log pi: an importance weight is not differentiated at its cap.
    weighted = capped * (logprobs - logprobs.detach() + 1.0)
    objective = torch.minimum(weighted * advantages, weighted.clamp(low, high) * advantages)
    return PolicyLoss(
        loss=-(loss_weights * objective).sum(),
        ratio_deviation=(loss_weights * (ratio - 1.0).abs()).sum(),
        clip_fraction=loss_weights[(ratio < low) | (ratio > high)].sum(),
        truncated_fraction=loss_weights[ratio > importance_cap].sum(),
    )


def cross_entropy_loss(logprobs: Tensor, *, loss_weights: Tensor) -> Tensor:
    """`-sum_t w_t log pi(token_t)`: the supervised loss of the warm start; tensors are [T]."""
    return -(loss_weights * logprobs).sum()
