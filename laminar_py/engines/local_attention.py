"""What a token sees of the KV cache, for one decoding step and for one batch of prompt tokens.

Called by `LocalModel` through its `Attention` protocol; built anew for each call by the scheduler.
Invariant: a query at position p sees exactly the positions up to p of its own sequence.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from laminar_py.engines.local_kv import BLOCK, BlockPool, Indices

LOG2_E = 1 / math.log(2)


class DecodeAttention:
    """One query of each of B sequences against all N blocks in use.

    Every block belongs to one row. Its scores and its share of the output are computed as if it were alone,
    then the shares are added up in their rows, with the row's highest score subtracted before `exp`:
    the split softmax of Flash-Decoding. A block costs the same whatever the length of its sequence.
    """

    def __init__(self, pool: BlockPool, *, slots: Indices, positions: Indices, num_heads: int) -> None:
        """`slots [B]`, with the query's position in each, `positions [B]`."""
        device, num_blocks = pool.keys.device, pool.num_blocks
        _, _, self._num_kv_heads, self._head_dim, _ = pool.keys.shape
        # Base 2: `exp` falls into a path 30 times slower on the masked entries, `exp2` does not.
        self._scale = self._head_dim**-0.5 * LOG2_E
        self._num_heads = num_heads
        self._lowest = torch.full((len(slots), num_heads), -torch.inf, device=device)
        self._zeros = torch.zeros(len(slots), num_heads * self._head_dim, device=device)
        self._keys, self._values = pool.keys[:, :num_blocks], pool.values[:, :num_blocks]
        self._write_blocks = torch.from_numpy(pool.table[slots, positions // BLOCK]).to(device)
        self._write_offsets = torch.from_numpy(positions % BLOCK).to(device)
        row_of_slot = np.zeros(len(pool.table), np.int64)
        visible = np.zeros(len(pool.table), np.int64)  # tokens; none of a slot that is not decoding
        row_of_slot[slots], visible[slots] = np.arange(len(slots)), positions + 1
        owner = pool.owner[:num_blocks]
        remaining = np.clip(visible[owner] - pool.place[:num_blocks] * BLOCK, 0, BLOCK)
        self._rows = torch.from_numpy(row_of_slot[owner]).to(device)  # [N]
        self._head_rows = self._rows[:, None].expand(-1, num_heads)  # [N, H]
        self._mask = pool.masks.index_select(0, torch.from_numpy(remaining).to(device))[:, None]  # [N, 1, BLOCK]

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put keys and values `[B, K, D]` at each sequence's position."""
        self._keys[layer][self._write_blocks, :, :, self._write_offsets] = k
        self._values[layer][self._write_blocks, :, self._write_offsets] = v

    def mix(self, layer: int, q: Tensor) -> Tensor:
        """Attention of queries `[B, H, D]`, as `[B, H * D]`."""
        heads, head_dim = self._num_heads, self._head_dim
        keys, values = self._keys[layer].flatten(0, 1), self._values[layer].flatten(0, 1)
        queries = q.index_select(0, self._rows).view(keys.shape[0], -1, head_dim)
        scores = torch.bmm(queries, keys).view(-1, heads, BLOCK)
        scores = torch.add(self._mask, scores, alpha=self._scale)  # fp32, as the mask
        highest = self._lowest.scatter_reduce(0, self._head_rows, scores.amax(-1), "amax")
        weights = scores.sub_(highest.index_select(0, self._rows)[..., None]).exp2_()
        totals = self._zeros[:, :heads].index_add(0, self._rows, weights.sum(-1))
        shares = torch.bmm(weights.to(values.dtype).view(keys.shape[0], -1, BLOCK), values).float()
        mixed = self._zeros.index_add(0, self._rows, shares.view(-1, heads * head_dim))
        return (mixed.view(-1, heads, head_dim) / totals[..., None]).to(q.dtype).flatten(1)


class PrefillAttention:
    """Chunks of n sequences, padded to S tokens each, against everything of their sequence up to them."""

    def __init__(self, pool: BlockPool, *, slots: Indices, starts: Indices, lengths: Indices) -> None:
        """Sequence i puts `lengths[i]` tokens at `starts[i]` and on; all arrays are `[n]`."""
        device = pool.keys.device
        self._keys, self._values = pool.keys, pool.values
        num_sequences, width = len(slots), int(lengths.max())
        positions = starts[:, None] + np.arange(width)  # [n, S]
        real = np.arange(width) < lengths[:, None]
        self._real = torch.from_numpy(np.flatnonzero(real)).to(device)  # tokens that are not padding
        blocks = pool.table[slots[:, None], np.minimum(positions // BLOCK, pool.table.shape[1] - 1)]
        self._write_blocks = torch.from_numpy(blocks[real]).to(device)
        self._write_offsets = torch.from_numpy(positions[real] % BLOCK).to(device)
        num_places = -(-int((starts + lengths).max()) // BLOCK)
        self._context = torch.from_numpy(pool.table[slots, :num_places]).to(device)  # [n, places]
        seen = np.arange(num_places * BLOCK) <= positions[..., None]
        self._seen = torch.from_numpy(seen[:, None]).to(device)  # [n, 1, S, places * BLOCK]
        self._shape = (num_sequences, width)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put keys and values `[n * S, K, D]` into the blocks, without the padding."""
        self._keys[layer][self._write_blocks, :, :, self._write_offsets] = k[self._real]
        self._values[layer][self._write_blocks, :, self._write_offsets] = v[self._real]

    def mix(self, layer: int, q: Tensor) -> Tensor:
        """Attention of queries `[n * S, H, D]`, as `[n * S, H * D]`; padding gets what it gets."""
        queries = q.view(*self._shape, *q.shape[1:]).transpose(1, 2)  # [n, H, S, D]
        keys = self._keys[layer][self._context].permute(0, 2, 1, 4, 3).flatten(2, 3)  # [n, K, places * BLOCK, D]
        values = self._values[layer][self._context].permute(0, 2, 1, 3, 4).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._seen, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(len(q), -1)
