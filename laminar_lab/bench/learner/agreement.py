"""Distance between engines and learner: the ratio of the learner's probability of a sampled token to the engine's.

Measured over the whole vocabulary, over a cut one, and with recorded experts, replayed and not.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig, Qwen3MoeConfig

from laminar_lab.bench.learner.parts import make_learner, pack_here
from laminar_lab.bench.learner.samples import MAX_LEN, Draw, find_sglang, sample_embedded, sample_sglang
from laminar_lab.bench.report import Row
from laminar_lab.bench.workplace import SMALL, workplace, write_model
from laminar_py.learner import Learner, policy_logprobs
from laminar_py.records import Recording, Trajectory
from laminar_py.records.codec import FloatArray
from laminar_py.records.trajectory import MicroBatch

ROWS = ("engine_mismatch_max", "mask_replay_ratio_error", "router_replay_ratio_error")
PEAKED = 0.05  # deviation of initial weights that makes distributions as uneven as a trained model's
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
ROUTER_NOISE = 0.02  # on the logits that choose experts, not on the ones that weigh them
TOKENS = 10_000  # sampled of each engine, at least
CUT = {"top_k": 50, "top_p": 0.9, "min_p": 0.02}


def rows(*, config: PretrainedConfig = SMALL, tokens: int = TOKENS, sglang: bool = True) -> list[Row]:
    """Measure all rows, with `tokens` sampled tokens of each engine."""
    python = find_sglang() if sglang else None
    return [*mismatch_rows(config, tokens, python), routing_row(tokens, python)]


def mismatch_rows(config: PretrainedConfig, tokens: int, python: Path | None) -> list[Row]:
    """Compare engines with the learner over the whole vocabulary and a cut one.

    SGLang too, where it is installed.
    """
    peaked = copy(config)
    peaked.initializer_range = PEAKED
    draws = (Draw(), Draw((Recording.SAMPLING_MASK,), CUT))
    with workplace() as folder:
        model = write_model(folder / "model", peaked)
        learner = make_learner(model)
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
    cuts = ", ".join(f"{name} {value:g}" for name, value in CUT.items())
    kept = f"{setting}; {cuts}; with the learner's softmax over the whole vocabulary, on average {_each(ignored)}"
    return [
        _largest("engine_mismatch_max", whole, "nats", setting),
        _largest("mask_replay_ratio_error", replayed, "of 1", kept),
    ]


def routing_row(tokens: int, python: Path | None) -> Row:
    """Compare with recorded experts. The embedded engine chooses them by noisy logits, SGLang without noise."""
    shape = (MAX_LEN, MIXTURE.num_hidden_layers, MIXTURE.num_experts)
    noise = ROUTER_NOISE * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    draw = Draw((Recording.ROUTED_EXPERTS,))
    with workplace() as folder:
        model = write_model(folder / "model", MIXTURE)
        learner = make_learner(model)
        [noisy] = sample_embedded(model, [draw], tokens=tokens, router_noise=noise)
        replayed = {"embedded": float(deviations(learner, noisy).max())}
        if python is not None:
            [own] = sample_sglang(model, [draw], tokens=tokens, python=python)
            replayed["SGLang (no noise)"] = float(deviations(learner, own).max())
    ignored = deviations(learner, [msgspec.structs.replace(item, routed_experts=None) for item in noisy])
    setting = (
        f"{tokens:,} sampled tokens, fp32; Qwen3-MoE, {MIXTURE.num_experts_per_tok} of {MIXTURE.num_experts}"
        f" experts; noise on the logits that choose flips {flipped(learner, noisy):.1%} of tokens in a layer;"
        f" without replay of the embedded engine's choice {ignored.max():.2g}"
    )
    return _largest("router_replay_ratio_error", replayed, "of 1", setting)


def _largest(name: str, by_engine: Mapping[str, float], unit: str, setting: str) -> Row:
    return Row(name, max(by_engine.values()), unit, f"{setting}; {_each(by_engine)}, the largest taken")


def _each(by_engine: Mapping[str, float]) -> str:
    return ", ".join(f"{engine} {value:.2g}" for engine, value in by_engine.items())


def deviations(learner: Learner, items: Sequence[Trajectory]) -> FloatArray:
    """Return the deviation of the ratio from 1, for every token."""
    return np.abs(np.expm1(_gaps(learner, items)))


def _gaps(learner: Learner, items: Sequence[Trajectory]) -> FloatArray:
    """Return the learner's log-probability minus the engine's, for every token."""
    gaps = []
    for batch in pack_here(items):
        logprobs = _logprobs(learner, batch)
        gaps.append((logprobs - batch.behaviour_logprobs)[batch.loss_weights > 0])
    return np.concatenate(gaps)


def _logprobs(learner: Learner, batch: MicroBatch) -> FloatArray:
    with torch.no_grad():
        found: FloatArray = policy_logprobs(learner.model, batch)[0].numpy()
    return found


def flipped(learner: Learner, items: Sequence[Trajectory]) -> float:
    """Return the share of positions, over layers, whose recorded experts are not the learner's own choice."""
    seen: list[Tensor] = []
    routers = [module for module in learner.model.modules() if type(module).__name__.endswith("TopKRouter")]
    hooks = [router.register_forward_hook(lambda _, __, output: seen.append(output[0])) for router in routers]
    flips = []
    for batch in pack_here(items):
        seen.clear()
        _logprobs(learner, batch)
        assert batch.experts is not None, "experts were recorded"
        own = torch.stack(seen, 1).topk(batch.experts.shape[-1]).indices.sort().values.numpy()
        routed = batch.experts[:, 0, 0] >= 0
        flips.append((np.sort(batch.experts, -1) != own).any(-1)[routed])
    for hook in hooks:
        hook.remove()
    return float(np.concatenate(flips).mean())
