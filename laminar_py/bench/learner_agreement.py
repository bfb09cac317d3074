"""Whether the learner is right: packed against single gradients, engines against learner, replay against none.

Rows `packed_vs_single_grad`, `engine_mismatch_max` and `*_ratio_error*` of `laminar bench learner`. A ratio is of
the learner's probability of a sampled token to the engine's.
"""

from collections.abc import Mapping, Sequence
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
from laminar_py.bench.learner_samples import MAX_LEN, Draw, sample_embedded, sample_sglang
from laminar_py.bench.models import write_model
from laminar_py.bench.report import Row
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.step import Learner
from laminar_py.records.batch import MicroBatch
from laminar_py.records.codec import FloatArray
from laminar_py.records.recordings import Recording
from laminar_py.records.trajectory import Trajectory

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
ROUTER_NOISE = 0.02  # on the logits that choose experts, not on those that weigh them
CUT = {"top_k": 50, "top_p": 0.9, "min_p": 0.02}


def agreement_rows(folder: Path, *, model: PretrainedConfig, engine_tokens: int, python: Path | None) -> list[Row]:
    """All of them; `folder` is for the models, `python` has SGLang."""
    return [
        _gradients(folder),
        *_mismatch(folder, model, engine_tokens, python),
        *_router_replay(folder, engine_tokens, python),
    ]


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


def _mismatch(folder: Path, config: PretrainedConfig, tokens: int, python: Path | None) -> list[Row]:
    """Engines against learner over the whole vocabulary, and over a cut one."""
    peaked = copy(config)
    peaked.initializer_range = PEAKED
    model = write_model(folder / "engine", peaked)
    learner = make_learner(model)
    draws = (Draw(), Draw((Recording.SAMPLING_MASK,), CUT))
    sampled = {"embedded": sample_embedded(model, draws, tokens=tokens)}
    if python is not None:
        sampled["SGLang"] = sample_sglang(model, draws, tokens=tokens, python=python)
    whole, replayed, ignored = {}, {}, {}
    for engine, (plain, cut) in sampled.items():
        whole[engine] = float(np.abs(_gaps(learner, plain)).max())
        replayed[engine] = float(deviations(learner, cut).max())
        without = [msgspec.structs.replace(item, sampling_mask=None) for item in cut]
        ignored[engine] = float(deviations(learner, without).mean())
    setting = f"{tokens:,} sampled tokens, fp32"
    kept = f"{setting}; {', '.join(f'{name} {value:g}' for name, value in CUT.items())}"
    return [
        _largest("engine_mismatch_max", whole, "nats", setting),
        _largest("mask_replay_ratio_error", replayed, "of 1", kept),
        Row(
            "mask_replay_ratio_error_without",
            min(ignored.values()),
            "of 1, mean",
            f"{kept}; the learner's softmax over the whole vocabulary; {_each(ignored)}, the smallest taken",
        ),
    ]


def _router_replay(folder: Path, tokens: int, python: Path | None) -> list[Row]:
    """The embedded engine chooses experts by noisy logits, SGLang by its own, which may be the learner's."""
    model = write_model(folder / "routed", MIXTURE)
    learner = make_learner(model)
    shape = (MAX_LEN, MIXTURE.num_hidden_layers, MIXTURE.num_experts)
    noise = ROUTER_NOISE * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    draw = Draw((Recording.ROUTED_EXPERTS,))
    [noisy] = sample_embedded(model, [draw], tokens=tokens, router_noise=noise)
    replayed = {"embedded": float(deviations(learner, noisy).max())}
    if python is not None:
        [own] = sample_sglang(model, [draw], tokens=tokens, python=python)
        replayed["SGLang (no noise)"] = float(deviations(learner, own).max())
    ignored = deviations(learner, [msgspec.structs.replace(item, routed_experts=None) for item in noisy])
    setting = (
        f"{tokens:,} sampled tokens, fp32; Qwen3-MoE, {MIXTURE.num_experts_per_tok} of {MIXTURE.num_experts}"
        f" experts; noise on the logits that choose flips {flipped(learner, noisy):.1%} of tokens in a layer"
    )
    return [
        _largest("router_replay_ratio_error", replayed, "of 1", setting),
        Row("router_replay_ratio_error_without", float(ignored.max()), "of 1", f"{setting}; embedded"),
    ]


def _largest(name: str, by_engine: Mapping[str, float], unit: str, setting: str) -> Row:
    return Row(name, max(by_engine.values()), unit, f"{setting}; {_each(by_engine)}, the largest taken")


def _each(by_engine: Mapping[str, float]) -> str:
    return ", ".join(f"{engine} {value:.2g}" for engine, value in by_engine.items())


def deviations(learner: Learner, items: Sequence[Trajectory]) -> FloatArray:
    """|ratio - 1| of every token."""
    return np.abs(np.expm1(_gaps(learner, items)))


def _gaps(learner: Learner, items: Sequence[Trajectory]) -> FloatArray:
    """Learner minus engine log-probability of every token."""
    gaps = []
    for batch in pack_here(items, max_tokens=MAX_TOKENS):
        logprobs = _logprobs(learner, batch)
        gaps.append((logprobs - batch.behaviour_logprobs)[batch.loss_weights > 0])
    return np.concatenate(gaps)


def _logprobs(learner: Learner, batch: MicroBatch) -> FloatArray:
    with torch.no_grad():
        found: FloatArray = policy_logprobs(learner.model, batch)[0].numpy()
    return found


def flipped(learner: Learner, items: Sequence[Trajectory]) -> float:
    """Share of positions, layer by layer, whose recorded experts are not the first by the learner's own logits."""
    seen: list[Tensor] = []
    routers = [module for module in learner.model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _, __, output: seen.append(output[0])) for router in routers]
    flips = []
    for batch in pack_here(items, max_tokens=MAX_TOKENS):
        seen.clear()
        _logprobs(learner, batch)
        assert batch.experts is not None, "experts were recorded"
        own = torch.stack(seen, 1).topk(batch.experts.shape[-1]).indices.sort().values.numpy()
        routed = batch.experts[:, 0, 0] >= 0
        flips.append((np.sort(batch.experts, -1) != own).any(-1)[routed])
    for hook in hooks:
        hook.remove()
    return float(np.concatenate(flips).mean())
