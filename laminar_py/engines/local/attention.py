"""Attention over the KV cache, for one decoding step and for one batch of prompt tokens. Called by `LocalModel`.

The scheduler plans each call. A query at position p sees exactly the positions up to p of its own sequence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from laminar_py.engines.local.kv import BLOCK, BlockPool, Indices
from laminar_py.engines.local.spec import ModelSpec
from laminar_py.records.codec import IntArray

LOG2_E = 1 / math.log(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Tokens that a decoding step feeds behind the last token of each row: T tokens of B rows, row after row.

    E.g. two drafts in the first of two rows: counts [2, 0], starts [0, 3], of_token [0, 0, 0, 1], behind
    [0, 1, 2, 0].
    """

    ids: IntArray  # [sum of counts]
    counts: Indices  # [B]
    starts: Indices  # [B] place of each row's last token among the T tokens
    of_token: Indices  # [T] row
    behind: Indices  # [T] tokens since the row's last token

    @classmethod
    def build(cls, drafts: Sequence[Sequence[int]]) -> Self:
        """Build from the drafts of each row."""
        counts = np.array([len(draft) for draft in drafts])
        ends = np.cumsum(1 + counts)
        starts = ends - (1 + counts)
        of_token = np.repeat(np.arange(len(drafts)), 1 + counts)
        ids = np.array([token for draft in drafts for token in draft], np.int32)
        behind = np.arange(ends[-1]) - starts[of_token]
        return cls(ids=ids, counts=counts, starts=starts, of_token=of_token, behind=behind)

    def fed_behind(self, last_ids: Indices) -> Indices:
        """Return the ids of T tokens: the `last_ids [B]` of the rows, each with its draft behind it."""
        ids = last_ids[self.of_token]
        ids[self.behind > 0] = self.ids
        return ids

    def behind_each(self, values: Indices) -> Indices:
        """Return values of T tokens, from `values [B]` of the rows, that count up from token to token."""
        return values[self.of_token] + self.behind


class DecodePlan(NamedTuple):
    """Blocks and offsets that one decoding step of B sequences reads and writes; N blocks are in use.

    A step feeds T tokens: the last token of each sequence, and drafts behind it, at most S of one sequence.
    Without drafts T is B and S is 1. Of H heads, groups of G share one of K key heads. `DecodeAttention` reads the
    plan, which is a tuple of tensors, since the traced step takes tensors only.
    """

    keys: Tensor  # [L, N, K, D, BLOCK]
    values: Tensor  # [L, N, K, BLOCK, D]
    write_blocks: Tensor  # [T] block of the new key and value of each token
    write_offsets: Tensor  # [T]
    queries: Tensor  # [N * S] tokens of the sequence that owns a block; the last one stands for missing ones
    outputs: Tensor  # [T] place of each token among the B * S queries
    rows: Tensor  # [N] the sequence that owns a block
    mask: Tensor  # [N, 1, S, 1, BLOCK] 0 on visible tokens, else -inf
    lowest: Tensor  # [B, K, S, G] -inf
    zeros: Tensor  # [B, K, S, G, D]

    @property
    def has_drafts(self) -> bool:
        """True if a sequence may feed several tokens."""
        return self.mask.shape[2] > 1


def plan_decode(
    pool: BlockPool, *, slots: Indices, positions: Indices, spec: ModelSpec, drafts: Drafts | None = None
) -> DecodePlan:
    """Plan a decoding step in `slots [B]`: of the tokens at `positions [B]`, and of `drafts` behind them."""
    num_rows, num_blocks = len(slots), pool.num_blocks
    row_of_slot = np.zeros(len(pool.table), np.int64)
    row_of_slot[slots] = np.arange(num_rows)
    owner = pool.owner[:num_blocks]
    rows = row_of_slot[owner]
    steps = np.zeros((num_rows, 1), np.int64)  # [B, S] of each query behind the row's last token
    queries, outputs = rows, rows[:0]
    written, places = slots, positions
    if drafts is not None:
        steps = np.minimum(np.arange(1 + drafts.counts.max()), drafts.counts[:, None])
        queries = (drafts.starts[:, None] + steps)[rows].ravel()
        outputs = drafts.of_token * steps.shape[1] + drafts.behind
        written, places = slots[drafts.of_token], drafts.behind_each(positions)
    # visible tokens by slot and query; 0 for a slot that does not decode
    visible = np.zeros((len(pool.table), steps.shape[1]), np.int64)
    visible[slots] = (positions + 1)[:, None] + steps
    remaining = np.clip(visible[owner] - (pool.place[:num_blocks] * BLOCK)[:, None], 0, BLOCK)  # [N, S]
    mask = pool.masks.index_select(0, torch.from_numpy(remaining.ravel()))
    shape = (num_rows, spec.num_kv_heads, steps.shape[1], spec.num_queries_per_kv)
    return DecodePlan(
        keys=pool.keys[:, :num_blocks],
        values=pool.values[:, :num_blocks],
        write_blocks=torch.from_numpy(pool.table[written, places // BLOCK]),
        write_offsets=torch.from_numpy(places % BLOCK),
        queries=torch.from_numpy(queries),
        outputs=torch.from_numpy(outputs),
        rows=torch.from_numpy(rows),
        mask=mask.view(num_blocks, 1, steps.shape[1], 1, BLOCK),
        lowest=torch.full(shape, -torch.inf),
        zeros=torch.zeros(*shape, spec.head_dim),
    )


class DecodeAttention:
    """Attention of all queries against all N blocks in use.

    Every block belongs to one row. Each block computes its scores and its share of the outputs alone; then each
    row adds up its shares. The highest score of a query is subtracted before the exponential, as in the split
    softmax of Flash-Decoding. A block costs the same whatever the length of its sequence.
    """

    def __init__(self, plan: DecodePlan, spec: ModelSpec, *, has_drafts: bool) -> None:
        self._plan, self._spec, self._has_drafts = plan, spec, has_drafts
        # Base 2: on masked entries `exp` takes a path 30 times slower, `exp2` does not.
        self._scale = spec.head_dim**-0.5 * LOG2_E

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write keys and values `[T, K, D]` of `layer` into the cache at the position of each token."""
        place = (self._plan.write_blocks, self._plan.write_offsets)
        self._plan.keys[layer].permute(0, 3, 1, 2).index_put_(place, k)
        self._plan.values[layer].transpose(1, 2).index_put_(place, v)

    def mix(self, layer: int, q: Tensor) -> Tensor:
        """Attend with queries `[T, H, D]` of `layer`. Returns the mixed values `[T, H * D]`."""
        plan, head_dim = self._plan, self._spec.head_dim
        num_keys, group = self._spec.num_kv_heads, self._spec.num_queries_per_kv
        num_queries = plan.mask.shape[2]  # S
        keys, values = plan.keys[layer].flatten(0, 1), plan.values[layer].flatten(0, 1)
        queries = q.index_select(0, plan.queries)
        if self._has_drafts:
            queries = queries.view(-1, num_queries, num_keys, group * head_dim).transpose(1, 2)
        queries = queries.reshape(-1, num_queries * group, head_dim)  # [N * K, S * G, D]
        scores = torch.bmm(queries, keys).view(-1, num_keys, num_queries, group, BLOCK)
        scores = torch.add(plan.mask, scores, alpha=self._scale)  # fp32, as the mask
        highest = scores.amax(-1)
        rows = plan.rows[:, None, None, None].expand_as(highest)
        highest = plan.lowest.scatter_reduce(0, rows, highest, "amax")
        weights = scores.sub_(highest.index_select(0, plan.rows)[..., None]).exp2_()
        totals = plan.zeros[..., 0].index_add(0, plan.rows, weights.sum(-1))
        shares = torch.bmm(weights.to(values.dtype).view(-1, num_queries * group, BLOCK), values).float()
        mixed = plan.zeros.index_add(0, plan.rows, shares.view(-1, num_keys, num_queries, group, head_dim))
        mixed = (mixed / totals[..., None]).to(q.dtype)
        if not self._has_drafts:
            return mixed.flatten(1)
        width = num_keys * group * head_dim
        return mixed.transpose(1, 2).reshape(-1, width).index_select(0, plan.outputs)


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
