"""The KV cache: a pool of blocks of `BLOCK` tokens. Owns which block belongs to which slot, and its tensors.

Where experts are recorded, those of a token lie beside its keys and values, and go wherever these go.
Called by the scheduler (extend, share, release, settle) and by attention, which reads the tensors. A step of
decoding attends over all blocks in use at once, whatever sequence they belong to, so its cost follows the
tokens that are there and not the longest sequence. Invariant: after `settle`, blocks `[0, num_blocks)` are
exactly those in use.
"""

import heapq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.recordings import RoutedExperts

BLOCK = 32  # tokens; measured: 16 and 64 are slower at a mean length of 70
_ZEROED_AT_A_TIME = 64  # blocks

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
        self.owner: Indices = np.zeros(capacity, np.int64)  # [N] slot of a block in use
        self.place: Indices = np.zeros(capacity, np.int64)  # [N] its place in that slot
        self._held: Indices = np.zeros(num_slots, np.int64)  # blocks of each slot
        self._holes: list[int] = []  # heap of free blocks below num_blocks
        self._moves: list[tuple[int, int]] = []  # copies that `settle` makes
        self._num_zeroed = 0
        self.num_blocks = 0

    def extend(self, slot: int, length: int) -> None:
        """Give `slot` blocks for its first `length` tokens."""
        for place in range(int(self._held[slot]), -(-length // BLOCK)):
            block = self._take()
            self.table[slot, place], self.owner[block], self.place[block] = block, slot, place
            self._held[slot] = place + 1

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
        for block in self.table[slot, : self._held[slot]].tolist():
            heapq.heappush(self._holes, block)
        self._held[slot] = 0

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
        """Make the copies asked for, then move the last blocks into the holes."""
        self._copy(self._moves)
        self._moves.clear()
        if not self._holes:
            return
        holes = set(self._holes)
        dense = self.num_blocks - len(holes)
        sources = [block for block in range(dense, self.num_blocks) if block not in holes]
        moves = list(zip(sources, sorted(holes), strict=False))
        self._copy(moves)
        for source, target in moves:
            slot, place = self.owner[source], self.place[source]
            self.owner[target], self.place[target], self.table[slot, place] = slot, place, target
        self._holes.clear()
        self.num_blocks = dense

    def forget(self) -> None:
        """Note that all slots are empty: blocks are zeroed before use, so that no NaN of old weights stays."""
        assert not self._held.any(), "sequences still hold KV"
        self._num_zeroed = 0

    def _take(self) -> int:
        if self._holes:
            return heapq.heappop(self._holes)
        block = self.num_blocks
        self.num_blocks += 1
        if block >= self._num_zeroed:
            fresh = slice(block, block + _ZEROED_AT_A_TIME)
            self._cache[:, :, fresh] = 0
            self._num_zeroed = block + _ZEROED_AT_A_TIME
        return block

    def _copy(self, moves: list[tuple[int, int]]) -> None:
        if moves:
            source, target = torch.tensor(moves, device=self._cache.device).t().contiguous()
            self._cache.index_copy_(2, target, self._cache.index_select(2, source))
            if self._experts is not None:
                self._experts.index_copy_(0, target, self._experts.index_select(0, source))
