"""Cost of a sequence to the learner; how sequences are put into bins, and bins dealt to ranks. Pure.

`packer` and `buffer` call it. Ranks meet in collectives at every microbatch index, so a step takes the sum over
indices of the slowest rank. So bins are filled first, whatever their rank, and bins of similar cost share an
index.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from laminar_py.records.trajectory import Packable

PackedT = TypeVar("PackedT", bound=Packable)


def sequence_cost(length: int, *, attention_share: float) -> float:
    """FLOPs of one sequence, in units of one token's linear layers: `L + attention_share * L^2`."""
    return length + attention_share * length * length


def attention_share(*, hidden_size: int, num_layers: int, num_parameters: int) -> float:
    """Ratio of a token pair's causal attention (2 * layers * hidden) to a token's linear layers (2 * N)."""
    return num_layers * hidden_size / num_parameters


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
    """Pack trajectories into few bins of `max_tokens`. Raises ValueError for a longer sequence."""
    packed = best_fit([trajectory.num_tokens for trajectory in trajectories], max_tokens)
    return [make_bin([trajectories[i] for i in members]) for members in packed]


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack indices into bins of at most `capacity` tokens: longest first, each into the fullest bin with room.

    O(n log n) comparisons. Raises ValueError for a sequence that is longer than `capacity`.
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
    """Deal bins to [n][ranks], so that the bins of one index have similar costs.

    The cheapest index gets the remainder, which `ranks` may not divide: its sequences are packed again in as many
    bins as there are ranks, so that all ranks share the slack.
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
    """Put indices into `bins` lists of similar cost: longest first, into the cheapest; None if one overflows."""
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
