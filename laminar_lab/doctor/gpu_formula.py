"""Bytes of a GPU by part: formulas over a model's shape and settings. Pure.

Called by `doctor.memory`, which judges configs, and by `laminar plan`. The learner's memory is its peak, the
largest of three moments of a step: the backward pass of the output embedding, of a layer, and the reduction of the
embeddings' gradients at the end. Sizes of activations follow transformers' layers: bf16, with norms in fp32; a
norm that `learner.layers` has fused takes less. States of the learner, weights and KV cache of an engine are
exact; activations and the memory that CUDA and its allocator keep are estimates (`tests/doctor/test_memory.py`).
On a GPU that learner and replicas share, the learner's states stay in the replicas' turn, and the engine's weights
and graphs in the learner's turn.
"""

import math
from collections.abc import Callable, Iterator

import msgspec

from laminar_lab.model_shape import ModelShape, kv_token_bytes
from laminar_py.config.learner import Accumulate, LearnerConfig, Recompute, ReduceDtype

HEAD_TOKENS = 2048  # tokens with logits at the same time: `learner.losses.logprob.FUSED_CHUNK`
SPARE_SHARE = 0.05  # of a GPU, for CUDA, NCCL and what the allocator cannot use
MARGIN = 0.02  # share of a GPU that a plan leaves free, and without which doctor warns
INPUTS_HERE = 2  # inputs of layers on a GPU at the same time, the others being on the host: in use, and copied
CACHE, SPARE = "KV cache", "CUDA, NCCL, fragmentation"
# of a learner's parts: in the replicas' turn, too
RESIDENT = ("masters (fp32)", "gradients (fp32)", "moments (fp32)", "reference model", "critic", SPARE)

Parts = dict[str, float]
"""Bytes by use."""


def with_spare(parts: Parts, gpu_bytes: float) -> Parts:
    """Return the bytes of a learner's GPU by part, with the share that CUDA, NCCL and the allocator keep."""
    return parts | {SPARE: SPARE_SHARE * gpu_bytes}


def has_margin(parts: Parts, gpu_bytes: float) -> bool:
    """Return whether a GPU with these parts has `MARGIN` left, since activations are estimates."""
    return sum(parts.values()) <= (1.0 - MARGIN) * gpu_bytes


# ---- the learner


def learner_memory(shape: ModelShape, learner: LearnerConfig, *, tokens: int) -> Parts:
    """Return the bytes of a learner's GPU at its peak, with microbatches of `tokens`, without a reference."""
    peaks = _peaks(shape, learner, tokens=tokens)
    return state_parts(shape, learner) | max(peaks, key=lambda parts: sum(parts.values()))


def state_parts(shape: ModelShape, learner: LearnerConfig) -> Parts:
    """Return the bytes of fp32 masters, gradients and AdamW's moments on a rank's GPU."""
    trained = shape.total if learner.lora is None else shape.adapters(learner.lora)
    weights = shape.total + (0 if learner.lora is None else trained)
    ranks, host = learner.shard_size, learner.offload
    gradients = 0.0 if host else 4.0 * trained / ranks
    if learner.accumulate is Accumulate.WHOLE and (learner.world_size > 1 or host):
        gradients = 4.0 * trained
    return {
        "masters (fp32)": 0.0 if host else 4.0 * weights / ranks,
        "gradients (fp32)": gradients,
        "moments (fp32)": 0.0 if host else 8.0 * trained / ranks,
    }


def critic_parts(shape: ModelShape, learner: LearnerConfig) -> Parts:
    """Return the bytes of a critic's masters and moments on a rank's GPU: a policy's without the last embedding.

    Its gradients, activations and gathered weights are never there with the policy's, which an update clears
    first, and are no more: it has no logits.
    """
    headless = msgspec.structs.replace(shape, tie_word_embeddings=True)
    held = ("masters (fp32)", "moments (fp32)")
    return {"critic": sum(size for name, size in state_parts(headless, learner).items() if name in held)}


def _peaks(shape: ModelShape, learner: LearnerConfig, *, tokens: int) -> Iterator[Parts]:
    """Yield the bytes beside the states at each moment of a step that may be its peak."""
    root, layer = 2.0 * shape.root, 2.0 * shape.layer  # in bf16, gathered
    head = 2.0 * shape.embedding
    trains = learner.lora is None
    summed = 1.0 if learner.reduce_dtype is ReduceDtype.BFLOAT16 else 2.0  # bytes of a sum's number over bf16's
    kept = activations(shape, learner.recompute, tokens=tokens)
    logits = 4.0 * HEAD_TOKENS * shape.vocab_size  # with their gradient, bf16
    yield {
        "embedding and head (bf16)": root,
        "layers (bf16)": 0.0,
        "activations": kept + 6.0 * tokens * shape.hidden_size,
        "head: logits and gradient": logits + 3 * head,  # summed up in fp32, and once in bf16
    }
    again = 0.0 if learner.recompute is Recompute.NONE else _of_layer(shape)
    if learner.context_parallel > 1:  # queries, keys, values and result, sent and received
        again += 8.0 * (shape.query_width + shape.key_width)
    reduced = summed * (layer + layer / learner.shard_size) if trains else 0.0
    yield {
        "embedding and head (bf16)": root,
        "layers (bf16)": 2 * layer + (layer + reduced if trains else 0.0),  # the next one, gradient, reduction
        "activations": kept + tokens * (again + _of_layer(shape) / 2),  # half: gradients of its results
        "head: logits and gradient": head if trains else 0.0,
    }
    yield {
        "embedding and head (bf16)": root + (summed * (root + root / learner.shard_size) if trains else 0.0),
        "layers (bf16)": 0.0,
        "activations": 0.0,
        "head: logits and gradient": 0.0,
    }


def activations(shape: ModelShape, recompute: Recompute, *, tokens: int) -> float:
    """Return the bytes of activations that the layers keep of a microbatch for its backward pass."""
    entry = 2.0 * shape.hidden_size
    if recompute is Recompute.ALL_OFFLOADED:
        return tokens * INPUTS_HERE * entry
    if recompute is Recompute.NONE:
        each = _of_layer(shape)
    elif recompute is Recompute.ALL:
        each = entry
    else:  # attention's result, and every second of the seven products; grouped ones are computed again
        wide = shape.shared_width if shape.experts else shape.used_width
        products = shape.key_width + shape.hidden_size + wide
        each = entry + 2.0 * (shape.query_width + products)
    return tokens * shape.num_hidden_layers * each


def host_inputs(shape: ModelShape, recompute: Recompute, *, tokens: int) -> float:
    """Return the bytes of a rank's inputs of layers in pinned host memory; torch rounds each to a power of two."""
    if recompute is not Recompute.ALL_OFFLOADED:
        return 0.0
    return shape.num_hidden_layers * 2.0 ** math.ceil(math.log2(tokens * 2 * shape.hidden_size))


def _of_layer(shape: ModelShape) -> float:
    """Return the bytes for each token that a layer computes and its backward pass needs."""
    norms = 16.0 * shape.hidden_size  # two, each its input in fp32, the same normalised, and its result
    queries, keys = shape.query_width, shape.key_width
    attention = 4.0 * queries + 4.0 * keys  # queries, keys, values, result
    if shape.normalises_heads:
        attention += 6.0 * (queries + keys)
    routed = 0.0
    if shape.experts:  # rows sorted by expert, weighted products, four tables of places, probabilities
        chosen = shape.num_experts_per_tok or 1
        weighted = 2.0 * (shape.used_width - shape.shared_width)
        routed = 2.0 * shape.hidden_size * chosen + weighted + 32.0 * chosen + 4.0 * shape.experts
    return norms + attention + routed + 8.0 * shape.used_width  # gate, its activation, up, their product


def frozen_memory(shape: ModelShape, *, tokens: int, offload: bool) -> Parts:
    """Return the peak bytes of a GPU whose stage runs a frozen model over `tokens` at a time: an estimate."""
    return {
        "masters (fp32)": 0.0 if offload else 4.0 * shape.total,
        "embedding and head (bf16)": 2.0 * shape.root,
        "layers (bf16)": 4.0 * shape.layer,  # the next one, too
        "activations": tokens * (_of_layer(shape) + 6.0 * shape.hidden_size),
        "head: logits and gradient": 2.0 * HEAD_TOKENS * shape.vocab_size,
    }


# ---- engines


def engine_memory(
    shape: ModelShape,
    *,
    gpus: int,
    kv_tokens: int | None,
    static_bytes: float,
    gpu_bytes: float,
    width: float | None = None,
) -> Parts:
    """Return the bytes on each GPU of an engine; a cache of None takes the rest of `static_bytes`.

    A number has `width` bytes, by default as many as engines serve.
    """
    width = width or shape.served_bytes
    weights = width * shape.total / gpus
    cache = max(0.0, static_bytes - weights)
    if kv_tokens is not None:
        cache = kv_token_bytes(shape, gpus, width=width) * kv_tokens
    rest = gpu_bytes - static_bytes
    return {"engine's weights": weights, CACHE: cache, "engine's activations, CUDA graphs": rest}


def cache_tokens(shape: ModelShape, *, gpus: int, static_bytes: float) -> int:
    """Return the tokens of KV cache that fit beside the weights into `static_bytes` of each GPU."""
    left = static_bytes - shape.served_bytes * shape.total / gpus
    return max(0, int(left / kv_token_bytes(shape, gpus)))


# ---- GPUs that learner and replicas share


def turn_parts(
    learner: Parts, engine_within: Callable[[float], Parts], *, gpu_bytes: float, keeps_cache: bool
) -> tuple[Parts, Parts]:
    """Return the bytes of a shared GPU by part, in the learner's turn and in the replicas'.

    `learner` has the parts of a GPU that replicas do not use, with CUDA's share. `engine_within` returns an
    engine's parts on a GPU of so many bytes; the learner leaves these between its turns, when the engine starts.
    """
    held = {name: size for name, size in learner.items() if name in RESIDENT}
    engine = engine_within(_left_bytes(learner, gpu_bytes))
    kept = {name: size for name, size in engine.items() if keeps_cache or name != CACHE}
    return learner | kept, held | engine


def shared_cache_tokens(
    shape: ModelShape,
    learner: Parts,
    *,
    gpus: int,
    static_share: float,
    gpu_bytes: float,
    keeps_cache: bool,
    margin: float = 0.0,
) -> int:
    """Return the tokens of KV cache that fit beside a learner of these parts, and leave `margin` of the GPU.

    The engine's `static_share` is of the bytes that the learner leaves between its turns. A cache that stays in
    the learner's turn also needs room at the learner's peak.
    """
    left, spared = _left_bytes(learner, gpu_bytes), margin * gpu_bytes
    room = static_share * left
    if keeps_cache:
        room = min(room, gpu_bytes - sum(learner.values()) - (1.0 - static_share) * left)
    return cache_tokens(shape, gpus=gpus, static_bytes=room - spared)


def _left_bytes(learner: Parts, gpu_bytes: float) -> float:
    """Return the bytes that a learner of these parts leaves between its turns."""
    return max(0.0, gpu_bytes - sum(learner.get(name, 0.0) for name in RESIDENT))
