"""The choice of the attention kernel, and the check that the chosen kernel computes attention.

`model` chooses when it loads a policy; a self-test of a machine may call `check_kernel` alone. No kernel is used
whose output or gradients differ from plain attention (`tests/learner/test_attention.py`).
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from laminar_py.config.learner import Attention
from laminar_py.config.section import ConfigError
from laminar_py.learner.attention import KERNELS, Segments, VarlenKernel, activate, missing_module, sees

log = logging.getLogger(__name__)

HOPPER, BLACKWELL = 9, 10  # major compute capabilities
LENGTHS = (130, 1, 64, 33, 200)  # queries of the checked segments: one token, a whole tile, and more than a tile
SEEN = (130, 1, 64, 163, 200)  # their keys: one segment continues another
# Most error of a row, over the error of plain attention. SDPA on a CPU stays below 5 in the short formats and
# below 9 in fp32. In bf16, the least exact, a gradient that is 10 % too large in one head gives 25 or more.
MOST_ERROR = {torch.bfloat16: 6.0, torch.float16: 6.0, torch.float32: 32.0}
RESULTS = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCheck:
    """Result of a check, e.g. `KernelCheck(kernel=Attention.VARLEN, dtype=torch.bfloat16, errors={...})`."""

    kernel: Attention
    dtype: torch.dtype
    # by result: its largest error of a row, over the error of plain attention in the same dtype
    errors: dict[str, float] = field(default_factory=dict)
    raised: str = ""  # the error that it raised

    @property
    def fault(self) -> str:
        """Reason not to use the kernel, with figures; "" for a kernel that computes right."""
        if self.raised:
            return f"it raised {self.raised}"
        most = MOST_ERROR[self.dtype]
        wrong = [name for name, error in self.errors.items() if error > most]
        figures = ", ".join(f"{name} by {self.errors[name]:,.0f} times" for name in wrong)
        kind = str(self.dtype).removeprefix("torch.")
        return f"it errs more than plain {kind} attention: {figures}, at most {most:g}" if wrong else ""


class Choice(NamedTuple):
    """A kernel that computes right, e.g. `Choice(Attention.VARLEN, ("flash2: it raised ...",))`."""

    kernel: Attention
    refused: tuple[str, ...] = ()  # kernels before it that fail, with their faults


def compute_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which the layers of a learner on `device` compute."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def choose_kernel(wanted: Attention, *, device: torch.device, heads: int, kv_heads: int, head_dim: int) -> Choice:
    """Return the first kernel of `wanted` that is installed on this host and passes its check.

    Logs each kernel that fails. Raises `ConfigError` if `wanted` names a kernel that is missing or fails, or if
    every kernel fails.
    """
    auto = wanted is Attention.AUTO
    faults: list[str] = []
    for kernel in _in_order(device) if auto else (wanted,):
        fault = missing_module(kernel)
        if fault and auto:
            continue
        if not fault:
            dtype = compute_dtype(device)
            check = check_kernel(
                kernel, device=device, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim
            )
            fault = check.fault
        if not fault:
            return Choice(kernel, tuple(faults))
        faults.append(f"{kernel}: {fault}")
        log.warning("attention kernel not used: %s (%d/%d heads of %d)", faults[-1], heads, kv_heads, head_dim)
    remedy = "repair torch or the driver" if auto else "set it to auto, or install a version that works"
    raise ConfigError(f"learner.attention={wanted}: no kernel can be used ({'; '.join(faults)}); {remedy}")


def _in_order(device: torch.device) -> Sequence[Attention]:
    """Kernels for a device, the preferred first."""
    if device.type == "cpu":
        return (Attention.SDPA,)
    major, _ = torch.cuda.get_device_capability(device)
    order = (Attention.FLASH3, Attention.FLASH2, Attention.VARLEN, Attention.FLASH4, Attention.SDPA)
    fit = {Attention.FLASH3: (HOPPER,), Attention.FLASH4: (HOPPER, BLACKWELL)}
    return [kernel for kernel in order if major in fit.get(kernel, (major,))]


def check_kernel(
    kernel: Attention, *, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int
) -> KernelCheck:
    """Compare a kernel with plain attention on packed segments of `LENGTHS`: the output and all gradients.

    Exact values come from plain attention in fp64. A row of a result, the values of one token and head, may err
    `MOST_ERROR` times as much as plain attention in `dtype` does in this row, or in the mean row. Activates the
    kernel in this process.
    """
    tokens, keys = sum(LENGTHS), sum(SEEN)
    shapes = [(tokens, heads, head_dim), *[(keys, kv_heads, head_dim)] * 2, (tokens, heads, head_dim)]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    # a late key gets its gradient from few tokens: with these weights it is not lost beside the early keys'
    inputs[-1] *= torch.cat([torch.arange(1.0, length + 1) for length in LENGTHS])[:, None, None]
    inputs = [values.to(device, dtype) for values in inputs]
    exact = _results(plain_attention, [values.double() for values in inputs])
    plain = _results(plain_attention, inputs)
    try:
        activate(kernel)
        found = _results(KERNELS[kernel], inputs)
    except Exception as error:  # noqa: BLE001 - kernels of other packages raise anything
        words = " ".join(str(error).split())[:200]
        return KernelCheck(kernel=kernel, dtype=dtype, raised=f"{type(error).__name__}: {words}")
    errors = {}
    for name, value, usual, true in zip(RESULTS, found, plain, exact, strict=True):
        allowed = (usual.double() - true).norm(dim=-1)
        ratio = float(((value.double() - true).norm(dim=-1) / allowed.clamp(min=allowed.mean())).max())
        errors[name] = math.inf if math.isnan(ratio) else ratio
    return KernelCheck(kernel=kernel, dtype=dtype, errors=errors)


def _results(kernel: VarlenKernel, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return a kernel's output for q, k and v, and their gradients; `inputs` has the output's gradient last."""
    *leaves, gradient = [values.clone() for values in inputs]
    q, k, v = (values.requires_grad_() for values in leaves)
    output = kernel(q, k, v, Segments.of(LENGTHS, SEEN, device=q.device), q.shape[-1] ** -0.5)
    return [output.detach(), *torch.autograd.grad(output, (q, k, v), gradient)]


def plain_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """Attention by its formula, a softmax between two matrix products, for one segment after the other."""
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    of_queries, of_keys = (cut.diff().tolist() for cut in (segments.cu_queries, segments.cu_keys))
    parts = torch.split(q, of_queries), torch.split(k, of_keys), torch.split(v, of_keys)
    outputs = []
    for queries, keys, values in zip(*parts, strict=True):
        groups = q.shape[1] // k.shape[1]
        by_head = [queries, keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)]
        queries, keys, values = (x.transpose(0, 1) for x in by_head)
        seen = sees(queries.shape[1], keys.shape[1], device=q.device)
        scores = (queries @ keys.transpose(1, 2) * factor).masked_fill(~seen, -math.inf)
        outputs.append((scores.softmax(-1) @ values).transpose(0, 1))
    return torch.cat(outputs)
