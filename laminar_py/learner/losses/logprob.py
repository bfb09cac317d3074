"""Log-probabilities and entropy of labels, without the [T, V] logits in memory. Called by `model`'s forward.

Invariant: logits of at most `chunk` tokens exist at a time, forward and backward; the backward pass computes
them anew.
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd import Function

LOWEST = -1e4  # log-probability of what is outside the support, where minus infinity times 0 would be NaN
CHUNK = 512  # tokens: few enough to hold V = 150,000 in 300 MB, enough to keep the matrix product busy


@dataclass(frozen=True, slots=True)
class Support:
    """The part of the vocabulary that each of T tokens is of: `ids[starts[t]:starts[t + 1]]`; if none, all."""

    starts: list[int]  # [T + 1]
    ids: Tensor  # [starts[T]] int64
    rows: Tensor  # [starts[T]] int64, the token that each id belongs to

    @classmethod
    def build(cls, counts: npt.NDArray[np.int32], ids: npt.NDArray[np.int32], *, device: torch.device) -> Self:
        """From the number of ids of each token, [T], and all of them."""
        rows = np.repeat(np.arange(len(counts)), counts)
        starts: list[int] = np.concatenate([[0], counts.cumsum(dtype=np.int64)]).tolist()
        return cls(starts, torch.tensor(ids, dtype=torch.long, device=device), torch.tensor(rows, device=device))

    def cut(self, logits: Tensor, tokens: slice) -> None:
        """Minus infinity outside the support of these tokens; `logits` is [their number, V]."""
        inside = slice(self.starts[tokens.start], self.starts[tokens.stop])
        if inside.start == inside.stop:
            return
        rows, ids = self.rows[inside] - tokens.start, self.ids[inside]
        outside = torch.zeros_like(logits, dtype=torch.bool)
        outside[rows] = True
        outside[rows, ids] = False
        logits.masked_fill_(outside, -torch.inf)


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    support: Support | None = None,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """fp32 `log softmax(hidden @ weight.T / temperature)` at the labels [T], and the entropy there [T].

    `hidden` is [T, H], `weight` the output embedding [V, H], `labels` [T] int64. The softmax is over `support`,
    where that names a part of the vocabulary. Both results carry gradients to `hidden`, and to
    `weight` unless that is frozen.
    """
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, temperature, support, chunk
    )
    return result


class _TokenLogprobs(Function):
    """With p = softmax(z), z = h W' / t: d logp_y / dz = onehot(y) - p, and dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        support: Support | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for rows in _chunks(len(labels), chunk):
            logp = _log_softmax(hidden, weight, rows, temperature, support)
            logprobs[rows] = logp.gather(1, labels[rows, None])[:, 0]
            entropy[rows] = -(logp.exp().mul_(logp.clamp(min=LOWEST))).sum(-1)
        ctx.save_for_backward(hidden, weight, labels, entropy)
        ctx.temperature, ctx.support, ctx.chunk = temperature, support, chunk
        ctx.set_materialize_grads(False)  # entropy is often only measured; its backward then costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, weight, labels, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        learns = ctx.needs_input_grad[1]  # not where it is frozen, as with adapters: a product of three saved
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        for rows in _chunks(len(labels), ctx.chunk):
            logp = _log_softmax(hidden, weight, rows, ctx.temperature, ctx.support)
            grad_logits = torch.zeros_like(logp)
            if grad_logprobs is not None:
                grad = grad_logprobs[rows, None]
                grad_logits.addcmul_(logp.exp(), grad, value=-1).scatter_add_(1, labels[rows, None], grad)
            if grad_entropy is not None:
                surprise = (logp.clamp(min=LOWEST) + entropy[rows, None]).mul_(grad_entropy[rows, None])
                grad_logits.addcmul_(logp.exp(), surprise, value=-1)
            grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[rows]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _log_softmax(
    hidden: Tensor, weight: Tensor, rows: slice, temperature: float, support: Support | None
) -> Tensor:
    logits = (hidden[rows] @ weight.t()).float().div_(temperature)
    if support is not None:
        support.cut(logits, rows)
    return torch.log_softmax(logits, dim=-1)
