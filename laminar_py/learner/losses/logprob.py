"""Log-probabilities and entropy of labels, without the [T, V] logits in memory. Called by `model`'s forward.

Invariant: logits of at most `chunk` tokens exist at a time, forward and backward; the backward pass computes
them anew. On a GPU where Triton can compile, one kernel makes log-probabilities of them and one their gradient, so
that both exist in the model's dtype alone.
"""

import functools
import importlib.util
import logging
import os
import shutil
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd import Function

log = logging.getLogger(__name__)

LOWEST = -1e4  # log-probability of what is outside the support, where minus infinity times 0 would be NaN
CHUNK = 512  # tokens: few enough to hold V = 150,000 in 300 MB, enough to keep the matrix product busy
FUSED_CHUNK = 2048  # in bf16 alone they take no more, and the embedding's gradient is added to less often


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
        chunk = FUSED_CHUNK if _is_compiled(hidden.device) else CHUNK
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
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        look = _kernel(_look, hidden.device)
        for rows in _chunks(len(labels), chunk):
            found = look(_logits(hidden, weight, rows, support), labels[rows].clone(), temperature)
            logprobs[rows], entropy[rows], normalizer[rows] = found
        ctx.save_for_backward(hidden, weight, labels, entropy, normalizer)
        ctx.temperature, ctx.support, ctx.chunk = temperature, support, chunk
        ctx.set_materialize_grads(False)  # entropy is often only measured; its backward then costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        hidden, weight, labels, entropy, normalizer = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        learns = ctx.needs_input_grad[1]  # not where it is frozen, as with adapters: a product of three saved
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if learns else None
        differentiate = _kernel(_differentiate, hidden.device)
        for rows in _chunks(len(labels), ctx.chunk):
            grad_logits = differentiate(
                _logits(hidden, weight, rows, ctx.support),
                *(_part(tensor, rows) for tensor in (labels, entropy, normalizer, grad_logprobs, grad_entropy)),
                ctx.temperature,
            )
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[rows]
            del grad_logits  # before the next logits are made
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(length: int, chunk: int) -> list[slice]:
    """Slices of nearly one size, which spares a compiled function the odd ones."""
    count = -(-length // chunk)
    size = -(-length // max(1, count))
    return [slice(start, min(start + size, length)) for start in range(0, length, max(1, size))]


def _part(tensor: Tensor | None, rows: slice) -> Tensor | None:
    """A copy: a compiled function would be compiled again for a view that begins elsewhere."""
    return None if tensor is None else tensor[rows].clone()


def _logits(hidden: Tensor, weight: Tensor, rows: slice, support: Support | None) -> Tensor:
    """[their number, V] in the model's dtype, new."""
    logits = hidden[rows] @ weight.t()
    if support is not None:
        support.cut(logits, rows)
    return logits


# ---- over the vocabulary: these may overwrite the logits that they are given


def _look(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each label, entropy, and the log of the sum that normalises a token, fp32 [T] each."""
    scaled = logits.float().div_(temperature)
    normalizer = scaled.logsumexp(-1)
    logprobs = scaled.gather(1, labels[:, None])[:, 0] - normalizer
    logp = scaled.sub_(normalizer[:, None])
    return logprobs, -logp.exp().mul_(logp.clamp_(min=LOWEST)).sum(-1), normalizer


def _differentiate(
    logits: Tensor,
    labels: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Gradient of the loss to the logits, [T, V] in their dtype, rounded once."""
    logp = logits.float().div_(temperature).sub_(normalizer[:, None])
    surprise = None
    if grad_entropy is not None:
        surprise = (logp.clamp(min=LOWEST) + entropy[:, None]).mul_(grad_entropy[:, None])
    probability = logp.exp_()
    if surprise is not None:
        surprise.mul_(probability)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    uphill = probability.add_(is_label, alpha=-1)  # the gradient with its sign turned
    uphill.mul_(0.0 if grad_logprobs is None else grad_logprobs[:, None])
    if surprise is not None:
        uphill.add_(surprise)
    return uphill.div_(-temperature).to(logits.dtype)


def _kernel(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A function over the vocabulary, in one kernel where that can be made."""
    return _compiled(function) if _is_compiled(device) else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, fullgraph=True)


@functools.cache
def _is_compiled(device: torch.device) -> bool:
    """True on CUDA where Triton is and finds what it compiles with: `CC`, gcc or clang, and Python's headers."""
    if device.type != "cuda":
        return False
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    found = importlib.util.find_spec("triton") and any(map(shutil.which, names)) and headers.is_file()
    if not found:
        log.warning(
            "no kernels for log-probabilities: Triton needs gcc or clang and %s; steps are slower", headers
        )
    return bool(found)
