"""Context parallelism: neighbouring ranks share each packed row, and exchange heads for tokens in attention.

`Learner` makes a `Context`; the packed forward and the attention kernels use it. A row of T tokens is cut into
equal pieces, one for each rank, whatever the ends of its sequences. Everything but attention works on single
tokens, so a rank computes it for its piece alone. For attention each rank gets all tokens of some heads,
by one exchange before and one after (Ulysses; Jacobs et al. 2023). Every rank then gets the
log-probabilities of the whole row, and computes the whole loss; its gradient reaches the rank's own piece alone,
so gradients still add up over ranks (`tests/learner/test_context.py`).
"""

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from laminar_py.records.codec import IntArray

AnyInts = TypeVar("AnyInts", IntArray, npt.NDArray[np.int16])


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that share this rank's rows, e.g. `Context(group, size=2, place=0)`."""

    group: dist.ProcessGroup
    size: int
    place: int  # of this rank among them, and of its piece in a row

    def piece(self, num_tokens: int) -> tuple[int, int]:
        """Return the [first, last) tokens of this rank's piece; `last` may lie beyond the row, see `padded`."""
        each = -(-num_tokens // self.size)
        return self.place * each, (self.place + 1) * each

    def padded(self, values: AnyInts, *, fill: int = 0) -> AnyInts:
        """[T / size] this rank's piece of [T, ...] values, filled up beyond the end of the row."""
        first, last = self.piece(len(values))
        mine = values[first:last]
        missing = [(0, last - first - len(mine)), *[(0, 0)] * (values.ndim - 1)]
        return np.pad(mine, missing, constant_values=fill)

    def to_heads(self, tokens: Tensor) -> Tensor:
        """Exchange [T / size, H, D], a piece with all heads, for [T, H / size, D], the row with own heads."""
        length, heads, dim = tokens.shape
        parts = tokens.view(length, self.size, heads // self.size, dim).transpose(0, 1)
        return _Exchange.apply(parts, self.group).flatten(0, 1)  # type: ignore[no-any-return, no-untyped-call]

    def to_tokens(self, heads: Tensor) -> Tensor:
        """Undo `to_heads`: [T, H / size, D] to [T / size, H, D]."""
        parts = heads.view(self.size, -1, *heads.shape[1:])
        return _Exchange.apply(parts, self.group).transpose(0, 1).flatten(1, 2)  # type: ignore[no-any-return, no-untyped-call]

    def combine(self, values: Tensor, is_mine: Tensor) -> Tensor:
        """Return [N, ...] values of all rows on each rank; `values` are of the rows where `is_mine` [N].

        The gradient of a value reaches the rank that computed it, and no other.
        """
        return _Combine.apply(values, is_mine, self.group)  # type: ignore[no-any-return, no-untyped-call]


def join_context(size: int) -> Context | None:
    """Join the group of `size` neighbouring ranks that share rows; None for 1. Collective over all ranks."""
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup), "every rank is in a group"
    return Context(group, size, dist.get_rank(group))


class _Exchange(Function):
    """Part i of [size, ...] goes to rank i, and part i of the result comes from rank i. It is its own gradient."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the parts that this rank receives."""
        ctx.group = group
        received = torch.empty_like(parts, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        """Return each part's gradient from the rank that received the part."""
        return _Exchange.forward(ctx, gradient, ctx.group), None


class _Combine(Function):
    """See `Context.combine`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, is_mine: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the values of all ranks."""
        ctx.save_for_backward(is_mine)
        combined = values.new_zeros(len(is_mine), *values.shape[1:])
        combined[is_mine] = values
        dist.all_reduce(combined, group=group)
        return combined

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient of this rank's values."""
        (is_mine,) = ctx.saved_tensors
        return gradient[is_mine], None, None
