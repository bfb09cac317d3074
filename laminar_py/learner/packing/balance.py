"""Cost of a sequence to the learner; how sequences are put into bins, and bins dealt to ranks. Pure.

`packer` calls it. Ranks meet in collectives at every microbatch index, so a step takes the sum over indices of the
slowest rank's time. Therefore bins are filled first, for any rank, and bins of similar cost share an index.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from laminar_py.learner.packing.layout import LEAST_STEM, PackedT, RowSize, cut_tree, row_size

AnyT = TypeVar("AnyT")  # a trajectory, or the place of one

WORTH_SHARING = 0.05  # of a group's tokens that its prompt must save, or its members are packed one by one
MOST_KEYS = 4  # that attention gathers for a family's row, a prompt's for each member, over the row's tokens
FEWEST_PARTS = 2  # families for each rank that share the last microbatches, so that these are alike


def sequence_cost(length: int, *, attention_share: float) -> float:
    """FLOPs of one sequence with L = `length`, over one token's linear layers: `L + attention_share * L^2`."""
    return length + attention_share * length * length


def attention_share(*, hidden_size: int, num_layers: int, num_parameters: int, frozen: bool = False) -> float:
    """FLOPs of causal attention per pair of tokens (6 * layers * hidden), over a token's linear layers (6 * N).

    The backward pass is counted. Weights that are `frozen` beneath adapters have no gradient: 4 * N.
    """
    return 6 * num_layers * hidden_size / ((4 if frozen else 6) * num_parameters)


@dataclass(frozen=True, slots=True, eq=False)
class Family(Generic[AnyT]):
    """Trajectories that stay together, since they share `stem` tokens of their prompt; or one trajectory."""

    members: tuple[AnyT, ...]
    sizes: tuple[RowSize, ...]  # of each member alone
    stem: int = 0

    @property
    def size(self) -> RowSize:
        """Size of the members in one row."""
        spared = len(self.members) - 1
        tokens = sum([size.tokens for size in self.sizes]) - spared * self.stem
        return RowSize(tokens, sum([size.squares for size in self.sizes]) - spared * self.stem * self.stem)

    def take(self, places: Sequence[int]) -> "Family[AnyT]":
        """Return the family of some of the members."""
        members = tuple(self.members[place] for place in places)
        return Family(members, tuple(self.sizes[place] for place in places), self.stem)


@dataclass(frozen=True, slots=True, eq=False)
class Bin(Generic[PackedT]):
    """Families that share a microbatch, e.g. `Bin((family,), 5, 13)` of two trajectories of 3 and 2 tokens."""

    families: tuple[Family[PackedT], ...]
    num_tokens: int
    squares: float  # sum of squared lengths, what sequences share counted once

    @property
    def trajectories(self) -> list[PackedT]:
        """The trajectories of all families."""
        return [member for family in self.families for member in family.members]

    def cost(self, attention_share: float) -> float:
        """Sum of `sequence_cost` over its sequences, with shared tokens once."""
        return self.num_tokens + attention_share * self.squares


def make_bin(families: Iterable[Family[PackedT]]) -> Bin[PackedT]:
    """Put these families into one bin."""
    members = tuple(families)
    return Bin(members, *_sum([family.size for family in members]))


def find_families(trajectories: Sequence[PackedT], *, shares: bool = True) -> list[Family[PackedT]]:
    """Return trajectories by shared prompt, in order; alone where that saves little, or none `shares` a prompt."""
    sizes = [row_size(one) for one in trajectories]
    kin: dict[object, list[int]] = {}
    for place, one in enumerate(trajectories):
        has_stem = len(one.prompt_ids) > LEAST_STEM and any(path.has_prompt for path in one.token_paths)
        key = (one.group_id, one.prompt_ids.tobytes()) if shares and has_stem else place
        kin.setdefault(key, []).append(place)
    found: list[Family[PackedT]] = []
    for places in kin.values():
        members, of_members = [trajectories[place] for place in places], [sizes[place] for place in places]
        found += _families(members, of_members, len(members[0].prompt_ids) - 1)
    return found


def _families(members: Sequence[AnyT], sizes: Sequence[RowSize], stem: int) -> list[Family[AnyT]]:
    """Make one family of members that may share `stem` tokens, or one of each if that saves little."""
    if len(members) > 1 and (len(members) - 1) * stem >= WORTH_SHARING * sum([size.tokens for size in sizes]):
        return [Family(tuple(members), tuple(sizes), stem)]
    return [Family((member,), (size,)) for member, size in zip(members, sizes, strict=True)]


def bundle_size(trajectories: Sequence[PackedT], *, shares: bool = True) -> RowSize:
    """Return the size of a row with these trajectories, which may share prompts (`shares`)."""
    return _sum([family.size for family in find_families(trajectories, shares=shares)])


def group_size(lengths: Sequence[int], *, prompt: int, max_tokens: int, shares: bool = True) -> RowSize:
    """Return the size, over all rows, of one prompt's samples with responses of these lengths, as they are packed.

    E.g. two responses of 40 tokens behind 100 tokens: `RowSize(181, 29_399)`. Raises ValueError for a response
    that exceeds `max_tokens` with its prompt.
    """
    sizes = [RowSize(prompt + length, (prompt + length) ** 2) for length in lengths]
    stem = prompt - 1 if shares and prompt > LEAST_STEM else 0
    families = _families(range(len(sizes)), sizes, stem)
    return _sum([part.size for family in families for part in _parts(family, max_tokens)])


def _sum(sizes: Sequence[RowSize]) -> RowSize:
    return RowSize(sum([size.tokens for size in sizes]), sum([size.squares for size in sizes]))


def fit_bins(trajectories: Sequence[PackedT], *, max_tokens: int, shares: bool = True) -> list[Bin[PackedT]]:
    """Pack trajectories into few bins of at most `max_tokens`. Raises ValueError for a longer sequence.

    Trajectories whose prompts are equal stay together if that saves tokens, unless nothing `shares` a prompt.
    Larger trees are cut.
    """
    pieces = [part for one in trajectories for part in cut_tree(one, max_tokens)]
    parts = [part for family in find_families(pieces, shares=shares) for part in _parts(family, max_tokens)]
    packed = best_fit([part.size.tokens for part in parts], max_tokens)
    return [make_bin([parts[i] for i in members]) for members in packed]


def _parts(family: Family[AnyT], max_tokens: int) -> list[Family[AnyT]]:
    """Divide a family into few that do not exceed `max_tokens`, nor see `MOST_KEYS` times as many keys."""
    if len(family.members) == 1:
        return [family]
    if sum([size.tokens for size in family.sizes]) > MOST_KEYS * family.size.tokens:
        halves = (family.take(range(first, len(family.members), 2)) for first in (0, 1))
        return [part for half in halves for part in _parts(half, max_tokens)]
    if family.size.tokens <= max_tokens:
        return [family]
    lengths = [size.tokens - family.stem for size in family.sizes]
    return [family.take(places) for places in best_fit(lengths, max_tokens, stem=family.stem)]


def best_fit(lengths: Sequence[int], capacity: int, *, stem: int = 0) -> list[list[int]]:
    """Pack sequences into bins of at most `capacity` tokens; returns the indices in `lengths` of each bin.

    The sequences of a bin share `stem` tokens, which their lengths leave out. Places the longest first, each into
    the fullest bin with room, in O(n log n) comparisons. Raises ValueError for a sequence longer than `capacity`.
    """
    longest = stem + max(lengths, default=0)
    if longest > capacity:
        raise ValueError(f"sequence of {longest} tokens exceeds packer.max_tokens={capacity}; raise it")
    room_of_bin = capacity - stem
    bins: list[list[int]] = []
    stride = len(lengths) + 1
    rooms: list[int] = []  # ascending; room * stride + bin, one integer so that comparisons are cheap
    for item in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        taken = lengths[item] * stride
        place = bisect_left(rooms, taken)
        if place == len(rooms):
            insort(rooms, room_of_bin * stride + len(bins) - taken)
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
    rest = [family for item in ordered[whole:] for family in item.families]
    last = _levelled(rest, ranks, capacity=capacity, attention_share=attention_share)
    if last is None:
        last = ordered[whole:] + [make_bin(())] * (whole + ranks - len(ordered))
    return [*(ordered[start : start + ranks] for start in range(0, whole, ranks)), last]


def _levelled(
    families: Sequence[Family[PackedT]], ranks: int, *, capacity: int, attention_share: float
) -> list[Bin[PackedT]] | None:
    """Deal families, whole or divided, to one bin a rank so that the largest is small; None if they do not fit."""
    found = []
    for parts in (families, _divided(families, FEWEST_PARTS * ranks)):
        sizes = [part.size for part in parts]
        places = level_costs(sizes, ranks, capacity=capacity, attention_share=attention_share)
        if places is not None:
            found.append([make_bin(parts[i] for i in members) for members in places])
    return min(found, key=lambda bins: max(item.cost(attention_share) for item in bins), default=None)


def _divided(families: Sequence[Family[PackedT]], count: int) -> list[Family[PackedT]]:
    """Halve the largest families until there are `count`, or every trajectory is alone."""
    heap = [
        (-family.size.tokens, place, family) for place, family in enumerate(families) if len(family.members) > 1
    ]
    found = [family for family in families if len(family.members) == 1]
    heapq.heapify(heap)
    number = len(families)  # breaks ties
    while heap and len(heap) + len(found) < count:
        _, _, family = heapq.heappop(heap)
        order = sorted(range(len(family.members)), key=lambda place: family.sizes[place].tokens)
        for half in (family.take(order[::2]), family.take(order[1::2])):
            if len(half.members) == 1:
                found.append(half)
            else:
                number += 1
                heapq.heappush(heap, (-half.size.tokens, number, half))
    return found + [family for _, _, family in heap]


def level_costs(
    sizes: Sequence[RowSize], bins: int, *, capacity: int, attention_share: float
) -> list[list[int]] | None:
    """Divide families of these sizes among `bins` lists of similar cost; returns the indices of each list.

    Places the largest first, each into the cheapest list. Returns None if a list exceeds `capacity` tokens.
    """
    heap = [(0.0, index) for index in range(bins)]
    out: list[list[int]] = [[] for _ in range(bins)]
    rooms = [capacity] * bins
    for item in sorted(range(len(sizes)), key=lambda place: sizes[place].tokens, reverse=True):
        (tokens, squares), (cost, index) = sizes[item], heap[0]
        rooms[index] -= tokens
        if rooms[index] < 0:
            return None
        out[index].append(item)
        heapq.heapreplace(heap, (cost + tokens + attention_share * squares, index))
    return out
