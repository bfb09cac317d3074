"""The loss of one microbatch: an objective, a correction, an average. Pure; called by `step`.

Invariant: a loss is a sum over tokens weighted by `weights`, which depend on the whole step. So packing, gradient
accumulation and data parallelism only split the sum and never change its value.
"""

import torch
from torch import Tensor

from laminar_py.config.algorithm import AlgorithmConfig, Divergence, Proximal
from laminar_py.learner.losses.corrections import CORRECTIONS
from laminar_py.learner.losses.divergence import ESTIMATORS, k1
from laminar_py.learner.losses.objectives import Terms, objective_of
from laminar_py.records.columns import REFERENCE_LOGPROBS


def policy_loss(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """`-sum_t w_t (c_t J_t - kl_coef k_t)` with objective J, correction c and divergence k from the reference.

    A scalar with a gradient to `terms.logprobs`. k1 is part of the advantages instead, see `regularised`. Raises
    `ConfigError` as `objective_of` does.
    """
    objective = objective_of(terms, settings)
    correction = CORRECTIONS[settings.correction](terms, settings)
    total = correction * objective
    if settings.kl_coef > 0 and settings.kl_estimator is not Divergence.K1:
        divergence = ESTIMATORS[settings.kl_estimator](terms.logprobs, terms.columns[REFERENCE_LOGPROBS])
        total = total - settings.kl_coef * divergence
    return -(terms.weights * total).sum()


def regularised(advantages: Tensor, own: Tensor, reference: Tensor, *, coef: float) -> Tensor:
    """`A - coef (log own - log reference)`: k1 as a cost of each token [N], its own alone, as k2 has it."""
    return advantages - coef * k1(own.detach(), reference)


def proximal_logprobs(
    kind: Proximal, own: Tensor, *, behaviour: Tensor, staleness: Tensor, recomputed: Tensor | None
) -> Tensor:
    """Log-probabilities [N] of the policy that the trust region is around, without gradient.

    `own` are those of the policy that is trained, `recomputed` those at the start of the step (None: the same),
    `staleness` [N] counts learner steps: `interpolate` gives `own` at 0, else `b + (1 - 1/d) (own - b)` at d.

    Decoupled PPO, Hilton et al. 2022; AReaL, Fu et al. 2025; interpolation: A-3PO, Li et al. 2025.
    """
    now = own.detach()
    if kind is Proximal.BEHAVIOUR:
        return behaviour
    if kind is Proximal.RECOMPUTE:
        return now if recomputed is None else recomputed
    share = 1.0 - torch.where(staleness > 0, 1.0 / staleness.clamp(min=1), 0.0)
    return behaviour + share * (now - behaviour)


def distilled(advantages: Tensor, own: Tensor, teacher: Tensor, *, coef: float) -> Tensor:
    """`A + coef (log teacher - log own)`: minus the reverse KL to a teacher, token by token, as advantage [N].

    On-policy distillation: Agarwal et al. 2024 (GKD); with one sample of each token, as policy gradient.
    """
    return advantages + coef * (teacher - own.detach())


def cross_entropy_loss(logprobs: Tensor, *, loss_weights: Tensor) -> Tensor:
    """`-sum_t w_t log pi(token_t)`: the supervised loss of the warm start; tensors are [T]."""
    return -(loss_weights * logprobs).sum()
