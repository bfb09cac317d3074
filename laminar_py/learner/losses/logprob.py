"""Log-probabilities and entropy of labels, without the [T, V] logits in memory. `model`'s forward calls it.

Logits of at most `chunk` tokens exist at a time, forward and backward; the backward pass computes them again
(`tests/learner/losses/test_logprob.py`). On a GPU where Triton can compile, one kernel computes log-probabilities
from the logits and one kernel their gradient, so that logits and gradient exist only in the model's dtype.
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

LOWEST = -1e4  # log-probability outside the support: minus infinity times probability 0 would be NaN
CHUNK = 512  # tokens: their fp32 logits over V = 150,000 take 300 MB, and the matrix product is large enough
FUSED_CHUNK = 2048  # tokens: their bf16 logits take 600 MB; fewer additions to the embedding's gradient


@dataclass(frozen=True, slots=True)
class Support:
    """Ids among which the engine sampled token t: `ids[starts[t]:starts[t + 1]]`, or all ids if that is empty."""

    starts: list[int]  # [T + 1]
    ids: Tensor  # [starts[T]] int64
    rows: Tensor  # [starts[T]] int64, the token that each id belongs to

    @classmethod
    def build(cls, counts: npt.NDArray[np.int32], ids: npt.NDArray[np.int32], *, device: torch.device) -> Self:
        """Build from each token's number of ids, `counts` [T], and the `ids` of all tokens end to end."""
        rows = np.repeat(np.arange(len(counts)), counts)
        starts: list[int] = np.concatenate([[0], counts.cumsum(dtype=np.int64)]).tolist()
        return cls(starts, torch.tensor(ids, dtype=torch.long, device=device), torch.tensor(rows, device=device))

    def mask_logits(self, logits: Tensor, tokens: slice) -> None:
        """Set `logits` [n, V] of the n tokens in the slice `tokens` to minus infinity outside their support."""
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
    """Return `log softmax(hidden @ weight.T / temperature)` at the labels, and the entropy, fp32 [T] each.

    `hidden` is [T, H], `weight` the output embedding [V, H], `labels` [T] int64. A token with ids in `support` has
    its softmax over these ids. Logits exist for `chunk` tokens at a time. Both results have gradients to `hidden`,
    and to `weight` unless it is frozen.
    """
    if chunk is None:
        chunk = FUSED_CHUNK if _can_compile(hidden.device) else CHUNK
    result: tuple[Tensor, Tensor] = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, temperature, support, chunk
    )
    return result


class _TokenLogprobs(Function):
    """Autograd function of `token_logprobs`, whose backward computes the logits again.

    With p = softmax(z) and entropy H: d log p_label / dz = onehot(label) - p, and dH / dz = -p (log p + H).
    """

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
        """Return log-probabilities and entropies [N] of `labels`; logits exist for `chunk` rows at a time."""
        logprobs = torch.empty(len(labels), dtype=torch.float32, device=hidden.device)
        entropy, normalizer = torch.empty_like(logprobs), torch.empty_like(logprobs)
        compute = _compiled_if_possible(_logprobs_of_labels, hidden.device)
        for rows in _chunks(len(labels), chunk):
            results = compute(_logits(hidden, weight, rows, support), labels[rows].clone(), temperature)
            logprobs[rows], entropy[rows], normalizer[rows] = results
        ctx.save_for_backward(hidden, weight, labels, entropy, normalizer)
        ctx.temperature, ctx.support, ctx.chunk = temperature, support, chunk
        ctx.set_materialize_grads(False)  # entropy is often only measured; its backward then costs nothing
        return logprobs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor, Tensor | None, None, None, None, None]:
        """Compute logits again by chunks; return gradients of `hidden` and, unless frozen, of `weight`."""
        hidden, weight, labels, entropy, normalizer = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        is_trained = ctx.needs_input_grad[1]  # False under adapters, which saves one of three matrix products
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if is_trained else None
        differentiate = _compiled_if_possible(_gradient_of_logits, hidden.device)
        for rows in _chunks(len(labels), ctx.chunk):
            # copies, since a compiled function would compile again for a view at another offset
            per_row = (labels, entropy, normalizer, grad_logprobs, grad_entropy)
            copies = (None if tensor is None else tensor[rows].clone() for tensor in per_row)
            grad_logits = differentiate(_logits(hidden, weight, rows, ctx.support), *copies, ctx.temperature)
            torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += grad_logits.t() @ hidden[rows]
            del grad_logits  # before the next logits are made
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _chunks(length: int, chunk: int) -> list[slice]:
    """Cut [0, length) into nearly equal slices of at most `chunk`: a compiled function then sees few shapes."""
    count = -(-length // chunk)
    size = -(-length // max(1, count))
    return [slice(start, min(start + size, length)) for start in range(0, length, max(1, size))]


def _logits(hidden: Tensor, weight: Tensor, rows: slice, support: Support | None) -> Tensor:
    """[n, V] logits of n rows, minus infinity outside `support`, in the model's dtype and in new memory."""
    logits = hidden[rows] @ weight.t()
    if support is not None:
        support.mask_logits(logits, rows)
    return logits


# ---- over the vocabulary; these functions may overwrite their logits


def _logprobs_of_labels(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each label, entropy, and log-sum-exp of the logits, fp32 [T] each."""
    scaled = logits.float().div_(temperature)
    normalizer = scaled.logsumexp(-1)
    logprobs = scaled.gather(1, labels[:, None])[:, 0] - normalizer
    logp = scaled.sub_(normalizer[:, None])
    return logprobs, -logp.exp().mul_(logp.clamp_(min=LOWEST)).sum(-1), normalizer


def _gradient_of_logits(
    logits: Tensor,
    labels: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: float,
) -> Tensor:
    """Gradient of the loss with respect to the logits, [T, V] in their dtype, rounded once.

    `((onehot(label) - p) grad_logprobs - p (log p + entropy) grad_entropy) / temperature`, p = softmax(logits).
    """
    logp = logits.float().div_(temperature).sub_(normalizer[:, None])
    of_entropy = None  # the term of `grad_entropy`, negated
    if grad_entropy is not None:
        of_entropy = (logp.clamp(min=LOWEST) + entropy[:, None]).mul_(grad_entropy[:, None])
    probability = logp.exp_()
    if of_entropy is not None:
        of_entropy.mul_(probability)
    is_label = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    negative = probability.add_(is_label, alpha=-1)  # the gradient times -temperature
    negative.mul_(0.0 if grad_logprobs is None else grad_logprobs[:, None])
    if of_entropy is not None:
        negative.add_(of_entropy)
    return negative.div_(-temperature).to(logits.dtype)


@functools.cache
def _compiled_if_possible(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return the function compiled into one kernel if Triton can compile on the device, else the function."""
    return torch.compile(function, fullgraph=True) if _can_compile(device) else function


@functools.cache
def _can_compile(device: torch.device) -> bool:
    """True on CUDA if Triton is installed and finds a C compiler (`CC`, gcc or clang) and Python's headers.

    Logs a warning for a GPU without them, once in the process.
    """
    if device.type != "cuda":
        return False
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    headers = Path(sysconfig.get_path("include"), "Python.h")
    possible = importlib.util.find_spec("triton") and any(map(shutil.which, names)) and headers.is_file()
    if not possible:
        log.warning(
            "no fused kernels for log-probabilities, steps are slower: Triton needs gcc or clang and %s", headers
        )
    return bool(possible)
