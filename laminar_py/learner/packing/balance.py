"""Cost of a sequence to the learner; how sequences are put into bins, and bins dealt to ranks. Pure.

`packer` calls it. Ranks meet in collectives at every microbatch index, so a step takes the sum over indices of the
slowest rank's time. Therefore bins are filled first, for any rank, and bins of similar cost share an index.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from laminar_py.records.trajectory import Packable

PackedT = TypeVar("PackedT", bound=Packable)


def sequence_cost(length: int, *, attention_share: float) -> float:
    """FLOPs of one sequence with L = `length`, over one token's linear layers: `L + attention_share * L^2`."""
    return length + attention_share * length * length


def attention_share(*, hidden_size: int, num_layers: int, num_parameters: int, frozen: bool = False) -> float:
    """FLOPs of causal attention per pair of tokens (6 * layers * hidden), over a token's linear layers (6 * N).

    The backward pass is counted. Weights that are `frozen` beneath adapters have no gradient: 4 * N.
    """
    return 6 * num_layers * hidden_size / ((4 if frozen else 6) * num_parameters)


@dataclass(frozen=True, slots=True, eq=False)
class Bin(Generic[PackedT]):
    """Trajectories that share a microbatch, e.g. `Bin(trajectories, 5, 4, 13)` of 3 and 2 tokens."""

    trajectories: tuple[PackedT, ...]
    num_tokens: int
    num_trained: int  # response tokens with a loss
    squares: int  # sum of squared lengths

    def cost(self, attention_share: float) -> float:
        """Sum of `sequence_cost` over its sequences."""
        return self.num_tokens + attention_share * self.squares


def make_bin(trajectories: Iterable[PackedT]) -> Bin[PackedT]:
    """Put these trajectories into one bin."""
    members = tuple(trajectories)
    lengths = [trajectory.num_tokens for trajectory in members]
    trained = sum([trajectory.num_trained for trajectory in members])
    return Bin(members, sum(lengths), trained, sum([length * length for length in lengths]))


def fit_bins(trajectories: Sequence[PackedT], *, max_tokens: int) -> list[Bin[PackedT]]:
    """Pack trajectories into few bins of at most `max_tokens`. Raises ValueError for a longer trajectory."""
    packed = best_fit([trajectory.num_tokens for trajectory in trajectories], max_tokens)
    return [make_bin([trajectories[i] for i in members]) for members in packed]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack sequences into bins of at most `capacity` tokens; returns the indices in `lengths` of each bin.

    Places the longest first, each into the fullest bin with room, in O(n log n) comparisons. Raises ValueError for
    a sequence that is longer than `capacity`.
    """
    if max(lengths, default=0) > capacity:
        raise ValueError(f"sequence of {max(lengths)} tokens exceeds packer.max_tokens={capacity}; raise it")
    bins: list[list[int]] = []
    stride = len(lengths) + 1
    rooms: list[int] = []  # ascending; room * stride + bin, one integer so that comparisons are cheap
    for item in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        taken = lengths[item] * stride
        place = bisect_left(rooms, taken)
        if place == len(rooms):
            insort(rooms, capacity * stride + len(bins) - taken)
            bins.append([item])
        else:
            room = rooms.pop(place)
            insort(rooms, room - taken)
            bins[room % stride].append(item)
    return bins


def deal_bins(
    bins: Sequence[Bin[PackedT]], *, ranks: int, capacity: int, attention_share: float
) -> list[list[Bin[PackedT]]]:
    """Deal bins to ranks: returns [n][ranks] bins, where the bins of one index have similar costs.

    The last index gets the cheapest bins, maybe fewer than `ranks`. Their trajectories are packed again into one
    bin for each rank, so that all ranks share the slack; if they do not fit, empty bins fill the index.
    """
    if not bins:
        return []
    ordered = sorted(bins, key=lambda item: item.cost(attention_share), reverse=True)
    whole = (len(ordered) - 1) // ranks * ranks
    rest = [trajectory for item in ordered[whole:] for trajectory in item.trajectories]
    lengths = [trajectory.num_tokens for trajectory in rest]
    levelled = level_costs(lengths, ranks, capacity=capacity, attention_share=attention_share)
    if levelled is None:
        last = ordered[whole:] + [make_bin(())] * (whole + ranks - len(ordered))
    else:
        last = [make_bin(rest[i] for i in members) for members in levelled]
    return [*(ordered[start : start + ranks] for start in range(0, whole, ranks)), last]


def level_costs(
    lengths: Sequence[int], bins: int, *, capacity: int, attention_share: float
) -> list[list[int]] | None:
    """Divide sequences among `bins` lists of similar cost; returns the indices in `lengths` of each list.

    Places the longest first, each into the cheapest list. Returns None if a list exceeds `capacity` tokens.
    """
    heap = [(0.0, index) for index in range(bins)]
    out: list[list[int]] = [[] for _ in range(bins)]
    rooms = [capacity] * bins
    for item in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        cost, index = heap[0]
        rooms[index] -= lengths[item]
        if rooms[index] < 0:
            return None
        out[index].append(item)
        heapq.heapreplace(heap, (cost + sequence_cost(lengths[item], attention_share=attention_share), index))
    return out
