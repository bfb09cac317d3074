"""Objectives, corrections and KL estimators: the summands of the loss, token by token. Pure.

`loss` calls them. Objectives and corrections take the `LossInputs` of one microbatch and return [N]. Docstrings
write lp, x and b for the log-probabilities of the trained, the proximal and the behaviour policy, and A for the
advantage. r = exp(lp - x) is the ratio that an objective bounds. c = exp(x - b) corrects for tokens of another
policy; staleness, and the numerics of engine and learner, move c away from 1. Every difference of
log-probabilities is cut at `LARGEST`, so that one token cannot make the gradients of a step infinite.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias

import torch
from torch import Tensor

from laminar_py.config.algorithm import ALGORITHMS, AlgorithmConfig, Correction, Divergence, Objective
from laminar_py.config.registry import load_from_file
from laminar_py.config.section import ConfigError
from laminar_py.records.columns import REFERENCE_LOGPROBS

LARGEST = 20.0  # nats, a ratio of 4.9e8: no sound run comes near, and fp32 overflows at 88


@dataclass(frozen=True, slots=True, kw_only=True)
class LossInputs:
    """Inputs of a loss, for the N trained tokens of R responses; only `logprobs` has a gradient."""

    logprobs: Tensor  # [N] log-probabilities of the trained policy
    behaviour: Tensor  # [N] log-probabilities of the policy that drew the token
    proximal: Tensor  # [N] log-probabilities at the centre of the trust region, see `config.algorithm.Proximal`
    advantages: Tensor  # [N]
    weights: Tensor  # [N] loss weights, above 0
    staleness: Tensor  # [N] learner steps since the weights that made the token
    response: Tensor  # [N] int64, index of each token's response, in [0, R)
    rewards: Tensor  # [R] of whole responses
    groups: Tensor  # [R] index of each response's group in the step
    columns: Mapping[str, Tensor]  # name of a column that the algorithm declares -> [N] numbers
    log_partition: Tensor | None = None  # [R] estimate for the prompt of each response

    def response_mean(self, values: Tensor) -> Tensor:
        """[N] for each token the mean of `values` [N] over its response's trained tokens."""
        return (self.response_sum(values) / self.response_sum(torch.ones_like(values)))[self.response]

    def response_sum(self, values: Tensor) -> Tensor:
        """[R] sum of `values` [N] over the trained tokens of each response."""
        return values.new_zeros(len(self.rewards)).index_add(0, self.response, values)


def bounded(log_ratio: Tensor) -> Tensor:
    """Cut a difference of log-probabilities at `LARGEST` either way; it has no gradient where it is cut."""
    return log_ratio.clamp(-LARGEST, LARGEST)


def clip(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, with r cut at `importance_cap` if that is set.

    The cap acts at r > 1 + clip_high with A < 0, where the clip has no effect and `r A` is unbounded. There the
    value is `cap A` and the gradient `cap A grad lp`, so a bad token that became likelier is still pushed down,
    with bounded force. Dual clip has the same value there and no gradient.

    PPO, Schulman et al. 2017, eq. 7; GRPO, Shao et al. 2024, eq. 3; two bounds: DAPO, Yu et al. 2025, section 3.1;
    truncation: IMPALA, Espeholt et al. 2018, section 4.1; dual clip: Ye et al. 2020.
    """
    ratio = bounded(inputs.logprobs - inputs.proximal).exp()
    if settings.importance_cap is not None:
        # The value is the capped ratio, and the gradient is the capped ratio times grad lp, also at the cap.
        capped = ratio.detach().clamp(max=settings.importance_cap)
        ratio = capped * (inputs.logprobs - inputs.logprobs.detach() + 1.0)
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)


def sequence_clip(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)` with one ratio s for all tokens of a response.

    s is the geometric mean of the tokens' ratios, `exp(mean_t(lp_t - x_t))`. A token's ratio has the value s and
    the gradient `s grad lp_t`, so that advantages may differ inside a response. Where they are equal, value and
    gradient are the sequence form's, under `sequence_mean`. GSPO, Zheng et al. 2025, eq. 5 and 14.
    """
    logprobs = inputs.logprobs.detach()
    gap = inputs.response_mean(logprobs - inputs.proximal)
    ratio = bounded(gap + (inputs.logprobs - logprobs)).exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)


def weighted(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`w A lp` with the weight `w = clip(r, 1 - clip_low, 1 + clip_high)`, which has no gradient.

    So every token keeps a gradient, with a bounded weight. With the behaviour policy as the proximal one: CISPO,
    MiniMax-M1 2025, eq. 4; AIPO, LlamaRL, Wu et al. 2025, section 6 (no lower bound). Where r is 1 this is
    REINFORCE, e.g. RLOO, Ahmadian et al. 2024.
    """
    ratio = bounded(inputs.logprobs.detach() - inputs.proximal).exp()
    weight = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return weight * inputs.advantages * inputs.logprobs


def balance(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`-(log Z + d)^2` for each token of a response with imbalance `d = sum_t (lp_t - ref_t) - reward / beta`.

    Under `sequence_mean` the loss is the mean square over responses. With `log Z = -mean d` over the group of a
    response, the gradient equals the gradient of d's variance inside each group: VarGrad.
    Trajectory balance, Malkin et al. 2022; with asynchrony (TBA), Bartoldson et al. 2025.
    """
    assert inputs.log_partition is not None, "`balance` needs log_partition; `estimate_partition` makes it"
    return -(inputs.log_partition + imbalance(inputs, settings)).square()[inputs.response]


def imbalance(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """[R] trajectory imbalance of each response, `sum_t (lp_t - ref_t) - reward / beta`."""
    reference = inputs.columns[REFERENCE_LOGPROBS]
    return inputs.response_sum(_bounded_value(inputs.logprobs - reference)) - inputs.rewards / settings.beta


def _bounded_value(log_ratio: Tensor) -> Tensor:
    """Cut the value as `bounded` does, and keep the gradient: without an exponential both pull a token back."""
    return (log_ratio - log_ratio.detach()) + bounded(log_ratio.detach())


def clipped_ratio(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """[N] ratio of trained to proximal policy that the objective clips, without gradient."""
    gap = inputs.logprobs.detach() - inputs.proximal
    return bounded(inputs.response_mean(gap) if settings.objective is Objective.SEQUENCE_CLIP else gap).exp()


PolicyObjective: TypeAlias = Callable[[LossInputs, AlgorithmConfig], Tensor]
OBJECTIVES: dict[str, PolicyObjective] = {
    Objective.CLIP: clip,
    Objective.SEQUENCE_CLIP: sequence_clip,
    Objective.WEIGHTED: weighted,
    Objective.BALANCE: balance,
}


def objective_of(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """[N] values of the objective that the algorithm's package registered, else of `settings.objective`.

    Raises `ConfigError` if an objective of a package or file raises, or does not return [N] numbers.
    """
    own, where = own_objective(settings)
    if own is None:
        return OBJECTIVES[settings.objective](inputs, settings)
    try:
        values = own(inputs, settings)
    except (torch.OutOfMemoryError, MemoryError):  # too large a microbatch is no fault of the package
        raise
    except Exception as error:  # code of another package may raise anything
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{where}: its objective raised {line}; mend it") from error
    if not isinstance(values, Tensor) or values.shape != inputs.logprobs.shape:
        raise ConfigError(
            f"{where}: its objective returned no tensor of {len(inputs.logprobs)} numbers; return one for each"
            " trained token"
        )
    return values


def own_objective(settings: AlgorithmConfig) -> tuple[Callable[..., object] | None, str]:
    """Return the objective of a package or a file, and the setting that names it; None for a built-in objective.

    Raises `ConfigError` if it cannot be loaded.
    """
    if settings.objective_file is not None:
        return _load_objective(settings.objective_file), f"algorithm.objective={settings.objective_file}"
    return ALGORITHMS.get(settings.name).objective, f"algorithm.name={settings.name}"


_load_objective = cache(partial(load_from_file, field="algorithm.objective"))


def try_objective(settings: AlgorithmConfig, *, device: torch.device) -> None:
    """Call an objective of a package or a file on made-up tokens. Raises `ConfigError` if it fails.

    A mistake then ends the run before a response has been generated.
    """
    own, where = own_objective(settings)
    if own is None:
        return
    logprobs = torch.tensor([-0.5, -1.0, -0.25, -2.0], device=device, requires_grad=True)
    ones, zeros = torch.ones(4, device=device), torch.zeros(4, device=device)
    values = objective_of(
        LossInputs(
            logprobs=logprobs,
            behaviour=logprobs.detach() - 0.1,
            proximal=logprobs.detach() - 0.1,
            advantages=torch.tensor([1.0, 1.0, -1.0, -1.0], device=device),
            weights=ones / 4,
            staleness=zeros,
            response=torch.tensor([0, 0, 1, 1], device=device),
            rewards=torch.tensor([1.0, 0.0], device=device),
            groups=torch.zeros(2, dtype=torch.int64, device=device),
            columns={column.name: ones for column in settings.columns},
        ),
        settings,
    )
    if not values.requires_grad:
        raise ConfigError(f"{where}: its objective has no gradient; compute it from inputs.logprobs")


def no_correction(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """1 for each token."""
    return torch.ones_like(inputs.behaviour)


def truncate(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`min(c, correction_high)`: truncated importance sampling, Yao et al. 2025; AReaL, Fu et al. 2025, eq. 5."""
    return _correction_ratio(inputs).clamp(max=settings.correction_high)


def mask_above(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """c up to `correction_high`, 0 above it: masked importance sampling (MIS), Liu et al. 2025."""
    ratio = _correction_ratio(inputs)
    return torch.where(ratio <= settings.correction_high, ratio, 0.0)


def mask_outside(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """c from `correction_low` to `correction_high`, 0 outside: IcePop, Ring-1T, Ling team 2025."""
    ratio = _correction_ratio(inputs)
    inside = (ratio >= settings.correction_low) & (ratio <= settings.correction_high)
    return torch.where(inside, ratio, 0.0)


def mask_sequences(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """1 for a response with `exp(mean_t(lp - b))` within both bounds, else 0: geometric sequence mask."""
    ratio = bounded(inputs.response_mean(inputs.logprobs.detach() - inputs.behaviour)).exp()
    return ((ratio >= settings.correction_low) & (ratio <= settings.correction_high)).to(ratio.dtype)


def mask_negative(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """0 for a token with A < 0 in a response with `exp(mean_t(b - lp)) > correction_high`, else 1.

    So a response that has become unlikely is not pushed down further. Off-policy sequence masking, DeepSeek-V3.2
    2025, whose threshold is `log(correction_high)`.
    """
    ratio = bounded(inputs.response_mean(inputs.behaviour - inputs.logprobs.detach())).exp()
    return 1.0 - ((inputs.advantages < 0) & (ratio > settings.correction_high)).to(ratio.dtype)


def _correction_ratio(inputs: LossInputs) -> Tensor:
    """[N] c: ratio of proximal to behaviour policy."""
    return bounded(inputs.proximal - inputs.behaviour).exp()


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
# log-probabilities [T] of policy and reference on tokens that the policy drew, and returns [T] in nats. The mean
# of k1 and of k3 is the divergence; the mean gradient of k2 is the divergence's gradient (Tang and Munos 2025).


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """`log p - log q`: unbiased, may be negative. The gradient has mean 0, so k1 belongs in the advantage."""
    return bounded(logprobs - reference)


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """`(log p - log q)^2 / 2`: biased, with an unbiased gradient."""
    return 0.5 * _bounded_value(logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """`q / p - 1 - log(q / p)`: unbiased, never negative. The mean gradient is grad KL(reference || policy)."""
    gap = bounded(reference - logprobs)
    return gap.expm1() - gap


Estimator: TypeAlias = Callable[[Tensor, Tensor], Tensor]
ESTIMATORS: dict[Divergence, Estimator] = {Divergence.K1: k1, Divergence.K2: k2, Divergence.K3: k3}
