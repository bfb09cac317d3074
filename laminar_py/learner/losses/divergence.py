"""Estimators of KL(policy || reference) from the tokens that were drawn. Pure; called by `loss`.

Each takes the log-probabilities [T] of the policy (new) and of the reference, and gives [T] in nats. On tokens
that the policy drew, k1 and k3 have the divergence as their mean, and k2 has its gradient.
Schulman, "Approximating KL divergence", 2020; gradients: Tang and Munos 2025.
"""

from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from laminar_py.config.algorithm import Divergence


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """`log p - log q`: unbiased, may be negative. Its own gradient has mean 0: it belongs into the advantage."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """`(log p - log q)^2 / 2`: biased, with an unbiased gradient."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """`q / p - 1 - log(q / p)`: unbiased, never negative; its gradient is that of KL(reference || policy)."""
    gap = reference - logprobs
    return gap.expm1() - gap


Estimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]
ESTIMATORS: dict[Divergence, Estimator] = {Divergence.K1: k1, Divergence.K2: k2, Divergence.K3: k3}
