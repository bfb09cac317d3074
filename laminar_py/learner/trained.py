"""A model that the learner trains, ready for its first step. `step` opens the policy, `critic` a value model."""

from typing import TYPE_CHECKING

from transformers import PreTrainedModel

from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import Accumulate, LearnerConfig, ReduceDtype, check_heads
from laminar_py.learner.distributed import Ranks
from laminar_py.learner.layers import compile_layers, recompute_activations
from laminar_py.learner.model import add_value_head, kv_heads, load_policy
from laminar_py.learner.rounding import Rounding, round_weights
from laminar_py.learner.sharding import shard

if TYPE_CHECKING:  # peft is an extra, and takes seconds to import
    from laminar_py.learner.lora import LoraAdapters


def open_model(
    source: ModelConfig,
    settings: LearnerConfig,
    ranks: Ranks,
    *,
    seed: int,
    temperature: float = 1.0,
    is_critic: bool = False,
    rounding: Rounding | None = None,
) -> tuple[PreTrainedModel, "LoraAdapters | None"]:
    """Load a model, add adapters, change its layers and shard it as `settings` say; return it with the adapters.

    Beneath adapters all other weights are frozen, except a critic's head. Raises `ConfigError` if the folder holds
    no usable model, or so many ranks cannot divide its heads.
    """
    device, on_meta = ranks.device, ranks.num_ranks > 1
    model = load_policy(
        source, seed=seed, temperature=temperature, device=device, on_meta=on_meta, attention=settings.attention
    )
    if is_critic:
        add_value_head(model)
    adapters = None
    if settings.lora is not None:
        from laminar_py.learner.lora import LoraAdapters

        adapters = LoraAdapters(model, settings.lora, base=source.path, seed=seed)
        if is_critic:
            model.get_output_embeddings().weight.requires_grad_(True)
    if rounding is not None:
        round_weights(model, rounding)
    check_heads(kv_heads(model.config), settings.context_parallel)
    model.context = ranks.context
    recompute_activations(model, settings.recompute)
    if settings.compile:
        compile_layers(model)
    if ranks.mesh:
        reduce_dtype, offload = settings.reduce_dtype, settings.offload
        shard(model, ranks.mesh, source=source, seed=seed, offload=offload, reduce_dtype=reduce_dtype)
    return model, adapters


def set_gradient_sync(model: PreTrainedModel, ranks: Ranks, settings: LearnerConfig, *, last: bool) -> None:
    """Let FSDP add up gradients over ranks in the next backward pass: always, or only in the `last` one."""
    if not ranks.mesh:
        return
    alone = ranks.num_ranks == 1 and not settings.offload  # there is no other rank to add
    keeps_whole = alone or settings.accumulate is Accumulate.WHOLE
    model.set_requires_gradient_sync(last or not keeps_whole)
    model.set_is_last_backward(last or not keeps_whole)
    # Groups add their sums once an update; in bf16 a sum of microbatches would round once for each.
    model.set_requires_all_reduce(last or settings.reduce_dtype is ReduceDtype.BFLOAT16)
