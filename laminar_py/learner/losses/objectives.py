"""Objectives, corrections and KL estimators: the summands of the loss, token by token. Pure.

`loss` calls them. Objectives and corrections take the `LossInputs` of one microbatch and give [N]. With lp the new
log-probability, x the proximal one (see `config.algorithm.Proximal`), b the behaviour policy's and A the
advantage, r = exp(lp - x) is the ratio that an objective bounds. c = exp(x - b) corrects for tokens that another
policy drew; staleness, and the numerics of engine and learner, move it away from 1. The loss weights say how
tokens are averaged.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from laminar_py.config.algorithm import ALGORITHMS, AlgorithmConfig, Correction, Divergence, Objective
from laminar_py.config.section import ConfigError
from laminar_py.records.columns import REFERENCE_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a loss, for the N trained tokens of R responses; only `logprobs` has a gradient."""

    logprobs: Tensor  # [N] of the trained policy
    behaviour: Tensor  # [N] of the policy that drew the token
    proximal: Tensor  # [N] of the policy at the centre of the trust region
    advantages: Tensor  # [N]
    weights: Tensor  # [N] loss weights, above 0
    staleness: Tensor  # [N] learner steps since the weights that made the token
    response: Tensor  # [N] int64, place of each token's response
    rewards: Tensor  # [R] of whole responses
    groups: Tensor  # [R] place of each response's group in the step
    columns: Mapping[str, Tensor]  # by name, each [N], as the algorithm declares them
    log_partition: Tensor | None = None  # [R] estimate for the prompt of each response

    def response_mean(self, values: Tensor) -> Tensor:
        """[N] mean of `values` [N] over the trained tokens of each token's response."""
        return (self.response_sum(values) / self.response_sum(torch.ones_like(values)))[self.response]

    def response_sum(self, values: Tensor) -> Tensor:
        """[R] sum of `values` [N] over the trained tokens of each response."""
        return values.new_zeros(len(self.rewards)).index_add(0, self.response, values)


def clip(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, with r cut at `importance_cap` if that is set.

    The cap acts where the clip does not, at r > 1 + clip_high with A < 0, where the product is unbounded: there
    value and gradient are `cap A` and `cap A grad lp`, so a bad token that became likelier is still pushed down,
    with bounded force. Dual clip has the same value there and no gradient.

    PPO, Schulman et al. 2017, eq. 7; GRPO, Shao et al. 2024, eq. 3; two bounds: DAPO, Yu et al. 2025, section 3.1;
    truncation: IMPALA, Espeholt et al. 2018, section 4.1; dual clip: Ye et al. 2020.
    """
    ratio = (terms.logprobs - terms.proximal).exp()
    if settings.importance_cap is not None:
        # Its gradient is the capped ratio's times grad lp: a weight is not differentiated at its cap.
        capped = ratio.detach().clamp(max=settings.importance_cap)
        ratio = capped * (terms.logprobs - terms.logprobs.detach() + 1.0)
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.minimum(ratio * terms.advantages, clipped * terms.advantages)


def sequence_clip(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`clip` with one ratio for all tokens of a sequence, the geometric mean `s = exp(mean_t(lp_t - x_t))`.

    Written per token, `s lp_t'` with lp' of value 1 and gradient grad lp, so that advantages may differ inside a
    sequence; where they do not, value and gradient equal the sequence form's under `sequence_mean`.
    GSPO, Zheng et al. 2025, eq. 5 and 14.
    """
    logprobs = terms.logprobs.detach()
    ratio = terms.response_mean(logprobs - terms.proximal).exp() * (terms.logprobs - logprobs).exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.minimum(ratio * terms.advantages, clipped * terms.advantages)


def weighted(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`sg(clip(r, 1 - clip_low, 1 + clip_high)) A lp`: each token keeps its gradient, with a bounded weight.

    With x = behaviour: CISPO, MiniMax-M1 2025, eq. 4; AIPO, LlamaRL, Wu et al. 2025, section 6 (no lower bound).
    Where r is 1 it is REINFORCE, e.g. RLOO, Ahmadian et al. 2024.
    """
    ratio = (terms.logprobs.detach() - terms.proximal).exp()
    weight = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return weight * terms.advantages * terms.logprobs


def balance(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`-(log Z + d)^2` for each token of a response with imbalance `d = sum_t (lp_t - ref_t) - reward / beta`.

    Under `sequence_mean` the loss is the mean square over responses. With `log Z = -mean d` over the group of a
    response, the gradient equals the gradient of d's variance inside each group: VarGrad.
    Trajectory balance, Malkin et al. 2022; with asynchrony (TBA), Bartoldson et al. 2025.
    """
    assert terms.log_partition is not None, "the partition function is estimated before the loss"
    return -(terms.log_partition + imbalance(terms, settings)).square()[terms.response]


def imbalance(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """[R] `sum_t (lp_t - ref_t) - reward / beta` of each response: the d of `balance`."""
    reference = terms.columns[REFERENCE_LOGPROBS]
    return terms.response_sum(terms.logprobs - reference) - terms.rewards / settings.beta


def clipped_ratio(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """[N] ratio that the objective clips, without gradient."""
    gap = terms.logprobs.detach() - terms.proximal
    return (terms.response_mean(gap) if settings.objective is Objective.SEQUENCE_CLIP else gap).exp()


PolicyObjective: TypeAlias = Callable[[LossInputs, AlgorithmConfig], Tensor]
OBJECTIVES: dict[Objective, PolicyObjective] = {
    Objective.CLIP: clip,
    Objective.SEQUENCE_CLIP: sequence_clip,
    Objective.WEIGHTED: weighted,
    Objective.BALANCE: balance,
}


def objective_of(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """[N] values of the objective that the algorithm brings, or of the built-in objective in its settings.

    Raises `ConfigError` if an objective of a package raises, or does not return [N] numbers.
    """
    own = ALGORITHMS.get(settings.name).objective
    if own is None:
        return OBJECTIVES[settings.objective](terms, settings)
    try:
        found: object = own(terms, settings)
    except (torch.OutOfMemoryError, MemoryError):  # too large a microbatch is no fault of the package
        raise
    except Exception as error:  # code of another package may raise anything
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"algorithm.name={settings.name}: its objective raised {line}; mend that package"
        ) from error
    if not isinstance(found, Tensor) or found.shape != terms.logprobs.shape:
        raise ConfigError(
            f"algorithm.name={settings.name}: its objective returned no tensor of {len(terms.logprobs)} numbers;"
            " return one for each trained token"
        )
    return found


def no_correction(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """1 for each token."""
    return torch.ones_like(terms.behaviour)


def truncate(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`min(c, high)`: truncated importance sampling, Yao et al. 2025 (TIS); AReaL, Fu et al. 2025, eq. 5."""
    return _ratio(terms).clamp(max=settings.correction_high)


def mask_above(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`c 1[c <= high]`: masked importance sampling (MIS), Liu et al. 2025."""
    ratio = _ratio(terms)
    return torch.where(ratio <= settings.correction_high, ratio, 0.0)


def mask_outside(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`c 1[low <= c <= high]`: IcePop, Ring-1T, Ling team 2025."""
    ratio = _ratio(terms)
    inside = (ratio >= settings.correction_low) & (ratio <= settings.correction_high)
    return torch.where(inside, ratio, 0.0)


def mask_sequences(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`1[low <= exp(mean_t(lp - b)) <= high]`, one value for all tokens of a response: geometric sequence mask."""
    ratio = terms.response_mean(terms.logprobs.detach() - terms.behaviour).exp()
    return ((ratio >= settings.correction_low) & (ratio <= settings.correction_high)).to(ratio.dtype)


def mask_negative(terms: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`1 - 1[A < 0 and exp(mean_t(b - lp)) > high]`: do not push down a response that has become unlikely.

    Off-policy sequence masking, DeepSeek-V3.2 2025, with `log high` its threshold.
    """
    ratio = terms.response_mean(terms.behaviour - terms.logprobs.detach()).exp()
    return 1.0 - ((terms.advantages < 0) & (ratio > settings.correction_high)).to(ratio.dtype)


def _ratio(terms: LossInputs) -> Tensor:
    return (terms.proximal - terms.behaviour).exp()


OffPolicyCorrection: TypeAlias = Callable[[LossInputs, AlgorithmConfig], Tensor]
CORRECTIONS: dict[Correction, OffPolicyCorrection] = {
    Correction.NONE: no_correction,
    Correction.TIS: truncate,
    Correction.MIS: mask_above,
    Correction.ICEPOP: mask_outside,
    Correction.SEQUENCE_MASK: mask_sequences,
    Correction.NEGATIVE_MASK: mask_negative,
}


# ---- estimators of KL(policy || reference), Schulman, "Approximating KL divergence", 2020. Each takes the
# log-probabilities [T] of policy and reference on tokens that the policy drew, and gives [T] in nats. k1 and k3
# have the divergence as their mean, and k2 has its gradient (Tang and Munos 2025).


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """`log p - log q`: unbiased, may be negative. Its gradient has mean 0, so it belongs in the advantage."""
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
