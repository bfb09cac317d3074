"""Policy objectives: what each token adds to the sum that the learner maximises. Pure; called by `loss`.

Each takes `Terms` of one microbatch and gives [N]. With lp the new log-probability, x the proximal one (see
`config.algorithm.Proximal`), r = exp(lp - x) and A the advantage of a token. What other policies drew is
corrected for by `corrections`, how tokens are averaged is in the loss weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from laminar_py.config.algorithm import ALGORITHMS, AlgorithmConfig, Objective
from laminar_py.config.section import ConfigError
from laminar_py.records.columns import REFERENCE_LOGPROBS


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Inputs of a loss, for the N trained tokens of R responses. Gradients go to `logprobs`."""

    logprobs: Tensor  # [N] of the policy that is trained
    behaviour: Tensor  # [N] of the policy that drew the token
    proximal: Tensor  # [N] that the trust region is around
    advantages: Tensor  # [N]
    weights: Tensor  # [N] loss weights, above 0
    staleness: Tensor  # [N] learner steps since the weights that made the token
    response: Tensor  # [N] int64, the response that each token is of
    rewards: Tensor  # [R] of whole responses
    groups: Tensor  # [R] place of each response's group in the step
    columns: Mapping[str, Tensor]  # by name, each [N]: what the algorithm has declared
    log_partition: Tensor | None = None  # [R] estimate for the prompt of each response

    def response_mean(self, values: Tensor) -> Tensor:
        """[N] mean of `values` [N] over the trained tokens of each token's response."""
        return (self.response_sum(values) / self.response_sum(torch.ones_like(values)))[self.response]

    def response_sum(self, values: Tensor) -> Tensor:
        """[R] sum of `values` [N] over the trained tokens of each response."""
        return values.new_zeros(len(self.rewards)).index_add(0, self.response, values)


def clip(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """`min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`, with r cut at `importance_cap` if that is set.

    The cap acts where the clip does not, at r > 1 + clip_high with A < 0, where the product is unbounded: there
    value and gradient are `cap A` and `cap A grad lp`, so a bad token that became likelier is still pushed down,
    with bounded force (dual clip has the same value there and no gradient).

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


def sequence_clip(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """`clip` with one ratio for all tokens of a sequence, the geometric mean `s = exp(mean_t(lp_t - x_t))`.

    Written per token, `s lp_t'` with lp' of value 1 and gradient grad lp, so that advantages may differ inside a
    sequence; where they do not, value and gradient are those of the sequence form under `sequence_mean`.
    GSPO, Zheng et al. 2025, eq. 5 and 14.
    """
    own = terms.logprobs.detach()
    ratio = terms.response_mean(own - terms.proximal).exp() * (terms.logprobs - own).exp()
    clipped = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return torch.minimum(ratio * terms.advantages, clipped * terms.advantages)


def weighted(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """`sg(clip(r, 1 - clip_low, 1 + clip_high)) A lp`: no token loses its gradient, its weight is bounded.

    With x = behaviour: CISPO, MiniMax-M1 2025, eq. 4; AIPO, LlamaRL, Wu et al. 2025, section 6 (no lower bound).
    Where r is 1 it is REINFORCE, e.g. RLOO, Ahmadian et al. 2024.
    """
    ratio = (terms.logprobs.detach() - terms.proximal).exp()
    weight = ratio.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return weight * terms.advantages * terms.logprobs


def balance(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """`-(log Z + d)^2` for each token of a response with imbalance `d = sum_t (lp_t - ref_t) - reward / beta`.

    Under `sequence_mean` the loss is the mean square over responses. With `log Z = -mean d` over the group of a
    response, the gradient is that of the variance of d inside each group: VarGrad.
    Trajectory balance, Malkin et al. 2022; with asynchrony (TBA), Bartoldson et al. 2025.
    """
    assert terms.log_partition is not None, "the partition function is estimated before the loss"
    return -(terms.log_partition + imbalance(terms, settings)).square()[terms.response]


def imbalance(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """d of each response, [R]; see `balance`."""
    reference = terms.columns[REFERENCE_LOGPROBS]
    return terms.response_sum(terms.logprobs - reference) - terms.rewards / settings.beta


def clipped_ratio(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """The ratio that the objective clips, [N], without gradient."""
    gap = terms.logprobs.detach() - terms.proximal
    return (terms.response_mean(gap) if settings.objective is Objective.SEQUENCE_CLIP else gap).exp()


PolicyObjective: TypeAlias = Callable[[Terms, AlgorithmConfig], Tensor]
OBJECTIVES: dict[Objective, PolicyObjective] = {
    Objective.CLIP: clip,
    Objective.SEQUENCE_CLIP: sequence_clip,
    Objective.WEIGHTED: weighted,
    Objective.BALANCE: balance,
}


def objective_of(terms: Terms, settings: AlgorithmConfig) -> Tensor:
    """[N] of the algorithm's own objective, or of the built-in one that its settings name.

    Raises `ConfigError` if an algorithm's own objective fails, or gives anything else.
    """
    own = ALGORITHMS.get(settings.name).objective
    if own is None:
        return OBJECTIVES[settings.objective](terms, settings)
    try:
        found: object = own(terms, settings)
    except (torch.OutOfMemoryError, MemoryError):  # the microbatch is too large, which is no fault of the package
        raise
    except Exception as error:  # a package of somebody else's may raise anything
        line = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"algorithm.name={settings.name}: its objective raised {line}; mend that package"
        ) from error
    if not isinstance(found, Tensor) or found.shape != terms.logprobs.shape:
        raise ConfigError(
            f"algorithm.name={settings.name}: its objective gives no tensor of {len(terms.logprobs)} numbers;"
            " return one for each trained token"
        )
    return found
