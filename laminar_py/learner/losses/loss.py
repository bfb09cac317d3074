"""The loss of one microbatch: its inputs, an objective, a correction, an average. `step` calls it.

A loss is a sum over trained tokens with loss weights that depend on the whole step. So packing, gradient
accumulation and data parallelism only split the sum and never change its value (law 5).
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from laminar_py.config.algorithm import AlgorithmConfig, Divergence, Objective, Proximal
from laminar_py.learner.distributed import Ranks
from laminar_py.learner.losses.objectives import (
    CORRECTIONS,
    ESTIMATORS,
    LossInputs,
    bounded,
    imbalance,
    k1,
    objective_of,
)
from laminar_py.learner.model import policy_logprobs
from laminar_py.records.columns import REFERENCE_LOGPROBS, TEACHER_LOGPROBS, Array
from laminar_py.records.trajectory import MicroBatch


def policy_loss(inputs: LossInputs, settings: AlgorithmConfig) -> Tensor:
    """`-sum_t w_t (c_t J_t - kl_coef k_t)` with objective J, correction c and divergence k from the reference.

    Returns a scalar with a gradient to `inputs.logprobs`. The estimator k1 is part of the advantages instead, see
    `penalised_advantages`. Raises `ConfigError` if a package's objective fails.
    """
    objective = objective_of(inputs, settings)
    correction = CORRECTIONS[settings.correction](inputs, settings)
    total = torch.where(correction == 0, 0.0, correction * objective)  # 0 times infinity would be NaN
    if settings.kl_coef > 0 and settings.kl_estimator is not Divergence.K1:
        divergence = ESTIMATORS[settings.kl_estimator](inputs.logprobs, inputs.columns[REFERENCE_LOGPROBS])
        total = total - settings.kl_coef * divergence
    return -(inputs.weights * total).sum()


def penalised_advantages(advantages: Tensor, logprobs: Tensor, reference: Tensor, *, coef: float) -> Tensor:
    """`A - coef (log policy - log reference)`: k1 as a cost of each token, [N], without a gradient."""
    return advantages - coef * k1(logprobs.detach(), reference)


def proximal_logprobs(
    kind: Proximal, logprobs: Tensor, *, behaviour: Tensor, staleness: Tensor, recomputed: Tensor | None
) -> Tensor:
    """Log-probabilities [N] of the proximal policy, at the centre of the trust region, without gradient.

    Arguments are [N]: `logprobs` of the trained policy, `behaviour` of the policy that drew the token,
    `recomputed` of the policy at the start of the step (None: `logprobs`), `staleness` in learner steps.
    `interpolate` gives `logprobs` at staleness 0, `b + (1 - 1/d) (logprobs - b)` at staleness d (b: `behaviour`).

    Decoupled PPO, Hilton et al. 2022; AReaL, Fu et al. 2025; interpolation: A-3PO, Li et al. 2025.
    """
    now = logprobs.detach()
    if kind is Proximal.BEHAVIOUR:
        return behaviour
    if kind is Proximal.RECOMPUTE:
        return now if recomputed is None else recomputed
    share = 1.0 - torch.where(staleness > 0, 1.0 / staleness.clamp(min=1), 0.0)
    return behaviour + share * (now - behaviour)


def distilled_advantages(advantages: Tensor, logprobs: Tensor, teacher: Tensor, *, coef: float) -> Tensor:
    """`A + coef (log teacher - log policy)`, [N] without gradient: the reverse KL to a teacher as a token's cost.

    On-policy distillation as a policy gradient with one sample of each token: Agarwal et al. 2024 (GKD).
    """
    return advantages + coef * bounded(teacher - logprobs.detach())


def trained_rows(batch: MicroBatch, device: torch.device) -> Tensor:
    """[N] rows that predict a trained token, ascending."""
    return torch.tensor(np.flatnonzero(batch.loss_weights), device=device)


def make_loss_inputs(
    batch: MicroBatch,
    rows: Tensor,
    logprobs: Tensor,
    settings: AlgorithmConfig,
    *,
    recomputed: Tensor | None = None,
    log_partition: Tensor | None = None,
) -> LossInputs:
    """Build the inputs of the loss for `rows` [N], where the policy has `logprobs` [N].

    `recomputed` [N] are the policy's log-probabilities at the start of the step (None: `logprobs`), and
    `log_partition` [G] is the estimate for each group of the step. A teacher and the k1 penalty change the
    advantages here. Raises AssertionError if the microbatch lacks a column of the algorithm.
    """

    def at_rows(values: Array) -> Tensor:
        return torch.tensor(values, device=rows.device)[rows]

    behaviour, advantages, staleness = map(at_rows, (batch.behaviour_logprobs, batch.advantages, batch.staleness))
    missing = {column.name for column in settings.columns} - batch.columns.keys()
    assert not missing, f"a microbatch has no {', '.join(sorted(missing))} for {settings.name}"
    columns = {name: at_rows(values) for name, values in batch.columns.items()}
    if settings.teacher_coef > 0:
        advantages = distilled_advantages(
            advantages, logprobs, columns[TEACHER_LOGPROBS], coef=settings.teacher_coef
        )
    if settings.kl_coef > 0 and settings.kl_estimator is Divergence.K1:
        advantages = penalised_advantages(advantages, logprobs, columns[REFERENCE_LOGPROBS], coef=settings.kl_coef)
    proximal = proximal_logprobs(
        settings.proximal, logprobs, behaviour=behaviour, staleness=staleness, recomputed=recomputed
    )
    ends = torch.tensor(batch.cu_seqlens[1:], device=rows.device)
    responses = torch.tensor(batch.responses, dtype=torch.int64, device=rows.device)
    groups = torch.tensor(batch.groups, device=rows.device)
    return LossInputs(
        logprobs=logprobs,
        behaviour=behaviour,
        proximal=proximal,
        advantages=advantages,
        weights=at_rows(batch.loss_weights),
        staleness=staleness,
        response=responses[torch.bucketize(rows, ends, right=True)],
        rewards=torch.tensor(batch.rewards, device=rows.device),
        groups=groups,
        columns=columns,
        log_partition=None if log_partition is None else log_partition[groups],
    )


def estimate_partition(
    model: PreTrainedModel, microbatches: Sequence[MicroBatch], settings: AlgorithmConfig, ranks: Ranks
) -> Tensor | None:
    """Estimate log Z of each group in the step, [G], with the current policy; None if the objective needs none.

    log Z is minus the mean `imbalance` of the group's responses on all ranks (VarGrad). Runs a forward pass for
    each microbatch. Collective.
    """
    if settings.objective is not Objective.BALANCE:
        return None
    num_groups = 1 + max(int(batch.groups.max()) for batch in microbatches)
    sums = torch.zeros(2, int(ranks.max(num_groups)), device=ranks.device)
    for batch in microbatches:
        with torch.no_grad():
            rows = trained_rows(batch, ranks.device)
            logprobs, _ = policy_logprobs(model, batch, rows)
        inputs = make_loss_inputs(batch, rows, logprobs, settings)
        counts = (inputs.response_sum(torch.ones_like(inputs.weights)) > 0).to(sums.dtype)
        sums.index_add_(1, inputs.groups, torch.stack([imbalance(inputs, settings) * counts, counts]))
    ranks.reduce_tensor(sums)
    return -sums[0] / sums[1].clamp(min=1)
