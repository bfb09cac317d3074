"""Changes to a model's layers: activation recomputation, compilation, fused norms, replay of routed experts.

`step` sets up recomputation and compilation before it shards; `model` fuses norms and changes routers.
Recomputation and compilation change results by fp32 rounding at most (`tests/learner/test_layers.py`).
"""

import ctypes
import types
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from laminar_py.config.learner import Recompute
from laminar_py.config.section import ConfigError
from laminar_py.learner.context import Context
from laminar_py.learner.layer_inputs import offload_inputs
from laminar_py.records.trajectory import MicroBatch

PRODUCTS = {"aten::mm", "aten::addmm"}  # of matrices
ATTENTION = {
    "flash_attn::_flash_attn_varlen_forward",
    "torch_attn::_varlen_attn",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
}
# Norms that compute `weight * x / sqrt(mean(x^2) + variance_epsilon)`. Gemma's, for one, add one to the weight.
FUSABLE_NORMS = tuple(
    f"{family}RMSNorm"
    for family in ("Llama", "Mistral", "Mixtral", "Olmoe", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "DeepseekV3")
)
# Model types whose routers take a softmax over all experts, then the k largest.
REPLAYABLE = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral")


def recompute_activations(model: PreTrainedModel, kind: Recompute) -> None:
    """Let each layer keep only its input and compute its activations again in the backward pass.

    `selective` also keeps the outputs of attention and of every second matrix product. `none` changes nothing.
    `all_offloaded` moves the inputs to the host.
    """
    how: dict[str, Any] = {"use_reentrant": False}
    if kind is Recompute.SELECTIVE:
        how["context_fn"] = _selective_contexts
    if kind is not Recompute.NONE:
        for layer in model.base_model.layers:
            layer.forward = _checkpointed(layer.forward, how)
    if kind is Recompute.ALL_OFFLOADED:
        offload_inputs(model)


def _checkpointed(forward: Callable[..., Tensor], how: dict[str, Any]) -> Callable[..., Tensor]:
    """Wrap a forward in `checkpoint` with options `how`. The compiler looks into a closure, not into a partial."""

    def checkpointed(*args: Any, **kwargs: Any) -> Tensor:
        output: Tensor = checkpoint(forward, *args, **how, **kwargs)
        return output

    return checkpointed


def _selective_contexts() -> tuple[object, object]:
    """Make the contexts of one layer's forward pass and of its recomputation, which make the same choices."""
    products: Counter[bool] = Counter()

    def policy(context: SelectiveCheckpointContext, op: Any, *_: object, **__: object) -> CheckpointPolicy:
        """Save the outputs of attention and of a layer's every second matrix product; recompute other outputs."""
        if op.name() in ATTENTION:
            return CheckpointPolicy.MUST_SAVE
        if op.name() in PRODUCTS:
            products[context.is_recompute] += 1
            if products[context.is_recompute] % 2 == 0:  # a layer's last product is odd: never recomputed
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[object, object] = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts


def free_heap() -> None:
    """Give freed activations on a CPU back to the system, where the C library can (glibc).

    glibc keeps them and fits few of the next microbatch's tensors into their places, so a rank would grow: 30 %
    more at the peak of two microbatches, and four times as much between steps (experiments/smollm2/README.md).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def compile_layers(model: PreTrainedModel, *, backend: str | Callable[..., Any] = "inductor") -> None:
    """Compile each layer by itself: layers are alike, so one compilation serves all, and FSDP can wrap each."""
    for layer in model.base_model.layers:
        layer.compile(dynamic=True, backend=backend)


# ---- RMS norms as one kernel each; transformers' own take ten


def fuse_norms(model: nn.Module) -> int:
    """Replace the RMS norms of a model by torch's kernel, which rounds once; returns how many were replaced."""
    norms = [module for module in model.modules() if type(module).__name__ in FUSABLE_NORMS]
    for norm in norms:
        norm.forward = types.MethodType(_fused_norm, norm)
    return len(norms)


def _fused_norm(norm: nn.Module, hidden_states: Tensor) -> Tensor:
    """Compute the forward of an RMS norm. Reads the weight at each call, since sharding replaces the weight."""
    weight = norm.weight
    assert isinstance(weight, Tensor), f"the weight of {type(norm).__name__} is no tensor"
    return F.rms_norm(hidden_states, weight.shape, weight, float(norm.variance_epsilon))  # type: ignore[arg-type]


# ---- router replay


RouterOutput: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""(logits [T, E], weights [T, k], experts [T, k]) of transformers' routers."""


class RouterReplay:
    """Makes the routers of a mixture model choose the experts that the engine chose; R3, Ma et al. 2025.

    Engine and learner compute a little differently, so their routers choose different experts for some tokens. The
    trained policy would then differ from the policy that drew the tokens. The weights of the replayed experts come
    from the learner's own router, so its gradient is kept. Before the first `force` nothing changes.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        self._name = model.config.model_type
        renormalises = bool(getattr(model.config, "norm_topk_prob", self._name == "mixtral"))
        for router in self._routers:
            # [T, k] experts, -1: the router's own choice. Kept for recomputation in the backward pass. Each router
            # has its own, since one code for all layers is compiled once.
            router.forced, router.renormalises = None, renormalises
            router.forward = types.MethodType(_replaying, router)

    def force(self, batch: MicroBatch, *, device: torch.device, context: Context | None = None) -> None:
        """Replay the experts recorded in this microbatch, until the next call; without records replay nothing.

        With a `context` the model sees this rank's piece of the row alone.

        Raises `ConfigError` for a model type whose routers it cannot replay.
        """
        if batch.experts is None:
            for router in self._routers:
                router.forced = None
            return
        if self._name not in REPLAYABLE:
            raise ConfigError(
                f"rollout.record=routed_experts: routers of {self._name} models cannot be replayed; leave it out"
            )
        layers = batch.experts.shape[1]
        assert layers == len(self._routers), f"experts of {layers} layers for {len(self._routers)} routers"
        experts = batch.experts if context is None else context.padded(batch.experts, fill=-1)
        forced = torch.tensor(experts, dtype=torch.long, device=device)
        for router, of_layer in zip(self._routers, forced.unbind(1), strict=True):
            router.forced = of_layer.contiguous()


def _replaying(router: nn.Module, hidden_states: Tensor) -> RouterOutput:
    """Compute the forward of a router, with recorded experts in place of its own, except where the record is -1.

    The weights of the experts come from the learner's own logits, so gradients reach the router.
    """
    logits, weights, routed = type(router).forward(router, hidden_states)
    forced = router.forced
    if not isinstance(forced, Tensor):
        return logits, weights, routed
    experts = torch.where(forced < 0, routed, forced)
    chosen = torch.softmax(logits, -1, dtype=torch.float32).gather(-1, experts)
    if router.renormalises:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return logits, chosen.to(weights.dtype), experts
