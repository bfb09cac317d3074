"""Log-probabilities and entropy of labels, without the [T, V] logits in memory. Called by `model`'s forward.

Invariant: logits of at most `chunk` tokens exist at a time, forward and backward; the backward pass computes
them anew.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

CHUNK = 512  # tokens: few enough to hold V = 150,000 in 300 MB, enough to keep the matrix product busy


def token_logprobs(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, temperature: float = 1.0, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """fp32 `log softmax(hidden @ weight.T / temperature)` at the labels [T], and the entropy there [T].

    `hidden` is [T, H], `weight` the output embedding [V, H], `labels` [T] int64. Both results carry gradients
    to `hidden` and `weight`.
    """
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, temperature, chunk
    )
    return result


class _TokenLogprobs(Function):
    """With p = softmax(z), z = h W' / t: d logp_y / dz = onehot(y) - p, and dH / dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for rows in _chunks(len(labels), chunk):
            logp = _log_softmax(hidden[rows], weight, temperature)
            logprobs[rows] = logp.gather(1, labels[rows, None])[:, 0]
            entropy[rows] = -(logp.exp().mul_(logp)).sum(-1)
        ctx.save_for_backward(hidden, weight, labels, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)  # entropy is often only measured; its backward then costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for rows in _chunks(len(labels), ctx.chunk):
            logp = _log_softmax(hidden[rows], weight, ctx.temperature)
            grad_logits = torch.zeros_like(logp)
            if grad_logprobs is not None:
                grad = grad_logprobs[rows, None]
                grad_logits.addcmul_(logp.exp(), grad, value=-1).scatter_add_(1, labels[rows, None], grad)
            if grad_entropy is not None:
                surprise = (logp + entropy[rows, None]).mul_(grad_entropy[rows, None])
                grad_logits.addcmul_(logp.exp(), surprise, value=-1)
            grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            grad_weight += grad_logits.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, length, chunk)]


def _log_softmax(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    return torch.log_softmax((hidden @ weight.t()).float().div_(temperature), dim=-1)
