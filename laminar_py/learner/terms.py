"""Terms of the loss, out of a microbatch and the policy's log-probabilities. Called by `step`.

Invariant: the terms of a token depend on its microbatch's arrays and the policy alone, and tokens that are not
trained have none.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from laminar_py.config.algorithm import AlgorithmConfig, Divergence, Objective
from laminar_py.learner.losses.loss import distilled, proximal_logprobs, regularised
from laminar_py.learner.losses.objectives import Terms, imbalance
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.ranks import Ranks
from laminar_py.records.batch import MicroBatch
from laminar_py.records.columns import REFERENCE_LOGPROBS, TEACHER_LOGPROBS, Array


def trained_rows(batch: MicroBatch, device: torch.device) -> Tensor:
    """[N] positions that predict the trained tokens, in ascending order."""
    return torch.tensor(np.flatnonzero(batch.loss_weights), device=device)


def make_terms(
    batch: MicroBatch,
    rows: Tensor,
    logprobs: Tensor,
    settings: AlgorithmConfig,
    *,
    recomputed: Tensor | None = None,
    log_partition: Tensor | None = None,
) -> Terms:
    """Terms at `rows` [N], where the policy has `logprobs` [N] and had `recomputed` [N] at the start of the step.

    `log_partition` [G] is the estimate for each group of the step. AssertionError if the microbatch has not all
    columns of the algorithm.
    """

    def at_rows(values: Array) -> Tensor:
        return torch.tensor(values, device=rows.device)[rows]

    behaviour, advantages, staleness = map(at_rows, (batch.behaviour_logprobs, batch.advantages, batch.staleness))
    missing = {column.name for column in settings.columns} - batch.columns.keys()
    assert not missing, f"algorithm {settings.name} has no {', '.join(sorted(missing))} in a microbatch"
    columns = {name: at_rows(values) for name, values in batch.columns.items()}
    if settings.teacher_coef > 0:
        advantages = distilled(advantages, logprobs, columns[TEACHER_LOGPROBS], coef=settings.teacher_coef)
    if settings.kl_coef > 0 and settings.kl_estimator is Divergence.K1:
        advantages = regularised(advantages, logprobs, columns[REFERENCE_LOGPROBS], coef=settings.kl_coef)
    proximal = proximal_logprobs(
        settings.proximal, logprobs, behaviour=behaviour, staleness=staleness, recomputed=recomputed
    )
    ends = torch.tensor(batch.cu_seqlens[1:], device=rows.device)
    responses = torch.tensor(batch.responses, dtype=torch.int64, device=rows.device)
    groups = torch.tensor(batch.groups, device=rows.device)
    return Terms(
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
    """log Z of each group of the step, by the policy at its start, [G], if the objective asks for it. Collective.

    Minus the mean of the imbalances of the group's responses: VarGrad, see `losses.objectives.balance`.
    """
    if settings.objective is not Objective.BALANCE:
        return None
    num_groups = 1 + max(int(batch.groups.max()) for batch in microbatches)
    sums = torch.zeros(2, int(ranks.largest(num_groups)), device=ranks.device)
    for batch in microbatches:
        with torch.no_grad():
            rows = trained_rows(batch, ranks.device)
            logprobs, _ = policy_logprobs(model, batch, rows)
        terms = make_terms(batch, rows, logprobs, settings)
        counts = (terms.response_sum(torch.ones_like(terms.weights)) > 0).to(sums.dtype)
        sums.index_add_(1, terms.groups, torch.stack([imbalance(terms, settings) * counts, counts]))
    ranks.reduce(sums)
    return -sums[0] / sums[1].clamp(min=1)
