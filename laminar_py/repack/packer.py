"""Finished trajectories to varlen microbatches. Pure.

The controller decides which trajectories share a microbatch (`assign`); the arrays are written by the rank that
trains on them, one microbatch at a time (`MicroBatches`), since on the way they would be three times the bytes.
Invariants: no microbatch exceeds `max_tokens`; all ranks get equally many; every trained token stands in exactly
one; loss weights of all microbatches together sum to 1 (less where staleness reweights).
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias, overload

import msgspec
import numpy as np

from laminar_py.codec import FloatArray
from laminar_py.config import Aggregation
from laminar_py.repack.balance import Bin, deal, fit, make_entry
from laminar_py.types import MicroBatch, Trajectory

Bundle: TypeAlias = list[Trajectory]  # of one microbatch; without any it is a microbatch that teaches nothing


class TokenWeights(msgspec.Struct, frozen=True):
    """What each trained token of a step counts, e.g. `TokenWeights(Aggregation.TOKEN_MEAN, 256, 81_920)`.

    `sequence_mean`: `w_i / (n_i * N)` with n_i trained tokens and N trajectories; `token_mean`:
    `w_i / sum_j n_j`. w_i is the trajectory's staleness weight.
    """

    aggregation: Aggregation
    num_trajectories: int
    num_trained: int  # tokens of all of them

    def of(self, trajectory: Trajectory) -> FloatArray:
        """[L] loss weight of each response token, 0 where its loss mask is False."""
        denominator = max(1, self.num_trained)
        if self.aggregation is Aggregation.SEQUENCE_MEAN:
            denominator = max(1, int(np.count_nonzero(trajectory.loss_mask))) * self.num_trajectories
        return trajectory.loss_mask * np.float32(trajectory.weight / denominator)


class Packed(msgspec.Struct, frozen=True):
    """A step: for each rank its bundles, equally many, and what their tokens count."""

    bundles: list[list[Bundle]]  # [ranks][n]
    weights: TokenWeights

    def microbatches(self, rank: int) -> "MicroBatches":
        """Those of a rank."""
        return MicroBatches(self.bundles[rank], self.weights)


class MicroBatches(Sequence[MicroBatch]):
    """The microbatches of a rank; each is written when it is asked for and kept by nobody."""

    def __init__(self, bundles: Sequence[Bundle], weights: TokenWeights) -> None:
        self._bundles = bundles
        self._weights = weights

    def __len__(self) -> int:
        return len(self._bundles)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> "MicroBatches": ...
    def __getitem__(self, index: int | slice) -> "MicroBatch | MicroBatches":
        if isinstance(index, slice):
            return MicroBatches(self._bundles[index], self._weights)
        return microbatch(self._bundles[index], self._weights)


def pack(
    trajectories: Sequence[Trajectory],
    *,
    max_tokens: int,
    ranks: int,
    aggregation: Aggregation,
    attention_share: float,
) -> Packed:
    """A step of trajectories that are all there. Raises ValueError for one above `max_tokens`."""
    return assign(
        fit([make_entry(trajectory) for trajectory in trajectories], max_tokens=max_tokens),
        max_tokens=max_tokens,
        ranks=ranks,
        aggregation=aggregation,
        attention_share=attention_share,
    )


def assign(
    bins: Sequence[Bin],
    *,
    max_tokens: int,
    ranks: int,
    aggregation: Aggregation,
    attention_share: float,
    reweighted: Mapping[str, Trajectory] | None = None,
) -> Packed:
    """Bins to ranks, the most costly first, balanced by FLOPs; at least one bundle each.

    `reweighted` trajectories stand in for those of the same id. Where there is too little for all ranks some
    bundles are empty, since every rank takes part in every collective.
    """
    indices = deal(bins, ranks=ranks, capacity=max_tokens, attention_share=attention_share)
    bundles = [[[entry.trajectory for entry in index[rank].entries] for index in indices] for rank in range(ranks)]
    if reweighted:
        bundles = [[[reweighted.get(t.id, t) for t in bundle] for bundle in mine] for mine in bundles]
    weights = TokenWeights(
        aggregation,
        sum([len(item.entries) for item in bins]),
        sum([item.num_trained for item in bins]),
    )
    return Packed([mine or [[]] for mine in bundles], weights)


def microbatch(bundle: Bundle, weights: TokenWeights) -> MicroBatch:
    """Its arrays."""
    if not bundle:
        return _nothing()
    lengths = [trajectory.num_tokens for trajectory in bundle]
    cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
    total = int(cu_seqlens[-1])
    ids, labels = np.empty(total, np.int32), np.zeros(total, np.int32)
    positions = np.empty(total, np.int32)
    loss_weights, logprobs, advantages = (np.zeros(total, np.float32) for _ in range(3))
    for trajectory, start, length in zip(bundle, cu_seqlens.tolist(), lengths, strict=False):
        end, first = start + length, start + len(trajectory.prompt_ids)
        ids[start:first] = trajectory.prompt_ids
        ids[first:end] = trajectory.response_ids
        positions[start:end] = np.arange(length)
        labels[start : end - 1] = ids[start + 1 : end]
        predicting = slice(first - 1, end - 1)  # where the response tokens are predicted
        loss_weights[predicting] = weights.of(trajectory)
        logprobs[predicting] = trajectory.logprobs
        advantages[predicting] = trajectory.advantage
    return MicroBatch(ids, cu_seqlens, positions, labels, loss_weights, logprobs, advantages)


def _nothing() -> MicroBatch:
    """One token that teaches nothing."""
    zero = np.zeros(1, np.int32)
    nothing = np.zeros(1, np.float32)
    return MicroBatch(zero, np.array([0, 1], np.int32), zero, zero, nothing, nothing, nothing)
