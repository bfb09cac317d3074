"""What `laminar bench learner` measures: that packing is right, what it saves, how near engine and learner are.

Everything runs on the CPU, one thread a process, fp32. Speed is in CPU seconds, taken in turns, so that a busy
machine changes ratios little.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from laminar_py.algorithm import Aggregation, AlgorithmConfig
from laminar_py.bench.engine_local import MODEL
from laminar_py.bench.models import write_model
from laminar_py.bench.report import Row
from laminar_py.config import LearnerConfig, ModelConfig
from laminar_py.engines.local import LocalEngine
from laminar_py.learner.logprob import token_logprobs
from laminar_py.learner.model import policy_logprobs
from laminar_py.learner.step import Learner
from laminar_py.repack.packer import pack
from laminar_py.store.recording import join_masks
from laminar_py.types import (
    FinishReason,
    GenerateRequest,
    Kind,
    MicroBatch,
    Record,
    SamplingParams,
    Span,
    Trajectory,
)

MAX_TOKENS = 2048
PADDED_ROWS = 8
SIGMA = float(np.log(5) / 1.645)  # p95 = 5 * p50
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


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured; only tests use another than `FULL`."""

    model: PretrainedConfig
    sequences: int = 64
    median: int = 128
    repeats: int = 3
    engine_tokens: int = 10_000
    memory: tuple[int, int, int] = (8192, 32_768, 512)  # T, V, H


FULL = Scale(MODEL)


def rows(*, tell: Callable[[str], None], scale: Scale = FULL) -> list[Row]:
    """All figures; `tell` hears of each part. About ten minutes."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        tell("packed against one by one")
        out = [_gradients(Path(folder))]
        tell("engine against learner")
        out += _mismatch(Path(folder), scale)
        out += _router_replay(Path(folder))
        tell("packed against padded")
        out += _throughput(Path(folder), scale)
        tell("memory of log-probabilities")
        return [*out, _memory(scale)]


# ---- packed against one by one


def _gradients(folder: Path) -> Row:
    worst = 0.0
    for name, config in (("qwen3", MODEL), ("llama", LLAMA), ("mixture", MIXTURE)):
        learner = _learner(write_model(folder / name, config))
        items = [_trajectory(index, length) for index, length in enumerate(_lengths(12, median=40, seed=1))]
        alone = _gradient(learner, pack_here(items, max_tokens=1))
        for max_tokens in (sum(item.num_tokens for item in items), max(item.num_tokens for item in items)):
            packed = _gradient(learner, pack_here(items, max_tokens=max_tokens))
            gaps = [(one - other).norm() / other.norm() for one, other in zip(packed, alone, strict=True)]
            worst = max(worst, float(torch.stack(gaps).max()))
    setting = "12 sequences in one microbatch and in several, Qwen3, Llama, Qwen3-MoE; largest over parameters"
    return Row("packed_vs_single_grad", worst, "of its norm", setting)


def pack_here(items: Sequence[Trajectory], *, max_tokens: int) -> list[MicroBatch]:
    """Microbatches of one rank; one for each sequence where `max_tokens` holds none."""
    if max_tokens < max(item.num_tokens for item in items):
        step = pack(items, max_tokens=10**9, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.0)
        return [msgspec.structs.replace(step, bundles=[[[item]]]).microbatches(0)[0] for item in items]
    packed = pack(items, max_tokens=max_tokens, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.0)
    return list(packed.microbatches(0))


def _gradient(learner: Learner, batches: Sequence[MicroBatch]) -> list[Tensor]:
    for batch in batches:
        logprobs, _ = policy_logprobs(learner.model, batch)
        (torch.tensor(batch.loss_weights * batch.advantages) * logprobs).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.clone() for p in learner.model.parameters() if p.grad is not None]
    learner.model.zero_grad()
    return gradients


# ---- engine against learner


def _mismatch(folder: Path, scale: Scale) -> list[Row]:
    peaked = copy(scale.model)
    peaked.initializer_range = PEAKED
    model = write_model(folder / "engine", peaked)
    learner = _learner(model)
    whole = _gaps(learner, asyncio.run(_generate(model, scale.engine_tokens)))
    cut = asyncio.run(_generate(model, scale.engine_tokens, record=(Record.SAMPLING_MASK,), **CUT))
    replayed = _gaps(learner, cut)
    ignored = _gaps(learner, [msgspec.structs.replace(item, sampling_mask=None) for item in cut])
    setting = f"{scale.engine_tokens:,} sampled tokens of the embedded engine, fp32"
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
    learner = _learner(write_model(folder / "routed", MIXTURE))
    [batch] = pack_here([_trajectory(index, 100) for index in range(20)], max_tokens=2000)
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
        item = _trajectory(index, length + len(prompt), prompt=prompt)
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


# ---- packed against padded


def _throughput(folder: Path, scale: Scale) -> list[Row]:
    model = write_model(folder / "speed", scale.model)
    learner, plain = _learner(model), _plain(model)
    packed, padded, ordered = [], [], []
    for repeat in range(scale.repeats):
        lengths = _lengths(scale.sequences, median=scale.median, seed=repeat)
        items = [_trajectory(index, length, vocab=scale.model.vocab_size) for index, length in enumerate(lengths)]
        tokens = sum(lengths)
        by_length = sorted(items, key=lambda item: item.num_tokens)
        packed.append(tokens / _cpu_s(partial(_train_packed, learner, items)))
        padded.append(tokens / _cpu_s(partial(_train_padded, plain, items)))
        ordered.append(tokens / _cpu_s(partial(_train_padded, plain, by_length)))
    setting = (
        f"forward and backward, {scale.sequences} log-normal lengths (median {scale.median}, p95 5 times that),"
        f" 25M parameters, fp32; padded: {PADDED_ROWS} rows each to its longest; median of {scale.repeats} batches"
    )
    return [
        Row("packed_tokens_per_s", statistics.median(packed), "real tokens/CPU-s", setting),
        Row("packed_over_padded", _over(packed, padded), "x, in order of arrival", setting),
        Row("packed_over_sorted", _over(packed, ordered), "x, padded rows sorted by length", setting),
    ]


def _train_packed(learner: Learner, items: Sequence[Trajectory]) -> None:
    _gradient(learner, pack_here(items, max_tokens=MAX_TOKENS))


def _train_padded(model: PreTrainedModel, items: Sequence[Trajectory]) -> None:
    """The same loss on rows that are filled up to the longest of them."""
    for first in range(0, len(items), PADDED_ROWS):
        rows = items[first : first + PADDED_ROWS]
        longest = max(item.num_tokens for item in rows)
        ids, mask = (torch.zeros(len(rows), longest, dtype=torch.long) for _ in range(2))
        weights = torch.zeros(len(rows), longest)
        for row, item in enumerate(rows):
            both = np.concatenate([item.prompt_ids, item.response_ids])
            ids[row, : len(both)], mask[row, : len(both)] = torch.tensor(both), 1
            weights[row, len(item.prompt_ids) - 1 : len(both) - 1] = 1
        hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        labels = torch.roll(ids, -1, dims=1).flatten()
        head = model.get_output_embeddings().weight
        logprobs, _ = token_logprobs(hidden.flatten(0, 1), head, labels)
        (weights.flatten() * logprobs).sum().backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


def _cpu_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def _over(one: Sequence[float], other: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


# ---- memory


def _memory(scale: Scale) -> Row:
    tokens, vocab, width = scale.memory
    naive, chunked = (_peak_bytes(naive, scale.memory) for naive in (True, False))
    setting = (
        f"log-probability and entropy, forward and backward, T {tokens:,}, V {vocab:,}, H {width}, fp32; above"
        " what the inputs take"
    )
    return Row("logprob_memory_over_naive", chunked / naive, "of peak memory", setting)


def _peak_bytes(naive: bool, sizes: tuple[int, int, int]) -> int:
    """In a process of its own, which has allocated nothing yet."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(_measure_peak, (naive, sizes))


def _measure_peak(naive: bool, sizes: tuple[int, int, int]) -> int:
    torch.set_num_threads(1)
    tokens, vocab, width = sizes
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    token_logprobs(hidden[:8], weight, labels[:8])[0].sum().backward()  # type: ignore[no-untyped-call]
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _resident_bytes("VmRSS")
    if naive:
        logp = torch.log_softmax(hidden @ weight.t(), dim=-1)
        logprobs, entropy = logp.gather(1, labels[:, None]), -(logp.exp() * logp).sum(-1)
    else:
        logprobs, entropy = token_logprobs(hidden, weight, labels)
    (logprobs.sum() + entropy.sum()).backward()  # type: ignore[no-untyped-call]
    return _resident_bytes("VmHWM") - before


def _resident_bytes(which: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{which}:")]
    return 1024 * int(line.split()[1])


# ---- parts


def _plain(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)


def _learner(folder: Path) -> Learner:
    return Learner(ModelConfig(path=folder), LearnerConfig(), AlgorithmConfig(), temperature=1.0, seed=0)


def _lengths(count: int, *, median: int, seed: int) -> list[int]:
    """Prompt and response together."""
    normal = np.random.default_rng(seed).standard_normal(count)
    lengths: list[int] = np.clip(np.rint(median * np.exp(SIGMA * normal)), 4, 1024).astype(int).tolist()
    return lengths


def _trajectory(index: int, length: int, *, vocab: int = 512, prompt: np.ndarray | None = None) -> Trajectory:
    generator = np.random.default_rng(index)
    first = generator.integers(1, vocab, max(1, length // 8)).astype(np.int32) if prompt is None else prompt
    count = length - len(first)
    return Trajectory(
        f"t{index}.0",
        f"p{index}",
        f"t{index}",
        0,
        Kind.TRAIN,
        first,
        generator.integers(1, vocab, count).astype(np.int32),
        np.zeros(count, np.float32),
        np.ones(count, np.bool_),
        (Span(0, 0, count),),
        FinishReason.STOP,
        1.0,
        advantage=float(generator.normal()),
    )
