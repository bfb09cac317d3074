"""The KV cache: a pool of blocks of `BLOCK` tokens. Owns which block belongs to which slot, and its tensors.

Where experts are recorded, those of a token lie beside its keys and values, and go wherever these go. Called by
the scheduler (extend, share, release, keep, restore, settle) and by attention, which reads the tensors. A step of
decoding attends over all blocks in use at once, whatever sequence they belong to, so its cost follows the tokens
that are there and not the longest sequence. Blocks that no slot uses keep the cache of turns that have ended.
Invariant: after `settle`, blocks `[0, num_blocks)` are exactly those in use; what is kept makes room for whatever
runs.

The pool keeps the cache of a request's last turn for its next turn: one cache per request. When blocks run out,
the oldest kept cache goes first.
"""

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.codec import IntArray
from laminar_py.records.pieces import RoutedExperts

_FIRST_NUMBER = -2  # below everything else that a block may belong to


@dataclass(frozen=True, slots=True)
class Kept:
    """KV cache of `ids`, e.g. `Kept("math-3.1", ids, np.array([7, 3]))` of a turn of 40 tokens."""

    rid: str
    ids: IntArray  # [n]
    blocks: npt.NDArray[np.int64]  # [blocks that n tokens take]


class KeptCaches:
    """Kept caches by number, which stands for them where blocks have their owner."""

    def __init__(self) -> None:
        self._kept: dict[int, Kept] = {}  # the longest kept first
        self._numbers: dict[str, int] = {}  # by rid
        self._next = count(_FIRST_NUMBER, -1)

    def add(self, kept: Kept) -> int:
        """Keep a cache; returns its number."""
        assert kept.rid not in self._numbers, f"{kept.rid}: a turn ended before the one before was asked for"
        number = next(self._next)
        self._kept[number], self._numbers[kept.rid] = kept, number
        return number

    def remove(self, rid: str) -> Kept | None:
        """Keep that of `rid` no more; None if there is none."""
        number = self._numbers.pop(rid, None)
        return None if number is None else self._kept.pop(number)

    def remove_oldest(self) -> Kept | None:
        """Keep the one no more that was kept for longest; None if there is none."""
        return self.remove(next(iter(self._kept.values())).rid) if self._kept else None

    def moved(self, number: int, place: int, block: int) -> None:
        """Note that a block of `number`, at `place` among those it has, is now `block`."""
        self._kept[number].blocks[place] = block


BLOCK = 32  # tokens; measured: 16 and 64 are slower at a mean length of 70
_ZEROED_AT_A_TIME = 64  # blocks
_FREE = -1  # owner of a block; what is below owns blocks that are kept

Indices = npt.NDArray[np.int64]


class BlockPool:
    """Room for `kv_capacity` tokens of `num_slots` sequences; L layers, K key heads of D, N blocks."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_slots: int,
        max_len: int,
        kv_capacity: int,
        records_experts: bool = False,
        device: torch.device,
    ) -> None:
        # Each sequence has at most one block that is not full.
        capacity = kv_capacity // BLOCK + num_slots
        self._cache = torch.empty(
            (spec.num_layers, 2, capacity, spec.num_kv_heads, spec.head_dim * BLOCK),
            dtype=spec.dtype,
            device=device,
        )
        shape = (spec.num_layers, capacity, spec.num_kv_heads)
        self.keys = self._cache[:, 0].view(*shape, spec.head_dim, BLOCK)  # [L, N, K, D, BLOCK]
        self.values = self._cache[:, 1].view(*shape, BLOCK, spec.head_dim)  # [L, N, K, BLOCK, D]
        self._experts: Tensor | None = None  # [N, BLOCK, L, k]
        if records_experts and spec.mixture is not None:
            wide = spec.mixture.num_experts > 256
            size = (capacity, BLOCK, spec.num_layers, spec.mixture.top_k)
            self._experts = torch.zeros(size, dtype=torch.int16 if wide else torch.uint8, device=device)
        # Row i hides all but the first i tokens of a block.
        self.masks = torch.full((BLOCK + 1, BLOCK), -torch.inf, device=device).triu()  # [BLOCK + 1, BLOCK]
        self.table: Indices = np.zeros((num_slots, -(-max_len // BLOCK)), np.int64)  # [slot, place] -> block
        self.owner: Indices = np.full(capacity, _FREE, np.int64)  # [N] slot of a block in use
        self.place: Indices = np.zeros(capacity, np.int64)  # [N] its place in that slot, or in what is kept
        self._held: Indices = np.zeros(num_slots, np.int64)  # blocks of each slot
        self._kept = KeptCaches()
        self._holes: list[int] = []  # heap of the free blocks below _num_touched
        self._num_touched = 0  # blocks that anybody has had, the first ones
        self._moves: list[tuple[int, int]] = []  # copies that `settle` makes
        self._num_zeroed = 0
        self._is_settled = True
        self.num_blocks = 0

    def extend(self, slot: int, length: int) -> None:
        """Give `slot` blocks for its first `length` tokens."""
        for _ in range(int(self._held[slot]), -(-length // BLOCK)):
            self._give(slot, self._take())

    def share(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to the empty slot `target`, at the next `settle`.

        `source` holds them already: copies are made all at once, so one cannot feed another.
        """
        self.extend(target, length)
        places = slice(0, -(-length // BLOCK))
        self._moves += zip(self.table[source, places].tolist(), self.table[target, places].tolist(), strict=True)

    def release(self, slot: int) -> None:
        """Take back all blocks of `slot`."""
        assert not self._moves, f"slot {slot} is released before its copies are made"
        self._free(self._let_go(slot))

    def keep(self, slot: int, rid: str, ids: IntArray) -> None:
        """Take back all blocks of `slot`, with `ids [n]` in them, for `rid` if it comes before they are needed."""
        blocks = self._let_go(slot)
        self.owner[blocks] = self._kept.add(Kept(rid, ids, blocks))

    def restore(self, slot: int, rid: str, ids: IntArray) -> int:
        """Give the empty `slot` what is kept of `rid`, if `ids` begin so; returns the tokens that it then has."""
        kept = self._kept.remove(rid)
        if kept is None:
            return 0
        if not np.array_equal(kept.ids, ids[: len(kept.ids)]):
            self._free(kept.blocks)
            return 0
        for block in kept.blocks.tolist():
            self._give(slot, block)
        return len(kept.ids)

    def keep_none(self) -> None:
        """Drop all that is kept."""
        while self._drop_oldest():
            pass

    @property
    def records_experts(self) -> bool:
        """True where `record` is to be told of every token that is computed."""
        return self._experts is not None

    def record(self, blocks: Tensor, offsets: Tensor, experts: Tensor) -> None:
        """Keep the `experts [n, L, k]` of n tokens, at `offsets [n]` of `blocks [n]`, if they are recorded."""
        if self._experts is not None:
            self._experts[blocks, offsets] = experts.to(self._experts.dtype)

    def recorded(self, slot: int, start: int, end: int) -> RoutedExperts:
        """The experts behind positions `[start, end)` of `slot`."""
        assert self._experts is not None, "experts are not recorded"
        blocks = torch.from_numpy(self.table[slot, start // BLOCK : -(-end // BLOCK)]).to(self._experts.device)
        first = start % BLOCK
        rows = self._experts[blocks].flatten(0, 1)[first : first + end - start].cpu().numpy()
        return RoutedExperts(
            start=start, layers=rows.shape[1], top_k=rows.shape[2], width=rows.itemsize, data=rows.tobytes()
        )

    def settle(self) -> None:
        """Make the copies asked for, then bring all blocks in use to the front."""
        self._copy(self._moves)
        self._moves.clear()
        if self._is_settled:
            return
        self._is_settled = True
        self.num_blocks = dense = int(self._held.sum())
        strays = dense + np.flatnonzero(self.owner[dense : self._num_touched] > _FREE)
        if strays.size:
            self._swap(strays, np.flatnonzero(self.owner[:dense] <= _FREE))

    def forget(self) -> None:
        """Note that nothing is held: blocks are zeroed before use, so that no NaN of old weights stays."""
        assert (self.owner == _FREE).all(), "sequences still hold KV"
        self._holes.clear()
        self._num_zeroed = self._num_touched = 0

    def _take(self) -> int:
        """The first free block; if there is none what was kept for longest makes room."""
        if not self._holes and self._num_touched == len(self.owner):
            assert self._drop_oldest(), "slots need more blocks than there are"
        if self._holes:
            return heapq.heappop(self._holes)
        block = self._num_touched
        self._num_touched += 1
        if block >= self._num_zeroed:
            fresh = slice(block, block + _ZEROED_AT_A_TIME)
            self._cache[:, :, fresh] = 0
            self._num_zeroed = fresh.stop
        return block

    def _give(self, slot: int, block: int) -> None:
        """Put a block behind those that `slot` has."""
        place = int(self._held[slot])
        self.table[slot, place], self.owner[block], self.place[block] = block, slot, place
        self._held[slot] = place + 1
        self._is_settled = False

    def _let_go(self, slot: int) -> Indices:
        """Blocks of a slot, which has none from here on."""
        assert not self._moves, f"slot {slot} is released before its copies are made"
        blocks = self.table[slot, : self._held[slot]].copy()
        self._held[slot] = 0
        self._is_settled = False
        return blocks

    def _free(self, blocks: Indices) -> None:
        self.owner[blocks] = _FREE
        for block in blocks.tolist():
            heapq.heappush(self._holes, block)

    def _drop_oldest(self) -> bool:
        """Free what was kept for longest; False if nothing is kept."""
        oldest = self._kept.remove_oldest()
        if oldest is not None:
            self._free(oldest.blocks)
        return oldest is not None

    def _swap(self, strays: Indices, targets: Indices) -> None:
        """Move the blocks in use at `strays` to `targets`; what is kept there goes where they were."""
        kept = self.owner[targets] < _FREE
        sources, places = np.append(strays, targets[kept]), np.append(targets, strays[kept])
        self._copy(zip(sources.tolist(), places.tolist(), strict=True))
        for values in (self.owner, self.place):
            values[strays], values[targets] = values[targets], values[strays]
        self.table[self.owner[targets], self.place[targets]] = targets
        for block in strays[kept].tolist():
            self._kept.moved(int(self.owner[block]), int(self.place[block]), block)
        if not kept.all():
            self._holes = np.flatnonzero(self.owner[: self._num_touched] == _FREE).tolist()

    def _copy(self, moves: Iterable[tuple[int, int]]) -> None:
        if pairs := list(moves):
            source, target = torch.tensor(pairs, device=self._cache.device).t().contiguous()
            self._cache.index_copy_(2, target, self._cache.index_select(2, source))
            if self._experts is not None:
                self._experts.index_copy_(0, target, self._experts.index_select(0, source))
