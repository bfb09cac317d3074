"""What a sequence costs the learner, and how sequences are spread evenly. Pure; called by the packer."""

import heapq
from collections.abc import Sequence


def sequence_cost(length: int, *, attention_share: float) -> float:
    """FLOPs of one sequence in units of one token's linear layers: `L + attention_share * L^2`."""
    return length + attention_share * length * length


def attention_share(*, hidden_size: int, num_layers: int, num_parameters: int) -> float:
    """Ratio b / a of `a T + b sum L^2`: causal attention (2 * layers * hidden) to linear layers (2 * N)."""
    return num_layers * hidden_size / num_parameters


def spread(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Indices in `bins` lists of nearly equal total cost: longest first, each to the lightest bin."""
    heap = [(0.0, index) for index in range(bins)]
    out: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, index = heapq.heappop(heap)
        out[index].append(item)
        heapq.heappush(heap, (load + costs[item], index))
    return out


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices in bins of at most `capacity` tokens: longest first, each to the fullest bin that has room.

    Raises ValueError for a sequence that is longer than `capacity`.
    """
    bins: list[list[int]] = []
    room: list[int] = []
    for item in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[item]
        if length > capacity:
            raise ValueError(f"sequence of {length} tokens exceeds packer.max_tokens={capacity}; raise it")
        fitting = [index for index, free in enumerate(room) if free >= length]
        if not fitting:
            bins.append([item])
            room.append(capacity - length)
            continue
        index = min(fitting, key=room.__getitem__)
        bins[index].append(item)
        room[index] -= length
    return bins
