"""Times of a model on a kind of GPU by scaling rules, where nobody has measured them. Pure.

The constants below were fitted to published decode tables of H100 SXM GPUs (Qwen2.5 7B, 32B and 72B on 1 to 8 of
them, see `configs/emulation`), which they meet within 7 %. On other GPUs only the data sheet's figures change, and
nobody has checked that. The rules:

- a decode step reads the weights and, for each token of context, its keys and values, at a share of the memory's
  peak; each layer adds the launch of its kernels, and a little more where its parts are joined over GPUs;
- each sequence of a batch adds FLOPs, of which half hide behind the reading, and its share of two all-reduces a
  layer;
- prefill takes FLOPs at a share of the peak, and the same all-reduces;
- the learner takes 6 FLOPs a parameter and token at `mfu`, recomputation included.
"""

from laminar_py.config.emulation import EngineTimes, LearnerTimes
from laminar_py.runtime.preflight import BF16_BYTES, Gpu, ModelShape, kv_token_bytes

WEIGHTS_SHARE = 0.885  # of the memory's peak, at which weights are read
CACHE_SHARE = 0.9  # likewise keys and values
LAYER_S = 27e-6  # kernels of a layer, on one GPU
JOIN_S = 10.6e-6  # more, where a layer is spread over GPUs
EXPOSED_SHARE = 0.5  # of a sequence's FLOPs in decode, beyond what the reading of weights hides
PREFILL_MFU = 0.7
LINK_SHARE = 2 / 3  # of NVLink's peak, in an all-reduce
HOST_BYTES_PER_S = 30e9  # from the host's memory to a GPU over PCIe 5: an assumption
LEARNER_MFU = 0.4  # what RL systems show end to end is 0.1 to 0.45
OPTIMIZER_S = 2.0  # an assumption: AdamW on sharded states, gradient norm, copy of the weights
RESERVE_TOKENS = 600
MOST_CACHED = 4_000_000  # tokens; no engine keeps an index of more


def engine_times(shape: ModelShape, gpu: Gpu, *, tensor_parallel: int) -> EngineTimes:
    """Times of one replica of so many GPUs of one node, in bf16."""
    weights = BF16_BYTES * shape.total / tensor_parallel
    layers, joined = shape.num_hidden_layers, tensor_parallel > 1
    flops = 2.0 * shape.active / tensor_parallel
    reduced = _all_reduce_s(shape, gpu, tensor_parallel)
    return EngineTimes(
        step_s=weights / (WEIGHTS_SHARE * gpu.hbm_bytes_per_s) + layers * (LAYER_S + JOIN_S * joined),
        sequence_s=EXPOSED_SHARE * flops / gpu.bf16_flops + reduced,
        kv_token_s=kv_token_bytes(shape, tensor_parallel) / (CACHE_SHARE * gpu.hbm_bytes_per_s),
        prefill_tokens_per_s=1.0 / (flops / (PREFILL_MFU * gpu.bf16_flops) + reduced),
        load_s=weights / HOST_BYTES_PER_S,
        reserve_tokens=RESERVE_TOKENS,
    )


def learner_times(shape: ModelShape, gpu: Gpu, *, mfu: float = LEARNER_MFU) -> LearnerTimes:
    """Times of one of the learner's GPUs, which take whole sequences each."""
    return LearnerTimes(
        train_tokens_per_s=mfu * gpu.bf16_flops / (6.0 * shape.active),
        num_parameters=shape.active,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_hidden_layers,
        optimizer_s=OPTIMIZER_S,
    )


def kv_tokens(shape: ModelShape, gpu: Gpu, *, tensor_parallel: int, static_share: float) -> int:
    """Tokens that fit the cache of a replica beside its weights; 0 or less where these do not fit."""
    room = static_share * gpu.memory_bytes - BF16_BYTES * shape.total / tensor_parallel
    return min(int(room / kv_token_bytes(shape, tensor_parallel)), MOST_CACHED)


def weights_bytes(shape: ModelShape) -> float:
    """Bytes of a version in bf16."""
    return float(BF16_BYTES * shape.total)


def _all_reduce_s(shape: ModelShape, gpu: Gpu, tensor_parallel: int) -> float:
    """Seconds that a token's two all-reduces in every layer take."""
    moved = 2.0 * (tensor_parallel - 1) / tensor_parallel * BF16_BYTES * shape.hidden_size
    return 2.0 * shape.num_hidden_layers * moved / (LINK_SHARE * gpu.link_bytes_per_s)
