"""Activations that a layer keeps for its backward pass, and its compilation. Called by `step`, before `shard`.

Invariant: neither changes what is computed beyond fp32 rounding.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from laminar_py.config.learner import Recompute

PRODUCTS = {"aten::mm", "aten::addmm"}
ATTENTION = {
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_varlen_forward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}


def recompute_activations(model: PreTrainedModel, kind: Recompute) -> None:
    """Let each layer keep its input alone, or for `selective` the results of attention and half the products."""
    how: dict[str, Any] = {"use_reentrant": False}
    if kind is Recompute.SELECTIVE:
        how["context_fn"] = _keep_some
    if kind is not Recompute.NONE:
        for layer in model.base_model.layers:
            layer.forward = _checkpointed(layer.forward, how)


def _checkpointed(forward: Callable[..., Tensor], how: dict[str, Any]) -> Callable[..., Tensor]:
    """A function, since the compiler does not look into a `functools.partial`."""

    def checkpointed(*args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = checkpoint(forward, *args, **how, **kwargs)
        return output

    return checkpointed


def compile_layers(model: PreTrainedModel, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer by itself: all are alike, so one compilation serves them, and FSDP wraps them later."""
    for layer in model.base_model.layers:
        layer.compile(dynamic=True, backend=backend)


def _keep_some() -> tuple[object, object]:
    """Contexts of one layer's forward pass and of its repetition; both must decide alike."""
    products: Counter[bool] = Counter()

    def policy(context: SelectiveCheckpointContext, op: Any, *_: object, **__: object) -> CheckpointPolicy:
        if op.name() in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op.name() in PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:  # the last one, which nobody computes again, is an odd one
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[object, object] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
