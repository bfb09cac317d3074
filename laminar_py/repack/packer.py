"""Finished trajectories to varlen microbatches. Pure; called by the controller for each learner step.

Invariants: no microbatch exceeds `max_tokens`; all ranks get equally many; every trained token stands in
exactly one; loss weights of all microbatches together sum to 1 (less where staleness reweights).
"""

from collections.abc import Sequence

import numpy as np

from laminar_py.codec import FloatArray
from laminar_py.config import Aggregation
from laminar_py.repack.balance import best_fit, sequence_cost, spread
from laminar_py.types import MicroBatch, Trajectory


def pack(
    trajectories: Sequence[Trajectory],
    *,
    max_tokens: int,
    ranks: int,
    aggregation: Aggregation,
    attention_share: float,
) -> list[list[MicroBatch]]:
    """[ranks][n] microbatches with equal n, balanced over ranks by FLOPs.

    A rank with less work gets empty microbatches (one token of weight 0), since every rank must take part in
    every collective.
    """
    weights = loss_weights(trajectories, aggregation)
    costs = [sequence_cost(t.num_tokens, attention_share=attention_share) for t in trajectories]
    out = []
    for members in spread(costs, ranks):
        bins = best_fit([trajectories[i].num_tokens for i in members], max_tokens)
        out.append([_microbatch([(trajectories[members[i]], weights[members[i]]) for i in b]) for b in bins])
    most = max(1, *(len(batches) for batches in out))
    return [batches + [empty_microbatch()] * (most - len(batches)) for batches in out]


def loss_weights(trajectories: Sequence[Trajectory], aggregation: Aggregation) -> list[FloatArray]:
    """[L] weight of each response token, for each trajectory.

    `sequence_mean`: `w_i / (n_i * N)` with n_i trained tokens and N trajectories; `token_mean`:
    `w_i / sum_j n_j`. w_i is the trajectory's staleness weight.
    """
    trained = [int(t.loss_mask.sum()) for t in trajectories]
    total = max(1, sum(trained))
    weights: list[FloatArray] = []
    for trajectory, count in zip(trajectories, trained, strict=True):
        denominator = total if aggregation is Aggregation.TOKEN_MEAN else max(1, count) * len(trajectories)
        weights.append((trajectory.loss_mask * (trajectory.weight / denominator)).astype(np.float32))
    return weights


def empty_microbatch() -> MicroBatch:
    """One token that teaches nothing."""
    zero = np.zeros(1, np.int32)
    nothing = np.zeros(1, np.float32)
    return MicroBatch(zero, np.array([0, 1], np.int32), zero, zero, nothing, nothing, nothing)


def _microbatch(sequences: list[tuple[Trajectory, FloatArray]]) -> MicroBatch:
    lengths = [trajectory.num_tokens for trajectory, _ in sequences]
    cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total = int(cu_seqlens[-1])
    ids, labels = np.zeros(total, np.int32), np.zeros(total, np.int32)
    positions = np.zeros(total, np.int32)
    weights, logprobs, advantages = (np.zeros(total, np.float32) for _ in range(3))
    for (trajectory, weight), start, length in zip(sequences, cu_seqlens, lengths, strict=False):
        end, first = start + length, start + len(trajectory.prompt_ids)
        ids[start:first] = trajectory.prompt_ids
        ids[first:end] = trajectory.response_ids
        positions[start:end] = np.arange(length)
        labels[start : end - 1] = ids[start + 1 : end]
        predicting = slice(first - 1, end - 1)  # where the response tokens are predicted
        weights[predicting] = weight
        logprobs[predicting] = trajectory.logprobs
        advantages[predicting] = trajectory.advantage
    return MicroBatch(ids, cu_seqlens, positions, labels, weights, logprobs, advantages)
