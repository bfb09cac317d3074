"""Packed sequences beside padded ones, a mixture beside a dense model, and how well a large step is packed.

Fill is the fewest microbatches that equal counts on all ranks allow, `ranks * ceil(tokens / (ranks *
max_tokens))`, over the used ones. Imbalance is the sum over microbatch indices of the slowest rank's FLOPs, over
the mean of the ranks, since collectives make every index a barrier.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen3MoeConfig

from laminar_lab.bench import context, prefixes
from laminar_lab.bench.report import Ratio, Row, Side, cpu_s, in_turn, load_now
from laminar_lab.bench.workplace import SMALL, count_parameters, log_normal_lengths, workplace, write_model
from laminar_lab.calibration.learner import make_trajectory
from laminar_py.config import AlgorithmConfig
from laminar_py.config.algorithm import Aggregation
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig, Recompute
from laminar_py.learner import Learner, policy_logprobs
from laminar_py.learner.losses import token_logprobs
from laminar_py.learner.packing import Packed, attention_share, pack, sequence_cost
from laminar_py.records import Trajectory

ROWS = (
    *("packed_over_padded", "packed_over_sorted", "moe_step_over_dense", "offloaded_over_kept"),
    *("fill", "capacity_used", "imbalance", "pack_2048_ms"),
    *(f"tree_{figure}_{shape}" for shape in prefixes.SHAPES for figure in ("over_separate", "memory")),
    *(f"cp{ranks}_{figure}" for ranks in context.SHARING for figure in ("activation_share", "cpu_over_alone")),
)
SEQUENCES, MEDIAN, LONGEST = 64, 128, 1024  # of a batch that is trained on
SIGMA = float(np.log(5) / 1.645)  # p95 = 5 * p50
MAX_TOKENS = 2048  # of a microbatch that is trained on
PADDED_ROWS = 8
EXPERTS, CHOSEN = 32, 8  # of a mixture, whose chosen experts are together as wide as the dense model's MLP
PACKED_TOKENS, PACKED_RANKS = 16_384, 8  # of a large step that is packed
QWEN_7B = attention_share(hidden_size=3584, num_layers=28, num_parameters=7_615_616_512)


def rows(
    *,
    repeats: int = 3,
    sequences: int = 2048,
    seeds: int = 100,
    model: PretrainedConfig = SMALL,
    rank_tokens: int = 8192,
    prefix_scale: int = 1,
) -> list[Row]:
    """Train on `repeats` batches in each way, and pack large steps of `sequences` for `seeds` seeds.

    Ranks that share a row have `rank_tokens` of it each. Samples of a prompt are `prefix_scale` times as short.
    """
    return [
        *_speed_rows(model, repeats=repeats),
        *_mixture_rows(model, repeats=repeats),
        *_offload_rows(model, repeats=repeats),
        *_packing_rows(sequences=sequences, seeds=seeds),
        *prefixes.rows(repeats=repeats, scale=prefix_scale, config=model),
        *context.rows(repeats=repeats, tokens=rank_tokens),
    ]


# ---- packed beside padded


def _speed_rows(config: PretrainedConfig, *, repeats: int) -> list[Row]:
    """Compare real tokens a CPU second of forward and backward, packed with padded."""
    with workplace() as folder:
        model = ModelConfig(path=write_model(folder, config))
        learner = Learner(model, LearnerConfig(), AlgorithmConfig(), temperature=1.0, seed=0)
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)

    def packed(number: int) -> float:
        items = _draw_batch(number)
        return sum(item.num_tokens for item in items) / cpu_s(lambda: _train_packed(learner, items))

    def padded(number: int) -> float:
        items = _draw_batch(number)
        return sum(item.num_tokens for item in items) / cpu_s(lambda: _train_padded(plain, items))

    def by_length(number: int) -> float:
        items = sorted(_draw_batch(number), key=lambda item: item.num_tokens)
        return sum(item.num_tokens for item in items) / cpu_s(lambda: _train_padded(plain, items))

    rates = in_turn({"packed": packed, "padded": padded, "sorted": by_length}, rounds=repeats)
    setting = (
        f"arrays, forward and backward; {SEQUENCES} log-normal lengths (median {MEDIAN}, p95 5 times that),"
        f" {count_parameters(config) / 1e6:.0f}M parameters, fp32; padded: {PADDED_ROWS} rows each to its longest;"
        f" packed {median(rates['packed']):,.0f} real tokens a CPU second; median of {repeats} batches"
    )
    over = {name: Ratio.between(rates["packed"], rates[name]).median for name in ("padded", "sorted")}
    return [
        Row("packed_over_padded", over["padded"], "x, in order of arrival", setting),
        Row("packed_over_sorted", over["sorted"], "x, padded rows sorted by length", setting),
    ]


def _offload_rows(config: PretrainedConfig, *, repeats: int) -> list[Row]:
    """Compare the CPU seconds of layers whose inputs go to the host and back with layers that keep them."""
    with workplace() as folder:
        model = ModelConfig(path=write_model(folder, config))
        offloading, keeping = (
            Learner(model, LearnerConfig(recompute=kind), AlgorithmConfig(), temperature=1.0, seed=0)
            for kind in (Recompute.ALL_OFFLOADED, Recompute.ALL)
        )

    def measure(learner: Learner, number: int) -> float:
        return cpu_s(lambda: _train_packed(learner, _draw_batch(number)[::4]))

    sides = {"offloaded": partial(measure, offloading), "kept": partial(measure, keeping)}
    times = in_turn(sides, rounds=repeats, warm=1)
    over = Ratio.between(times["offloaded"], times["kept"]).median
    setting = f"learner.recompute all_offloaded over all, CPU s of a quarter of each batch; median of {repeats}"
    return [Row("offloaded_over_kept", over, "x, copies on a CPU", setting)]


def _draw_batch(number: int) -> list[Trajectory]:
    """Draw the trajectories of a round."""
    rng = np.random.default_rng(number)
    lengths = log_normal_lengths(rng, SEQUENCES, median=MEDIAN, sigma=SIGMA, cap=LONGEST, least=4)
    return [make_trajectory(index, length) for index, length in enumerate(lengths)]


def _train_packed(learner: Learner, items: Sequence[Trajectory]) -> None:
    """Pack, and run forward and backward of a policy-gradient loss."""
    packed = pack(items, max_tokens=MAX_TOKENS, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.0)
    for batch in packed.microbatches(0):
        logprobs, _ = policy_logprobs(learner.model, batch)
        (torch.tensor(batch.loss_weights * batch.advantages) * logprobs).sum().backward()  # type: ignore[no-untyped-call]
    learner.model.zero_grad()


def _train_padded(model: PreTrainedModel, items: Sequence[Trajectory]) -> None:
    """Run forward and backward of the packed side's loss on padded rows."""
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
        logprobs, _ = token_logprobs(hidden.flatten(0, 1), model.get_output_embeddings().weight, labels)
        (weights.flatten() * logprobs).sum().backward()  # type: ignore[no-untyped-call]
    model.zero_grad()


# ---- a mixture beside a dense model


def _mixture_rows(dense: PretrainedConfig, *, repeats: int) -> list[Row]:
    """Compare CPU seconds of a learner step on one full row: a mixture over a dense model of its active size."""
    sizes = {name: value for name, value in dense.to_dict().items() if name != "model_type"}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "norm_topk_prob": True}
    mixture = Qwen3MoeConfig(**sizes, **experts, moe_intermediate_size=dense.intermediate_size // CHOSEN)
    items = [make_trajectory(index, 256) for index in range(MAX_TOKENS // 256)]
    packed = pack(items, max_tokens=MAX_TOKENS, ranks=1, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.0)
    batches = packed.microbatches(0)

    def side(config: PretrainedConfig) -> Side:
        with workplace() as folder:
            model = ModelConfig(path=write_model(folder, config))
            learner = Learner(model, LearnerConfig(), AlgorithmConfig(), temperature=1.0, seed=0)
        return lambda _: cpu_s(lambda: learner.step(batches))

    seconds = in_turn({"mixture": side(mixture), "dense": side(dense)}, rounds=repeats, warm=1)
    setting = (
        f"CPU seconds of a step of {MAX_TOKENS:,} tokens with AdamW, fp32; {EXPERTS} experts, {CHOSEN} a token,"
        f" {count_parameters(mixture) / 1e6:.0f}M parameters; dense: {count_parameters(dense) / 1e6:.0f}M,"
        f" {median(seconds['dense']):.1f} s"
    )
    return [Ratio.between(seconds["mixture"], seconds["dense"]).row("moe_step_over_dense", setting)]


# ---- packing of a large step


@dataclass(frozen=True, slots=True)
class PackingQuality:
    """Quality of a packing, in shares."""

    fill: float  # lower bound of microbatches over the used ones
    capacity: float  # tokens over the capacity of the used microbatches
    imbalance: float


def _packing_rows(*, sequences: int, seeds: int) -> list[Row]:
    qualities, times_s = [], []
    for seed in range(seeds):
        items = draw_step(seed, sequences)
        began = time.perf_counter()
        packed = pack_step(items)
        times_s.append(time.perf_counter() - began)
        qualities.append(quality(packed, max_tokens=PACKED_TOKENS))
    setting = (
        f"{sequences} log-normal lengths (median 2,048, sigma 0.99, cap 16,384), {PACKED_TOKENS} tokens a"
        f" microbatch, {PACKED_RANKS} ranks, 7B coefficients, median of {seeds} seeds, {load_now()}"
    )
    planning = f"{setting}; planning alone, since the ranks write the arrays"
    return [
        Row("fill", median(each.fill for each in qualities), "of lower bound", setting),
        Row("capacity_used", median(each.capacity for each in qualities), "of tokens", setting),
        Row("imbalance", median(each.imbalance for each in qualities), "slowest/mean", setting),
        Row("pack_2048_ms", median(times_s) * 1e3, "ms", planning),
    ]


def draw_step(seed: int, count: int) -> list[Trajectory]:
    """Draw the trajectories of a large step."""
    rng = np.random.default_rng(seed)
    lengths = log_normal_lengths(rng, count, median=2048, cap=PACKED_TOKENS, least=2)
    return [make_trajectory(index, length) for index, length in enumerate(lengths)]


def pack_step(
    items: Sequence[Trajectory], *, max_tokens: int = PACKED_TOKENS, ranks: int = PACKED_RANKS
) -> Packed[Trajectory]:
    """Pack a step with the coefficients of a 7B model."""
    return pack(
        items,
        max_tokens=max_tokens,
        ranks=ranks,
        aggregation=Aggregation.SEQUENCE_MEAN,
        attention_share=QWEN_7B,
    )


def quality(packed: Packed[Trajectory], *, max_tokens: int) -> PackingQuality:
    """Compute fill, use of capacity and imbalance of a packed step."""
    lengths = [[[item.num_tokens for item in bundle] for bundle in bundles] for bundles in packed.bundles]
    costs = np.array(
        [
            [sum(sequence_cost(length, attention_share=QWEN_7B) for length in bundle) for bundle in bundles]
            for bundles in lengths
        ]
    )
    tokens = sum(sum(bundle) for bundles in lengths for bundle in bundles)
    ranks, used = costs.shape
    return PackingQuality(
        fill=-(-tokens // (ranks * max_tokens)) / used,
        capacity=tokens / (ranks * used * max_tokens),
        imbalance=float(costs.max(axis=0).sum() / costs.sum(axis=1).mean()),
    )
