"""Whether the learner is right: packed against single gradients, engine against learner, replay against none.

Rows `packed_vs_single_grad`, `engine_mismatch_max` and `*_ratio_error*` of `laminar bench learner`.
"""

import asyncio
from collections.abc import Sequence
from copy import copy
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3MoeConfig

from laminar_py.bench.engine_local import MODEL
from laminar_py.bench.learner_parts import (
    MAX_TOKENS,
    draw_lengths,
    gradient,
    make_learner,
    make_trajectory,
    pack_here,
)
from laminar_py.bench.models import write_model
from laminar_py.bench.report import Row
from laminar_py.engines.local import LocalEngine
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.step import Learner
from laminar_py.store.recording import join_masks
from laminar_py.types import GenerateRequest, MicroBatch, Record, SamplingParams, Trajectory

LLAMA = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    max_position_embeddings=2048,
)
PEAKED = 0.05  # deviation of initial weights with which distributions are as uneven as those of a trained model
MIXTURE = Qwen3MoeConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=48,
    norm_topk_prob=True,
    initializer_range=0.1,
)
ROUTER_NOISE = 0.02  # on the logits that select experts, not on those that weigh them
CUT = {"top_k": 50, "top_p": 0.9, "min_p": 0.02}


def agreement_rows(folder: Path, *, model: PretrainedConfig, engine_tokens: int) -> list[Row]:
    """All of them; `folder` is for the models."""
    return [_gradients(folder), *_mismatch(folder, model, engine_tokens), *_router_replay(folder)]


def _gradients(folder: Path) -> Row:
    worst = 0.0
    for name, config in (("qwen3", MODEL), ("llama", LLAMA), ("mixture", MIXTURE)):
        learner = make_learner(write_model(folder / name, config))
        items = [
            make_trajectory(index, length) for index, length in enumerate(draw_lengths(12, median=40, seed=1))
        ]
        alone = gradient(learner, pack_here(items, max_tokens=1))
        for max_tokens in (sum(item.num_tokens for item in items), max(item.num_tokens for item in items)):
            packed = gradient(learner, pack_here(items, max_tokens=max_tokens))
            gaps = [(one - other).norm() / other.norm() for one, other in zip(packed, alone, strict=True)]
            worst = max(worst, float(torch.stack(gaps).max()))
    setting = "12 sequences in one microbatch and in several, Qwen3, Llama, Qwen3-MoE; largest over parameters"
    return Row("packed_vs_single_grad", worst, "of its norm", setting)


def _mismatch(folder: Path, config: PretrainedConfig, tokens: int) -> list[Row]:
    peaked = copy(config)
    peaked.initializer_range = PEAKED
    model = write_model(folder / "engine", peaked)
    learner = make_learner(model)
    whole = _gaps(learner, asyncio.run(_generate(model, tokens)))
    cut = asyncio.run(_generate(model, tokens, record=(Record.SAMPLING_MASK,), **CUT))
    replayed = _gaps(learner, cut)
    ignored = _gaps(learner, [msgspec.structs.replace(item, sampling_mask=None) for item in cut])
    setting = f"{tokens:,} sampled tokens of the embedded engine, fp32"
    kept = ", ".join(f"{name} {value:g}" for name, value in CUT.items())
    return [
        Row("engine_mismatch_max", float(np.abs(whole).max()), "nats", setting),
        Row("mask_replay_ratio_error", float(np.abs(np.expm1(replayed)).max()), "of 1", f"{setting}; {kept}"),
        Row(
            "mask_replay_ratio_error_without",
            float(np.abs(np.expm1(ignored)).mean()),
            "of 1, mean",
            f"{setting}; {kept}; the learner's softmax over the whole vocabulary",
        ),
    ]


def _router_replay(folder: Path) -> list[Row]:
    """The sampler is the learner itself with a perturbed choice of experts: nothing else differs."""
    learner = make_learner(write_model(folder / "routed", MIXTURE))
    [batch] = pack_here([make_trajectory(index, 100) for index in range(20)], max_tokens=2000)
    perturbed, flipped = _perturbed_choice(learner, batch)
    sampled = msgspec.structs.replace(batch, experts=perturbed)
    behaviour, replayed, ignored = (_logprobs(learner, one) for one in (sampled, sampled, batch))
    setting = f"Qwen3-MoE, 4 of 16 experts; noise on the selecting logits flips {flipped:.1%} of tokens a layer"
    error = float(np.abs(np.expm1(replayed - behaviour)).max())
    without = float(np.abs(np.expm1(ignored - behaviour)).max())
    return [
        Row("router_replay_ratio_error", error, "of 1", setting),
        Row("router_replay_ratio_error_without", without, "of 1", setting),
    ]


def _perturbed_choice(learner: Learner, batch: MicroBatch) -> tuple[np.ndarray, float]:
    """Experts [T, layers, k] under noise on the routers' logits, and the share of tokens whose set is another."""
    seen: list[Tensor] = []
    routers = [module for module in learner.model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _, __, output: seen.append(output[0])) for router in routers]
    _logprobs(learner, batch)
    for hook in hooks:
        hook.remove()
    logits = torch.stack(seen, 1)
    noise = ROUTER_NOISE * torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    top_k = MIXTURE.num_experts_per_tok
    own, other = (values.topk(top_k).indices.sort().values for values in (logits, logits + noise))
    return other.numpy().astype(np.int16), float((own != other).any(-1).float().mean())


def _logprobs(learner: Learner, batch: MicroBatch) -> np.ndarray:
    with torch.no_grad():
        return policy_logprobs(learner.model, batch)[0].numpy()[batch.loss_weights > 0]


async def _generate(
    model: Path, tokens: int, *, record: tuple[Record, ...] = (), **cut: float
) -> list[Trajectory]:
    length, prompt = 200, np.arange(1, 17, dtype=np.int32)
    engine = LocalEngine(model, max_batch=16, max_len=256, kv_capacity=4096, record=record)
    await engine.start()
    await engine.load_weights(model, 0)

    async def one(index: int) -> Trajectory:
        sampling = msgspec.structs.replace(SamplingParams(length, seed=index), **cut)
        request = GenerateRequest(f"t{index}", f"g{index}", prompt, np.empty(0, np.int32), sampling)
        deltas = [delta async for delta in engine.generate(request)]
        masks = [delta.sampling_mask for delta in deltas if delta.sampling_mask is not None]
        item = make_trajectory(index, length + len(prompt), prompt=prompt)
        return msgspec.structs.replace(
            item,
            response_ids=np.concatenate([delta.ids for delta in deltas]),
            logprobs=np.concatenate([delta.logprobs for delta in deltas]),
            sampling_mask=join_masks(masks) if masks else None,
        )

    found = await asyncio.gather(*(one(index) for index in range(-(-tokens // length))))
    await engine.close()
    return list(found)


def _gaps(learner: Learner, items: Sequence[Trajectory]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Learner minus engine log-probability of every token."""
    gaps = []
    for batch in pack_here(items, max_tokens=MAX_TOKENS):
        with torch.no_grad():
            logprobs, _ = policy_logprobs(learner.model, batch)
        gaps.append((logprobs.numpy() - batch.behaviour_logprobs)[batch.loss_weights > 0])
    return np.concatenate(gaps)
