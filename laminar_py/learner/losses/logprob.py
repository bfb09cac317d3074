"""Log-probabilities and entropy of labels, without the [T, V] logits in memory. Called by `model`'s forward.

Invariant: logits of at most `chunk` tokens exist at a time, forward and backward; the backward pass computes
them anew. On a GPU with a C compiler, which Triton needs, what is read off them and their gradient are one kernel
each, so that they exist in the model's dtype alone.
"""

import functools
import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd import Function

LOWEST = -1e4  # log-probability of what is outside the support, where minus infinity times 0 would be NaN
CHUNK = 512  # tokens: few enough to hold V = 150,000 in 300 MB, enough to keep the matrix product busy
FUSED_CHUNK = 2048  # as many bytes in bf16, with a quarter of the sums over the embedding's gradient


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
    chunk: int | None = None,
) -> tuple[Tensor, Tensor]:
    """fp32 `log softmax(hidden @ weight.T / temperature)` at the labels [T], and the entropy there [T].

    `hidden` is [T, H], `weight` the output embedding [V, H], `labels` [T] int64. The softmax is over `support`,
    where that names a part of the vocabulary. Both results carry gradients to `hidden`, and to
    `weight` unless that is frozen.
    """
    if chunk is None:
        chunk = FUSED_CHUNK if _fuses(hidden.device) else CHUNK
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
        entropy, total = torch.empty_like(logprobs), torch.empty_like(logprobs)
        read = _made_for(hidden.device, _read)
        for rows in _chunks(len(labels), chunk):
            logits = _logits(hidden, weight, rows, support)
            logprobs[rows], entropy[rows], total[rows] = read(logits, labels[rows], temperature)
        ctx.save_for_backward(hidden, weight, labels, entropy, total)
        ctx.temperature, ctx.support, ctx.chunk = temperature, support, chunk
        ctx.set_materialize_grads(False)  # entropy is often only measured; its backward then costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, weight, labels, entropy, total = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        learns = ctx.needs_input_grad[1]  # not where it is frozen, as with adapters: a product of three saved
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        grad_logits_of = _made_for(hidden.device, _grad_logits)
        for rows in _chunks(len(labels), ctx.chunk):
            grad_logits = grad_logits_of(
                _logits(hidden, weight, rows, ctx.support),
                labels[rows],
                entropy[rows],
                total[rows],
                None if grad_logprobs is None else grad_logprobs[rows],
                None if grad_entropy is None else grad_entropy[rows],
                ctx.temperature,
            )
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[rows]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(length: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]


def _logits(hidden: Tensor, weight: Tensor, rows: slice, support: Support | None) -> Tensor:
    """[their number, V] in the model's dtype, new."""
    logits = hidden[rows] @ weight.t()
    if support is not None:
        support.cut(logits, rows)
    return logits


# ---- over the vocabulary: these may overwrite the logits that they are given


def _read(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each label, entropy, and log-sum-exp of the scaled logits, fp32 [T] each."""
    scaled = logits.float().div_(temperature)
    total = scaled.logsumexp(-1)
    logprobs = scaled.gather(1, labels[:, None])[:, 0] - total
    logp = scaled.sub_(total[:, None])
    return logprobs, -logp.exp().mul_(logp.clamp_(min=LOWEST)).sum(-1), total


def _grad_logits(
    logits: Tensor,
    labels: Tensor,
    entropy: Tensor,
    total: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """[T, V] in their dtype, rounded once."""
    logp = logits.float().div_(temperature).sub_(total[:, None])
    surprise = None
    if grad_entropy is not None:
        surprise = (logp.clamp(min=LOWEST) + entropy[:, None]).mul_(grad_entropy[:, None])
    falls = logp.exp_()  # the probabilities, then the gradient with its sign turned
    if surprise is not None:
        surprise.mul_(falls)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    falls.add_(is_label, alpha=-1).mul_(0.0 if grad_logprobs is None else grad_logprobs[:, None])
    if surprise is not None:
        falls.add_(surprise)
    return falls.div_(-temperature).to(logits.dtype)


@functools.cache
def _fuses(device: torch.device) -> bool:
    """True where Triton can make kernels: on CUDA, with it and a C compiler."""
    has_compiler = any(map(shutil.which, filter(None, (os.environ.get("CC"), "cc", "gcc", "clang"))))
    return device.type == "cuda" and has_compiler and importlib.util.find_spec("triton") is not None


@functools.cache
def _made_for(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function over the vocabulary, in one kernel where that can be made."""
    return torch.compile(function) if _fuses(device) else function
