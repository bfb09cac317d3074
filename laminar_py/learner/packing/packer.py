"""Packs finished trajectories into microbatches of variable lengths. Pure.

The controller decides from token counts which trajectories share a microbatch (`balance.fit_bins`), and which rank
trains on it (`deal_to_ranks`). The rank reads their tokens and writes the arrays (`microbatches`). No microbatch
exceeds `max_tokens`, all ranks get equally many, and each trained token is in exactly one. The loss weights of all
microbatches sum to 1, or less where staleness reweights or groups without signal are left out (law 5;
`tests/packing/test_packer.py::test_every_trained_token_stands_in_one_microbatch_of_bounded_size`).

A trajectory is one sequence, or several if its response is a tree (`records.spans`); sequences share the prefixes
that they have in common (`layout`). A row predicts the next token of its sequence. One row predicts each response
token, in the sequence that trains on the token; the first token of a sequence has no such row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.config.algorithm import Aggregation
from laminar_py.learner.packing.balance import Bin, deal_bins, fit_bins
from laminar_py.learner.packing.layout import Layout, PackedT, lay_out
from laminar_py.records.codec import FloatArray, IntArray
from laminar_py.records.columns import ACTORS, PLACES, Array, Column, Source
from laminar_py.records.credit import earlier_rewards, returns_of, role_advantages, role_numbers, role_returns
from laminar_py.records.pieces import SamplingMask
from laminar_py.records.proofs import id_sum
from laminar_py.records.spans import versions_of
from laminar_py.records.trajectory import MicroBatch, Trajectory

STD_FLOOR = 1e-4  # added to the deviation of advantages, which are of the order of 1

# The trajectories of one microbatch. An empty bundle makes a microbatch without trained tokens.
Bundle: TypeAlias = list[Trajectory]


class StepWeights(msgspec.Struct, frozen=True, kw_only=True):
    """How the tokens of a step are weighted and their advantages normalised, e.g. of 256 trajectories:

    `StepWeights(aggregation=Aggregation.TOKEN_MEAN, num_trajectories=256, num_trained=81_920, ages={6: 1, 7: 0})`.

    A token of trajectory i has the loss weight `w_i / (n_i * N)` by `sequence_mean`, `w_i / sum_j n_j` by
    `token_mean`, and `w_i / (constant * N)` by `constant`. Here w_i is the trajectory's staleness weight, n_i the
    number of its trained tokens, and N the number of trajectories in the step.
    """

    aggregation: Aggregation
    num_trajectories: int  # including trajectories without signal
    num_trained: int  # trained tokens of these trajectories
    ages: dict[int, int] | None = None  # version -> staleness, see `records.ages`; None: 0 for all tokens
    constant: int = 1  # tokens by which the aggregation `constant` divides each response
    advantage_mean: float = 0.0  # subtracted from all advantages
    advantage_scale: float = 1.0  # then multiplies them
    groups: tuple[str, ...] = ()  # ids of the groups in the step
    columns: tuple[Column, ...] = ()  # columns that the loss needs

    def token_weights(self, trajectory: Trajectory) -> FloatArray:
        """[L] loss weight of each response token, 0 where its loss mask is False."""
        return trajectory.loss_mask * np.float32(trajectory.weight / self._denominator(trajectory))

    def _denominator(self, trajectory: Trajectory) -> int:
        """Number by which the loss weight of each of a trajectory's tokens is divided."""
        if self.aggregation is Aggregation.TOKEN_MEAN:
            return max(1, self.num_trained)
        if self.aggregation is Aggregation.CONSTANT:
            return self.constant * self.num_trajectories
        return max(1, trajectory.num_trained) * self.num_trajectories

    def advantages(self, trajectory: Trajectory) -> float | FloatArray:
        """[L] normalised advantage of each response token, or one number if all tokens have the same."""
        if trajectory.roles:
            by_token = role_advantages(trajectory.roles, trajectory.spans) - np.float32(self.advantage_mean)
            return by_token * np.float32(self.advantage_scale)
        advantage = (trajectory.advantage - self.advantage_mean) * self.advantage_scale
        earlier = earlier_rewards(trajectory.columns)
        if earlier is None:
            return advantage
        scale = trajectory.advantage_scale * self.advantage_scale
        return (advantage - scale * earlier).astype(np.float32)

    def group_places(self, bundle: Bundle) -> IntArray:
        """[R] index of each trajectory's group in `groups`; `[0]` for an empty bundle."""
        place = {group: index for index, group in enumerate(self.groups)}
        return np.array([place[trajectory.group_id] for trajectory in bundle] or [0], np.int32)

    def staleness(self, trajectory: Trajectory) -> IntArray:
        """[L] age of each token's weights in learner steps, or of its KV cache's weights if these are older."""
        out = np.zeros(len(trajectory.response_ids), np.int32)
        if self.ages is not None:
            for span in trajectory.spans:
                ages = [self.ages[version] for version in versions_of([span])]
                out[span.start : span.end] = max(ages, default=0)
        return out


@dataclass(frozen=True, slots=True)
class Packed(Generic[PackedT]):
    """A packed step: equally many bundles for each rank, and the weights of their tokens."""

    bundles: list[list[list[PackedT]]]  # [ranks][n] trajectories that share a microbatch
    weights: StepWeights

    def microbatches(self: "Packed[Trajectory]", rank: int) -> list[MicroBatch]:
        """Write a rank's microbatches; the trajectories must hold their tokens."""
        return microbatches(self.bundles[rank], self.weights)


def microbatches(bundles: Sequence[Bundle], weights: StepWeights) -> list[MicroBatch]:
    """Write a microbatch for each of a rank's bundles."""
    return [microbatch(bundle, weights) for bundle in bundles]


def pack(
    trajectories: Sequence[PackedT],
    *,
    max_tokens: int,
    ranks: int,
    aggregation: Aggregation,
    attention_share: float,
) -> Packed[PackedT]:
    """Pack ready trajectories into a step. Raises ValueError for a trajectory of more than `max_tokens`."""
    bins = fit_bins(trajectories, max_tokens=max_tokens)
    weights = step_weights(bins, aggregation=aggregation)
    return deal_to_ranks(bins, weights, max_tokens=max_tokens, ranks=ranks, attention_share=attention_share)


def step_weights(
    bins: Sequence[Bin[PackedT]],
    *,
    tokens_without_signal: Sequence[int] = (),
    aggregation: Aggregation,
    ages: dict[int, int] | None = None,
    constant: int = 1,
    normalises: bool = False,
    columns: Sequence[Column] = (),
) -> StepWeights:
    """Compute the weights of a step with these bins; `normalises` gives advantages mean 0 and deviation 1.

    `tokens_without_signal` has the number of trained tokens of each response that was dropped, since its group has
    no signal. Such responses would have advantage 0, and they stay in every denominator. Else the weight of a
    group would depend on which other groups finish at the same time.
    """
    trajectories = [one for item in bins for one in item.trajectories if one.is_first_part]
    mean, scale = _normalisation(trajectories) if normalises else (0.0, 1.0)
    return StepWeights(
        aggregation=aggregation,
        num_trajectories=len(trajectories) + len(tokens_without_signal),
        num_trained=sum([trajectory.num_trained for trajectory in trajectories]) + sum(tokens_without_signal),
        ages=ages,
        constant=constant,
        advantage_mean=mean,
        advantage_scale=scale,
        groups=tuple(sorted({trajectory.group_id for trajectory in trajectories})),
        columns=tuple(columns),
    )


def _normalisation(trajectories: Sequence[PackedT]) -> tuple[float, float]:
    """Mean of the step's advantages, and 1 over their deviation; each trained token counts once.

    The second number is 0 if the deviation is only rounding. REINFORCE++, Hu et al. 2025, eq. 10.
    """
    trained = [trajectory for trajectory in trajectories if trajectory.num_trained]
    if not trained:
        return 0.0, 1.0
    advantages = [
        role_returns(item.roles, item.spans) if item.roles else returns_of(item.advantage, item.earned)
        for item in trained
    ]  # of each trajectory's trained tokens
    counts = np.array([trajectory.num_trained for trajectory in trained], np.float64)
    means = np.array([item.mean for item in advantages])
    mean = float(np.average(means, weights=counts))
    variance = np.average(np.array([item.variance for item in advantages]) + (means - mean) ** 2, weights=counts)
    deviation, noise = float(np.sqrt(variance)), max(item.noise for item in advantages)
    return mean, 1.0 / (deviation + STD_FLOOR) if deviation >= noise else 0.0


def deal_to_ranks(
    bins: Sequence[Bin[PackedT]],
    weights: StepWeights,
    *,
    max_tokens: int,
    ranks: int,
    attention_share: float,
) -> Packed[PackedT]:
    """Deal bins to ranks, balanced by FLOPs; each rank gets equally many bundles, and at least one.

    Some bundles are empty if there are too few bins, since every rank takes part in every collective.
    """
    indices = deal_bins(bins, ranks=ranks, capacity=max_tokens, attention_share=attention_share)
    bundles = [[list(index[rank].trajectories) for index in indices] for rank in range(ranks)]
    return Packed([mine or [[]] for mine in bundles], weights)


def microbatch(bundle: Bundle, weights: StepWeights) -> MicroBatch:
    """Write the arrays of the trajectories that share a microbatch; an empty bundle makes one without loss."""
    layout = lay_out(bundle)
    total = len(layout.ids)
    loss_weights, logprobs, advantages = (np.zeros(total, np.float32) for _ in range(3))
    staleness, counts = np.zeros(total, np.int32), np.zeros(total, np.int32)
    for trajectory, placed in zip(bundle, layout.placed, strict=True):
        rows, places = placed.rows, placed.places
        loss_weights[rows] = weights.token_weights(trajectory)[places]
        logprobs[rows] = trajectory.logprobs[places]
        advantage = weights.advantages(trajectory)
        advantages[rows] = advantage if isinstance(advantage, float) else advantage[places]
        staleness[rows] = weights.staleness(trajectory)[places]
        if trajectory.sampling_mask is not None:
            counts[rows] = trajectory.sampling_mask.counts[places]
    return MicroBatch(
        input_ids=layout.ids,
        cu_seqlens=np.cumsum([0, *layout.lengths], dtype=np.int32),
        position_ids=layout.positions,
        labels=layout.labels,
        loss_weights=loss_weights,
        behaviour_logprobs=logprobs,
        advantages=advantages,
        staleness=staleness,
        responses=layout.responses,
        rewards=np.array([item.reward or 0.0 for item in bundle] or [0.0], np.float32),
        groups=weights.group_places(bundle),
        columns={column.name: _column(bundle, layout, column) for column in weights.columns},
        support=_support(bundle, layout, counts),
        experts=layout.experts,
        id_sum=id_sum(trajectory.id for trajectory in bundle if trajectory.is_first_part),
        parents=layout.parents if (layout.parents >= 0).any() else None,
    )


def _support(bundle: Bundle, layout: Layout, counts: IntArray) -> SamplingMask | None:
    """Join the sampling masks of all responses; row t has `counts[t]` ids. None if no response has a mask."""
    if all(trajectory.sampling_mask is None for trajectory in bundle):
        return None
    ids, starts = np.zeros(int(counts.sum()), np.int32), np.cumsum(counts) - counts
    for trajectory, placed in zip(bundle, layout.placed, strict=True):
        mask = trajectory.sampling_mask
        if mask is not None:
            lengths = mask.counts[placed.places]
            drawn = (np.cumsum(mask.counts) - mask.counts)[placed.places]
            ids[_ranges(starts[placed.rows], lengths)] = mask.ids[_ranges(drawn, lengths)]
    return SamplingMask(counts, ids)


def _column(bundle: Bundle, layout: Layout, column: Column) -> Array:
    """[T] values of a column: each response token's value at the row that predicts it, elsewhere the padding."""
    out = np.full(len(layout.ids), column.padding, column.dtype.value)
    for trajectory, placed in zip(bundle, layout.placed, strict=True):
        out[placed.rows] = _values(trajectory, column)[placed.places]
    return out


def _values(trajectory: Trajectory, column: Column) -> Array:
    """[L] values of a column: of the trajectory's record, or the packer's own."""
    if column.source is Source.PACKER:
        if column.name == ACTORS:
            return role_numbers(trajectory.roles, trajectory.spans)
        assert column.name == PLACES, f"the packer has no column {column.name}"
        return np.arange(len(trajectory.response_ids), dtype=np.int32)
    values = trajectory.columns.get(column.name)
    assert values is not None, f"{trajectory.id} has no column {column.name}"
    assert values.dtype is column.dtype, f"{trajectory.id}: column {column.name} is {values.dtype}"
    return values.array


def _ranges(starts: IntArray, lengths: IntArray) -> npt.NDArray[np.int64]:
    """Join the ranges [start, start + length)."""
    before = np.cumsum(lengths, dtype=np.int64) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
