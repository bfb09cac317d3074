"""Attention over the KV cache, for one decoding step and for one batch of prompt tokens. Called by `LocalModel`.

The scheduler plans each call. A query at position p sees exactly the positions up to p of its own sequence.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from laminar_py.engines.local.kv import BLOCK, BlockPool, Indices
from laminar_py.engines.local.spec import ModelSpec

LOG2_E = 1 / math.log(2)


class DecodePlan(NamedTuple):
    """Blocks and offsets that one decoding step of B sequences reads and writes; N blocks are in use.

    `DecodeAttention` reads it. It is a tuple of tensors, since the traced step takes tensors only.
    """

    keys: Tensor  # [L, N, K, D, BLOCK]
    values: Tensor  # [L, N, K, BLOCK, D]
    write_blocks: Tensor  # [B] block of the new key and value of each sequence
    write_offsets: Tensor  # [B]
    rows: Tensor  # [N] the sequence that owns a block
    mask: Tensor  # [N, 1, BLOCK] 0 on visible tokens, else -inf
    lowest: Tensor  # [B, H] -inf
    zeros: Tensor  # [B, H * D]


def plan_decode(pool: BlockPool, *, slots: Indices, positions: Indices, num_heads: int) -> DecodePlan:
    """Plan a decoding step with one query in each of `slots [B]`, at `positions [B]`."""
    num_blocks = pool.num_blocks
    row_of_slot = np.zeros(len(pool.table), np.int64)
    visible = np.zeros(len(pool.table), np.int64)  # visible tokens by slot; 0 for a slot that does not decode
    row_of_slot[slots], visible[slots] = np.arange(len(slots)), positions + 1
    owner = pool.owner[:num_blocks]
    remaining = np.clip(visible[owner] - pool.place[:num_blocks] * BLOCK, 0, BLOCK)
    return DecodePlan(
        keys=pool.keys[:, :num_blocks],
        values=pool.values[:, :num_blocks],
        write_blocks=torch.from_numpy(pool.table[slots, positions // BLOCK]),
        write_offsets=torch.from_numpy(positions % BLOCK),
        rows=torch.from_numpy(row_of_slot[owner]),
        mask=pool.masks.index_select(0, torch.from_numpy(remaining))[:, None],
        lowest=torch.full((len(slots), num_heads), -torch.inf),
        zeros=torch.zeros(len(slots), num_heads * pool.values.shape[-1]),
    )


class DecodeAttention:
    """Attention of one query of each of B sequences against all N blocks in use.

    Every block belongs to one row. Each block computes its scores and its share of the output alone; then each row
    adds up its shares. The row's highest score is subtracted before the exponential, as in the split softmax of
    Flash-Decoding. A block costs the same whatever the length of its sequence.
    """

    def __init__(self, plan: DecodePlan, spec: ModelSpec) -> None:
        self._plan, self._spec = plan, spec
        self._head_rows = plan.rows[:, None].expand(-1, spec.num_heads)  # [N, H]
        # Base 2: on masked entries `exp` takes a path 30 times slower, `exp2` does not.
        self._scale = spec.head_dim**-0.5 * LOG2_E

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write keys and values `[B, K, D]` of `layer` into the cache at the position of each sequence."""
        place = (self._plan.write_blocks, self._plan.write_offsets)
        self._plan.keys[layer].permute(0, 3, 1, 2).index_put_(place, k)
        self._plan.values[layer].transpose(1, 2).index_put_(place, v)

    def mix(self, layer: int, q: Tensor) -> Tensor:
        """Attend with queries `[B, H, D]` of `layer`. Returns the mixed values `[B, H * D]`."""
        plan, heads, head_dim = self._plan, self._spec.num_heads, self._spec.head_dim
        group = self._spec.num_queries_per_kv
        keys, values = plan.keys[layer].flatten(0, 1), plan.values[layer].flatten(0, 1)
        queries = q.index_select(0, plan.rows).view(-1, group, head_dim)
        scores = torch.bmm(queries, keys).view(-1, heads, BLOCK)
        scores = torch.add(plan.mask, scores, alpha=self._scale)  # fp32, as the mask
        highest = plan.lowest.scatter_reduce(0, self._head_rows, scores.amax(-1), "amax")
        weights = scores.sub_(highest.index_select(0, plan.rows)[..., None]).exp2_()
        totals = plan.zeros[:, :heads].index_add(0, plan.rows, weights.sum(-1))
        shares = torch.bmm(weights.to(values.dtype).view(-1, group, BLOCK), values).float()
        mixed = plan.zeros.index_add(0, plan.rows, shares.view(-1, heads * head_dim))
        return (mixed.view(-1, heads, head_dim) / totals[..., None]).to(q.dtype).flatten(1)


class PrefillAttention:
    """Attention of one chunk of each of n sequences, padded to S tokens, over the sequence up to each token."""

    def __init__(self, pool: BlockPool, *, slots: Indices, starts: Indices, lengths: Indices) -> None:
        """Sequence i computes `lengths[i]` tokens from position `starts[i]` on; all arrays are `[n]`."""
        self._pool, self._keys, self._values = pool, pool.keys, pool.values
        num_sequences, width = len(slots), int(lengths.max())
        positions = starts[:, None] + np.arange(width)  # [n, S]
        real = np.arange(width) < lengths[:, None]
        self._real = torch.from_numpy(np.flatnonzero(real))  # tokens that are not padding
        blocks = pool.table[slots[:, None], np.minimum(positions // BLOCK, pool.table.shape[1] - 1)]
        self._write_blocks = torch.from_numpy(blocks[real])
        self._write_offsets = torch.from_numpy(positions[real] % BLOCK)
        num_places = -(-int((starts + lengths).max()) // BLOCK)
        self._context = torch.from_numpy(pool.table[slots, :num_places])  # [n, places]
        seen = np.arange(num_places * BLOCK) <= positions[..., None]
        self._seen = torch.from_numpy(seen[:, None])  # [n, 1, S, places * BLOCK]
        self._shape = (num_sequences, width)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write keys and values `[n * S, K, D]` of `layer` into the cache, without the padding."""
        self._keys[layer][self._write_blocks, :, :, self._write_offsets] = k[self._real]
        self._values[layer][self._write_blocks, :, self._write_offsets] = v[self._real]

    @property
    def records_experts(self) -> bool:
        """True if the cache records experts, so that the model must call `record`."""
        return self._pool.records_experts

    def record(self, experts: Tensor) -> None:
        """Write experts `[n * S, L, k]` beside the keys and values, without the padding."""
        self._pool.record(self._write_blocks, self._write_offsets, experts[self._real])

    def mix(self, layer: int, q: Tensor) -> Tensor:
        """Attend with queries `[n * S, H, D]` of `layer`. Returns `[n * S, H * D]`; ignore its rows of padding."""
        queries = q.view(*self._shape, *q.shape[1:]).transpose(1, 2)  # [n, H, S, D]
        keys = self._keys[layer][self._context].permute(0, 2, 1, 4, 3).flatten(2, 3)  # [n, K, places * BLOCK, D]
        values = self._values[layer][self._context].permute(0, 2, 1, 3, 4).flatten(2, 3)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=self._seen, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(len(q), -1)
