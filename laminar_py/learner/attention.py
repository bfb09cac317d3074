"""Causal attention over packed rows: the kernels and their names in transformers; `model` chooses one.

A packed row holds S sequences end to end; a token attends to earlier tokens of its own sequence only (law 5). No
kernel builds a [T, T] mask. A kernel raises for an argument that it would have to ignore
(`tests/learner/test_attention.py`).
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

# Torch 2.12 must be asked to pass grouped heads to the kernel; earlier versions always do.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)

VarlenKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None], Tensor]
"""(q [T, H, D], k [T, KV, D], v [T, KV, D], cu_seqlens [S + 1], longest, scale) -> [T, H, D]."""


class PackedKernel(StrEnum):
    """Kernels for packed rows; the value is the kernel's name in transformers, its `attn_implementation`."""

    SDPA = "packed_sdpa"
    VARLEN = "packed_varlen"
    FLASH = "packed_flash"
    FLASH4 = "packed_flash4"


FLASH4_CAPABILITIES = (9, 10)  # Hopper and Blackwell


def choose_kernel(device: torch.device) -> PackedKernel:
    """Return the kernel for a device: on a CPU SDPA for each sequence; on CUDA the first of flash-attn 2,
    FlashAttention-4 (on `FLASH4_CAPABILITIES`) and torch's own kernel that is installed.
    """
    if device.type == "cpu":
        return PackedKernel.SDPA
    if _installed("flash_attn.flash_attn_interface"):
        return PackedKernel.FLASH
    major, _ = torch.cuda.get_device_capability(device)
    if major in FLASH4_CAPABILITIES and _installed("flash_attn.cute.interface"):
        return PackedKernel.FLASH4
    return PackedKernel.VARLEN


def _installed(module: str) -> bool:
    """True if a module is installed. Two packages share the name `flash_attn`, so the full name is needed."""
    package = module.partition(".")[0]
    return importlib.util.find_spec(package) is not None and importlib.util.find_spec(module) is not None


def register_kernel(kernel: PackedKernel) -> None:
    """Register a kernel with transformers, so that no mask is built; repeated calls change nothing.

    FLASH4 also becomes the flash attention of torch, in the whole process.
    """
    if kernel is PackedKernel.FLASH4 and current_flash_attention_impl() != "FA4":
        activate_flash_attention_impl("FA4")
    AttentionInterface.register(kernel.value, _through_transformers(KERNELS[kernel]))
    AttentionMaskInterface.register(kernel.value, lambda **_: None)  # `cu_seqlens` has the same information


def sdpa_per_sequence(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None
) -> Tensor:
    """SDPA with one call for each sequence: bit-equal to running the sequences one by one."""
    lengths = cu_seqlens.diff().tolist()
    grouped = q.shape[1] != k.shape[1]
    queries, keys, values = (torch.split(x.transpose(0, 1)[None], lengths, dim=2) for x in (q, k, v))
    outputs = [
        F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
        for query, key, value in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None) -> Tensor:
    """Torch's varlen attention, or FlashAttention-4 once `register_kernel` activates it; the window is causal."""
    output = varlen_attn(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, scale=scale, window_size=(-1, 0), **_GROUPED
    )
    assert isinstance(output, Tensor)
    return output


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, scale: float | None) -> Tensor:
    """`flash_attn_varlen_func` of the flash-attn package."""
    flash = importlib.import_module("flash_attn")
    output: Tensor = flash.flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=scale, causal=True
    )
    return output


KERNELS: dict[PackedKernel, VarlenKernel] = {
    PackedKernel.SDPA: sdpa_per_sequence,
    PackedKernel.VARLEN: torch_varlen,
    PackedKernel.FLASH: flash_varlen,
    PackedKernel.FLASH4: torch_varlen,  # torch dispatches to it once `register_kernel` has activated it
}


def _through_transformers(kernel: VarlenKernel) -> Callable[..., tuple[Tensor, None]]:
    """Wrap a kernel in the signature that transformers calls: q [1, H, T, D] in, [1, T, H, D] out."""

    def packed_attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        cu_seq_lens_q: Tensor,
        max_length_q: int,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Attend within each packed sequence; `cu_seq_lens_q` has their ends. Returns [1, T, H, D] and None."""
        assert attention_mask is None, "packed attention takes no mask; cu_seqlens separates the sequences"
        assert dropout == 0.0, f"attention dropout {dropout} would change the log-probabilities"
        assert softcap is None, "attention logits with a soft cap are not supported"
        assert s_aux is None, "attention sinks are not supported"
        assert sliding_window is None or max_length_q <= sliding_window, (
            f"a sequence of {max_length_q} tokens exceeds the sliding window of {sliding_window}"
        )
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        return kernel(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None

    return packed_attention
