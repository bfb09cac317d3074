"""The KV cache: a pool of blocks of `BLOCK` tokens. Owns the block table of each slot, and the cache tensors.

The scheduler calls `extend`, `share`, `release`, `keep`, `restore` and `compact`; attention reads the tensors. A
decoding step attends over all used blocks at once, whatever sequence they belong to. Its cost therefore follows
the number of cached tokens and not the longest sequence. Free blocks keep the cache of finished turns until a slot
needs the room. Recorded experts of a token lie beside its keys and values and move with them. After `compact`,
blocks `[0, num_blocks)` are exactly the blocks in use.
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

BLOCK = 32  # tokens; measured: 16 and 64 are slower at a mean length of 70
_ZEROED_AT_A_TIME = 64  # blocks
_FREE = -1  # owner of a free block
_FIRST_NUMBER = -2  # of kept caches: this number and lower ones own the blocks of kept caches

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Kept:
    """KV cache of a finished turn, e.g. `Kept("math-3.1", ids, np.array([7, 3]))` for 40 tokens."""

    rid: str
    ids: IntArray  # [n]
    blocks: npt.NDArray[np.int64]  # [ceil(n / BLOCK)], and maybe one more that drafts filled


class BlockPool:
    """KV cache of `kv_capacity` tokens for `num_slots` sequences; L layers, K key heads of D, N blocks."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        num_slots: int,
        max_len: int,
        kv_capacity: int,
        records_experts: bool = False,
        drafts: bool = False,
    ) -> None:
        """With `drafts` a slot may `extend` one block beyond its tokens."""
        # Each sequence has at most one block that is not full, and one for drafts.
        capacity = kv_capacity // BLOCK + num_slots * (2 if drafts else 1)
        self._cache = torch.empty(
            (spec.num_layers, 2, capacity, spec.num_kv_heads, spec.head_dim * BLOCK),
            dtype=spec.dtype,
        )
        shape = (spec.num_layers, capacity, spec.num_kv_heads)
        self.keys = self._cache[:, 0].view(*shape, spec.head_dim, BLOCK)  # [L, N, K, D, BLOCK]
        self.values = self._cache[:, 1].view(*shape, BLOCK, spec.head_dim)  # [L, N, K, BLOCK, D]
        self._experts: Tensor | None = None  # [N, BLOCK, L, k]
        if records_experts and spec.mixture is not None:
            wide = spec.mixture.num_experts > 256
            size = (capacity, BLOCK, spec.num_layers, spec.mixture.top_k)
            self._experts = torch.zeros(size, dtype=torch.int16 if wide else torch.uint8)
        # Row i hides all but the first i tokens of a block.
        self.masks = torch.full((BLOCK + 1, BLOCK), -torch.inf).triu()  # [BLOCK + 1, BLOCK]
        self.table: Indices = np.zeros((num_slots, -(-max_len // BLOCK)), np.int64)  # [slot, place] -> block
        self.owner: Indices = np.full(capacity, _FREE, np.int64)  # [N] slot of a block in use
        self.place: Indices = np.zeros(capacity, np.int64)  # [N] index of the block in its slot or kept cache
        self._held: Indices = np.zeros(num_slots, np.int64)  # number of blocks by slot
        self._kept: dict[int, Kept] = {}  # by number, the oldest first; the number owns its blocks
        self._numbers = count(_FIRST_NUMBER, -1)
        self._holes: list[int] = []  # heap of the free blocks below _num_touched
        self._num_touched = 0  # the first blocks, which were in use at some time
        self._moves: list[tuple[int, int]] = []  # copies that `compact` will make: source, target
        self._num_zeroed = 0
        self._is_dense = True  # no slot gained or lost blocks since the last `compact`
        self.num_blocks = 0  # blocks in use at the last `compact`

    def extend(self, slot: int, length: int) -> None:
        """Add blocks to `slot` until it has room for `length` tokens."""
        for _ in range(int(self._held[slot]), -(-length // BLOCK)):
            self._append_block(slot, self._take_free_block())

    def share(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of slot `source` to the empty slot `target`, at the next `compact`.

        `source` must hold them already: `compact` makes all copies at once, so no copy reads the result of
        another.
        """
        self.extend(target, length)
        places = slice(0, -(-length // BLOCK))
        self._moves += zip(self.table[source, places].tolist(), self.table[target, places].tolist(), strict=True)

    def release(self, slot: int) -> None:
        """Free all blocks of `slot`."""
        assert not self._moves, f"slot {slot} is released before its copies are made"
        self._free(self._take_blocks_from(slot))

    def keep(self, slot: int, rid: str, ids: IntArray) -> None:
        """Move the blocks of `slot`, which hold `ids [n]`, to a kept cache for the next turn of `rid`."""
        number, blocks = next(self._numbers), self._take_blocks_from(slot)
        self._kept[number] = Kept(rid, ids, blocks)
        self.owner[blocks] = number

    def restore(self, slot: int, rid: str, ids: IntArray) -> int:
        """Move the kept cache of `rid` to the empty `slot`, if it holds a prefix of `ids`.

        Returns the number of tokens that `slot` then holds; 0 if there is no such cache.
        """
        number = next((number for number, kept in self._kept.items() if kept.rid == rid), None)
        if number is None:
            return 0
        kept = self._kept.pop(number)
        if not np.array_equal(kept.ids, ids[: len(kept.ids)]):
            self._free(kept.blocks)
            return 0
        for block in kept.blocks.tolist():
            self._append_block(slot, block)
        return len(kept.ids)

    def drop_kept(self) -> None:
        """Free all kept caches."""
        while self._drop_oldest():
            pass

    @property
    def records_experts(self) -> bool:
        """True if callers must pass the experts of every computed token to `record`."""
        return self._experts is not None

    def record(self, blocks: Tensor, offsets: Tensor, experts: Tensor) -> None:
        """Store `experts [n, L, k]` of n tokens at `offsets [n]` in `blocks [n]`, if the pool records experts."""
        if self._experts is not None:
            self._experts[blocks, offsets] = experts.to(self._experts.dtype)

    def recorded(self, slot: int, start: int, end: int) -> RoutedExperts:
        """The recorded experts at positions `[start, end)` of `slot`."""
        assert self._experts is not None, "experts are not recorded"
        blocks = torch.from_numpy(self.table[slot, start // BLOCK : -(-end // BLOCK)])
        first = start % BLOCK
        rows = self._experts[blocks].flatten(0, 1)[first : first + end - start].cpu().numpy()
        return RoutedExperts(
            start=start, layers=rows.shape[1], top_k=rows.shape[2], width=rows.itemsize, data=rows.tobytes()
        )

    def compact(self) -> None:
        """Make the copies that `share` asked for, then move all blocks in use to the front of the pool."""
        self._copy(self._moves)
        self._moves.clear()
        if self._is_dense:
            return
        self._is_dense = True
        self.num_blocks = dense = int(self._held.sum())
        strays = dense + np.flatnonzero(self.owner[dense : self._num_touched] > _FREE)
        if strays.size:
            self._move_to_front(strays, np.flatnonzero(self.owner[:dense] <= _FREE))

    def reset(self) -> None:
        """Zero every block before its next use, so that no NaN of old weights stays. No slot may hold blocks."""
        assert (self.owner == _FREE).all(), "sequences still hold KV"
        self._holes.clear()
        self._num_zeroed = self._num_touched = 0

    def _take_free_block(self) -> int:
        """Take the first free block. If the pool has none, free the oldest kept cache first."""
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

    def _append_block(self, slot: int, block: int) -> None:
        """Append a block to the blocks of `slot`."""
        place = int(self._held[slot])
        self.table[slot, place], self.owner[block], self.place[block] = block, slot, place
        self._held[slot] = place + 1
        self._is_dense = False

    def _take_blocks_from(self, slot: int) -> Indices:
        """Detach and return all blocks of `slot`; their owner does not change yet."""
        assert not self._moves, f"slot {slot} is released before its copies are made"
        blocks = self.table[slot, : self._held[slot]].copy()
        self._held[slot] = 0
        self._is_dense = False
        return blocks

    def _free(self, blocks: Indices) -> None:
        """Make `blocks`, which no slot lists any more, available to all slots."""
        self.owner[blocks] = _FREE
        for block in blocks.tolist():
            heapq.heappush(self._holes, block)

    def _drop_oldest(self) -> bool:
        """Free the oldest kept cache. Returns False if there is none."""
        if not self._kept:
            return False
        self._free(self._kept.pop(next(iter(self._kept))).blocks)
        return True

    def _move_to_front(self, strays: Indices, targets: Indices) -> None:
        """Move the blocks in use at `strays` to `targets`, and kept blocks at `targets` to `strays`."""
        kept = self.owner[targets] < _FREE
        sources, places = np.append(strays, targets[kept]), np.append(targets, strays[kept])
        self._copy(zip(sources.tolist(), places.tolist(), strict=True))
        for values in (self.owner, self.place):
            values[strays], values[targets] = values[targets], values[strays]
        self.table[self.owner[targets], self.place[targets]] = targets
        for block in strays[kept].tolist():
            self._kept[int(self.owner[block])].blocks[self.place[block]] = block
        if not kept.all():
            self._holes = np.flatnonzero(self.owner[: self._num_touched] == _FREE).tolist()

    def _copy(self, moves: Iterable[tuple[int, int]]) -> None:
        """Copy keys, values and recorded experts of blocks, for each pair (source, target)."""
        if pairs := list(moves):
            source, target = torch.tensor(pairs).t().contiguous()
            self._cache.index_copy_(2, target, self._cache.index_select(2, source))
            if self._experts is not None:
                self._experts.index_copy_(0, target, self._experts.index_select(0, source))
