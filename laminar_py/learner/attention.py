"""Causal attention over packed rows: the kernels and their names in transformers; `kernel_check` chooses one.

A packed row holds S segments end to end; a token attends to earlier tokens of its own sequence only (law 5): of
its segment, and of the segments that this one continues. No kernel builds a [T, T] mask; SDPA builds one of a
segment's queries and keys where it continues another. A kernel raises for an argument that it would have to
ignore (`tests/learner/test_attention.py`).
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

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


class Segments(NamedTuple):
    """S pieces of queries, each with the keys that it sees: all of them, and of its own last tokens the earlier.

    E.g. of two sequences of 3 and 2 tokens that share nothing: both `[0, 3, 5]`, both longest 3.
    """

    cu_queries: Tensor  # [S + 1]
    cu_keys: Tensor  # [S + 1]
    longest_query: int
    longest_key: int

    @classmethod
    def of(cls, queries: Sequence[int], keys: Sequence[int] | None = None, *, device: torch.device) -> "Segments":
        """Build from numbers of queries [S] and of keys [S], by default the same: whole sequences."""
        keys = queries if keys is None else keys
        of_queries, of_keys = (
            torch.tensor([0, *each], device=device).cumsum(0, dtype=torch.int32) for each in (queries, keys)
        )
        return cls(of_queries, of_keys, max(queries), max(keys))


VarlenKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, Segments, float | None], Tensor]
"""(q [T, H, D], k [K, KV, D], v [K, KV, D], segments, scale) -> [T, H, D]."""


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


def sdpa_per_sequence(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """SDPA with one call for each segment: bit-equal to running sequences that share nothing one by one."""
    grouped = q.shape[1] != k.shape[1]
    lengths = segments.cu_queries.diff().tolist(), *[segments.cu_keys.diff().tolist()] * 2
    parts = (torch.split(x.transpose(0, 1)[None], cut, dim=2) for x, cut in zip((q, k, v), lengths, strict=True))
    outputs = []
    for query, key, value in zip(*parts, strict=True):
        seen = sees(query.shape[2], key.shape[2], device=q.device) if query.shape[2] < key.shape[2] else None
        outputs.append(
            F.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, is_causal=seen is None, scale=scale, enable_gqa=grouped
            )
        )
    return torch.cat(outputs, dim=2)[0].transpose(0, 1)


def sees(queries: int, keys: int, *, device: torch.device) -> Tensor:
    """[queries, keys] True where a query, of the last so many tokens, sees a key: its own or an earlier one."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)


def torch_varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """Torch's varlen attention, by the flash attention that `activate` chose; the window is causal."""
    output = varlen_attn(q, k, v, *segments, scale=scale, window_size=(-1, 0), **_GROUPED)
    assert isinstance(output, Tensor)
    return output


def flash_varlen(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """`flash_attn_varlen_func` of the flash-attn package."""
    flash = importlib.import_module("flash_attn")
    output: Tensor = flash.flash_attn_varlen_func(q, k, v, *segments, softmax_scale=scale, causal=True)
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
        cu_seq_lens_k: Tensor,
        max_length_q: int,
        max_length_k: int,
        key_rows: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        context: Context | None = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        """Attend within each packed segment; `cu_seq_lens_q` has their ends. Returns [1, T, H, D] and None.

        With `key_rows` [K] the segments see the keys of these rows, which `cu_seq_lens_k` cuts, else their own.
        With a `context` this rank has a piece of the row, and gets the other tokens of its heads.
        """
        assert attention_mask is None, "packed attention takes no mask; cu_seqlens separates the sequences"
        assert dropout == 0.0, f"attention dropout {dropout} would change the log-probabilities"
        assert softcap is None, "attention logits with a soft cap are not supported"
        assert s_aux is None, "attention sinks are not supported"
        assert sliding_window is None or max_length_k <= sliding_window, (
            f"a sequence of {max_length_k} tokens exceeds the sliding window of {sliding_window}"
        )
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if context is not None:
            q, k, v = (context.to_heads(x) for x in (q, k, v))
        if key_rows is not None:
            k, v = k.index_select(0, key_rows), v.index_select(0, key_rows)
        segments = Segments(cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
        output = kernel(q, k, v, segments, scaling)
        return (output if context is None else context.to_tokens(output))[None], None

    return packed_attention
