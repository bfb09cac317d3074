"""Weights for tokens that another policy drew than the one the trust region is around. Pure; called by `loss`.

Each takes `Terms` and gives [N] factors on the objective, without gradient; c = exp(x - b) is the ratio of the
proximal to the behaviour policy: not 1 by staleness, and by what engine and learner compute differently.
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from laminar_py.config.algorithm import AlgorithmConfig, Correction
from laminar_py.learner.losses.objectives import Terms


def none(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """1."""
    return torch.ones_like(terms.behaviour)


def truncate(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """`min(c, high)`: truncated importance sampling, Yao et al. 2025 (TIS); AReaL, Fu et al. 2025, eq. 5."""
    return _ratio(terms).clamp(max=settings.correction_high)


def mask_above(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """`c 1[c <= high]`: masked importance sampling (MIS), Liu et al. 2025."""
    ratio = _ratio(terms)
    return torch.where(ratio <= settings.correction_high, ratio, 0.0)


def mask_outside(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """`c 1[low <= c <= high]`: IcePop, Ring-1T, Ling team 2025."""
    ratio = _ratio(terms)
    inside = (ratio >= settings.correction_low) & (ratio <= settings.correction_high)
    return torch.where(inside, ratio, 0.0)


def mask_sequences(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """`1[low <= exp(mean_t(lp - b)) <= high]`, for all tokens of a sequence: geometric sequence mask."""
    ratio = terms.response_mean(terms.logprobs.detach() - terms.behaviour).exp()
    return ((ratio >= settings.correction_low) & (ratio <= settings.correction_high)).to(ratio.dtype)


def mask_negative(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """`1 - 1[A < 0 and exp(mean_t(b - lp)) > high]`: what has become unlikely is not pushed down further.

    Off-policy sequence masking, DeepSeek-V3.2 2025, with `log high` its threshold.
    """
    ratio = terms.response_mean(terms.behaviour - terms.logprobs.detach()).exp()
    return 1.0 - ((terms.advantages < 0) & (ratio > settings.correction_high)).to(ratio.dtype)


def _ratio(terms: Terms) -> Tensor:
    return (terms.proximal - terms.behaviour).exp()


OffPolicyCorrection: TypeAlias = Callable[[Terms, AlgorithmConfig], Tensor]
CORRECTIONS: dict[Correction, OffPolicyCorrection] = {
    Correction.NONE: none,
    Correction.TIS: truncate,
    Correction.MIS: mask_above,
    Correction.ICEPOP: mask_outside,
    Correction.SEQUENCE_MASK: mask_sequences,
    Correction.NEGATIVE_MASK: mask_negative,
}
