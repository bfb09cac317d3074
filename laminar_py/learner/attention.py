"""Causal attention over packed rows: the kernels and their names in transformers; `kernel_check` chooses one.

A packed row holds S sequences end to end; a token attends to earlier tokens of its own sequence only (law 5). No
kernel builds a [T, T] mask. A kernel raises for an argument that it would have to ignore
(`tests/learner/test_attention.py`).
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from laminar_py.config.learner import Attention
from laminar_py.learner.context import Context

# Torch 2.12 must be asked to pass grouped heads to the kernel; earlier versions always do.
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
)

VarlenKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None], Tensor]
"""(q [T, H, D], k [T, KV, D], v [T, KV, D], cu_seqlens [S + 1], longest, scale) -> [T, H, D]."""


_IMPLEMENTATIONS = {Attention.FLASH3: "FA3", Attention.FLASH4: "FA4"}  # torch's names of them
_MODULES = {  # modules that a kernel needs; two packages share the name `flash_attn`
    Attention.FLASH2: "flash_attn.flash_attn_interface",
    Attention.FLASH3: "flash_attn_interface",
    Attention.FLASH4: "flash_attn.cute.interface",
}


def missing_module(kernel: Attention) -> str:
    """Say why a kernel is missing on this host; "" for an installed kernel."""
    module = _MODULES.get(kernel)
    if module is None:
        return ""
    package = module.partition(".")[0]
    try:
        if importlib.util.find_spec(package) is None or importlib.util.find_spec(module) is None:
            return f"the module {module} is not installed"
    except (ImportError, OSError) as error:  # the search imports the package, e.g. built for another torch
        return f"{package} cannot be imported: {' '.join(str(error).split())[:200]}"
    implementation = _IMPLEMENTATIONS.get(kernel)
    if implementation is not None and implementation not in list_flash_attention_impls():
        return f"torch {torch.__version__} does not offer {implementation}"
    return ""


def activate(kernel: Attention) -> None:
    """Switch torch's flash attention to the code of a kernel, in the whole process; repeats change nothing.

    FLASH3 and FLASH4 replace torch's own, which serves VARLEN and SDPA, also under the same operators.
    """
    wanted = _IMPLEMENTATIONS.get(kernel)
    if current_flash_attention_impl() == wanted:
        return
    if wanted is None:
        restore_flash_attention_impl()
    else:
        activate_flash_attention_impl(wanted)


def register_kernel(kernel: Attention) -> str:
    """Activate a kernel and register it with transformers, so that no mask is built; repeats change nothing.

    Returns its name in transformers, the `attn_implementation` of a model.
    """
    activate(kernel)
    name = f"packed_{kernel}".replace("flash", "fa")  # transformers takes any name with "flash" for its own
    AttentionInterface.register(name, _through_transformers(KERNELS[kernel]))
    AttentionMaskInterface.register(name, lambda **_: None)  # `cu_seqlens` has the same information
    return name


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
    """Torch's varlen attention, by the flash attention that `activate` chose; the window is causal."""
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


KERNELS: dict[Attention, VarlenKernel] = {
    Attention.SDPA: sdpa_per_sequence,
    Attention.VARLEN: torch_varlen,
    Attention.FLASH2: flash_varlen,
    Attention.FLASH3: torch_varlen,  # torch dispatches to the kernel that `activate` chose
    Attention.FLASH4: torch_varlen,
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
        context: Context | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Attend within each packed sequence; `cu_seq_lens_q` has their ends. Returns [1, T, H, D] and None.

        With a `context` this rank has a piece of the row, and gets the other tokens of its heads.
        """
        assert attention_mask is None, "packed attention takes no mask; cu_seqlens separates the sequences"
        assert dropout == 0.0, f"attention dropout {dropout} would change the log-probabilities"
        assert softcap is None, "attention logits with a soft cap are not supported"
        assert s_aux is None, "attention sinks are not supported"
        assert sliding_window is None or max_length_q <= sliding_window, (
            f"a sequence of {max_length_q} tokens exceeds the sliding window of {sliding_window}"
        )
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if context is None:
            return kernel(q, k, v, cu_seq_lens_q, max_length_q, scaling)[None], None
        q, k, v = (context.to_heads(x) for x in (q, k, v))
        return context.to_tokens(kernel(q, k, v, cu_seq_lens_q, max_length_q, scaling))[None], None

    return packed_attention
