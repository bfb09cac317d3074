"""Experts of mixtures over a packed row: tokens sorted by expert, grouped products, and the way back.

`model` registers it with transformers. A token's k copies are gathered once on each way, in both passes: the
gradient of a gather is another gather, so nothing adds to one place twice and results are the same bits each
time (`tests/learner/test_experts.py`).
"""

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from transformers.integrations import moe

NAME = "packed"  # in transformers
SIDE_BYTES = 16  # torch's grouped product takes matrices whose rows and columns are multiples of these


class Experts(Protocol):
    """A layer's E experts in transformers, of width W in a model of width H."""

    num_experts: int
    gate_up_proj: Tensor  # [E, 2 W, H]
    down_proj: Tensor  # [E, H, W]
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool

    def _apply_gate(self, gate_up: Tensor) -> Tensor: ...


def register_experts() -> str:
    """Register `packed_experts` with transformers; returns its name there, a model's `experts_implementation`.

    Its grouped product is internal to transformers (5.19 to 5.23). Without it, returns the name of
    its own experts.
    """
    if not hasattr(moe, "_grouped_linear"):
        return "grouped_mm"
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, packed_experts)
    return NAME


def packed_experts(experts: Experts, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """Return [T, H], for each token the weighted sum of its experts' results.

    `hidden` is [T, H], `chosen` and `weights` are [T, k]. transformers' own function computes experts that have
    biases, transposed weights, no gate, or a norm of their results; with sides that torch's grouped product does
    not take, their own loop does.
    """
    if experts.has_bias or experts.is_transposed or experts.has_post_expert_norm or not experts.has_gate:
        if _suits_torch(experts.down_proj):
            return moe.grouped_mm_experts_forward(experts, hidden, chosen, weights)  # type: ignore[no-any-return]
        return type(experts).forward.__wrapped__(experts, hidden, chosen, weights)  # type: ignore[attr-defined, no-any-return]
    order = sort_by_expert(chosen, num_experts=experts.num_experts)
    rows = _Spread.apply(hidden, order.tokens, order.places)  # type: ignore[no-untyped-call]
    inner = experts._apply_gate(_grouped_product(rows, experts.gate_up_proj, order.ends))
    # The last product is linear, so its input has the weights: W numbers a row instead of H.
    scale = _Permute.apply(weights.reshape(-1, 1), order.copies, order.places.view(-1))  # type: ignore[no-untyped-call]
    results = _grouped_product(inner * scale, experts.down_proj, order.ends)
    return _Collect.apply(results, order.tokens, order.places).to(hidden.dtype)  # type: ignore[no-any-return, no-untyped-call]


def _grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """[S, O]: `rows` [S, I] times the weights [E, O, I] of their experts, by torch or one expert after another."""
    if _suits_torch(weights):
        return moe._grouped_linear(rows, weights, ends)  # type: ignore[no-any-return]
    return torch.ops.transformers.grouped_mm_fallback(rows.to(weights.dtype), weights.transpose(1, 2), ends)  # type: ignore[no-any-return]


def _suits_torch(weights: Tensor) -> bool:
    """Return whether torch's grouped product takes weights [E, O, I] in both passes."""
    return all(size * weights.element_size() % SIDE_BYTES == 0 for size in weights.shape[1:])


class Order(NamedTuple):
    """The T k copies of tokens in the order of their experts.

    E.g. of `chosen` [[1, 0], [0, 2]]: copies [1, 2, 0, 3], tokens [0, 1, 0, 1], places [[2, 0], [1, 3]], ends
    [2, 3, 4].
    """

    copies: Tensor  # [T k] numbers in `chosen`
    tokens: Tensor  # [T k] their tokens
    places: Tensor  # [T, k] of a token's copies in this order
    ends: Tensor  # [E] int32, of each expert's copies


def sort_by_expert(chosen: Tensor, *, num_experts: int) -> Order:
    """Order the copies [T, k] of tokens by expert, and an expert's copies by token."""
    keys, copies = torch.sort(chosen.reshape(-1).to(torch.int16), stable=True)  # short keys: a few passes
    experts = torch.arange(num_experts, dtype=torch.int16, device=chosen.device)
    places = torch.empty_like(copies).scatter_(0, copies, torch.arange(len(copies), device=chosen.device))
    return Order(
        copies=copies,
        tokens=copies // chosen.shape[1],
        places=places.view(chosen.shape),
        ends=torch.searchsorted(keys, experts, right=True, out_int32=True),
    )


def _sum_at(values: Tensor, places: Tensor) -> Tensor:
    """[T, H] sums of the k rows of `values` at `places` [T, k], without a copy of these rows."""
    return F.embedding_bag(places, values, mode="sum")


class _Spread(Function):
    """Copies of tokens in the order of experts: [T, H] to [T k, H]. Its gradient is `_Collect`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """Gather each copy."""
        ctx.save_for_backward(places)
        return values.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Sum each token's copies."""
        (places,) = ctx.saved_tensors
        return _sum_at(gradient, places), None, None


class _Collect(Function):
    """Sums of each token's copies: [T k, H] to [T, H]. Its gradient is `_Spread`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, tokens: Tensor, places: Tensor) -> Tensor:
        """Sum each token's copies."""
        ctx.save_for_backward(tokens)
        return _sum_at(values, places)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Gather each copy."""
        (tokens,) = ctx.saved_tensors
        return gradient.index_select(0, tokens), None, None


class _Permute(Function):
    """Rows in another order, and back in the gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """Gather each row."""
        ctx.save_for_backward(inverse)
        return values.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Gather each row from its place."""
        (inverse,) = ctx.saved_tensors
        return gradient.index_select(0, inverse), None, None
