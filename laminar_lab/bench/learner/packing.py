"""Packed sequences beside single ones and padded batches: gradients, and real tokens a CPU second."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel

from laminar_lab.bench.learner.agreement import MIXTURE
from laminar_lab.bench.learner.parts import (
    MAX_TOKENS,
    draw_lengths,
    gradient,
    make_learner,
    make_trajectories,
    pack_here,
)
from laminar_lab.bench.report import Ratio, Row, cpu_s, in_turn
from laminar_lab.bench.workplace import SMALL, count_parameters, workplace, write_model
from laminar_py.learner import Learner
from laminar_py.learner.losses import token_logprobs
from laminar_py.records import Trajectory

ROWS = ("packed_vs_single_grad", "packed_over_padded", "packed_over_sorted")


@dataclass(frozen=True, slots=True)
class StepBatches:
    """Batches of log-normal lengths, another for each round."""

    model: PretrainedConfig
    sequences: int = 64
    median: int = 128
    repeats: int = 3

    def draw(self, number: int) -> list[Trajectory]:
        """Draw the trajectories of a round."""
        lengths = draw_lengths(self.sequences, median=self.median, seed=number)
        return make_trajectories(lengths, vocab=self.model.vocab_size)

    def conditions(self) -> str:
        """Describe the batches."""
        return (
            f"arrays, forward and backward; {self.sequences} log-normal lengths (median {self.median}, p95 5 times"
            f" that), {count_parameters(self.model) / 1e6:.0f}M parameters, fp32; median of {self.repeats} batches"
        )


FULL = StepBatches(SMALL)


def rows(*, batches: StepBatches = FULL, models: Mapping[str, PretrainedConfig] | None = None) -> list[Row]:
    """Compare gradients of `models`, and speeds on `batches`."""
    return gradient_rows(MODELS if models is None else models) + speed_rows(batches)


def _packed_tokens_per_s(learner: Learner, items: list[Trajectory]) -> float:
    """Train on packed trajectories; return tokens a CPU second, packing included."""
    took_s = cpu_s(lambda: gradient(learner, pack_here(items, max_tokens=MAX_TOKENS)))
    return sum(item.num_tokens for item in items) / took_s


LLAMA = LlamaConfig(
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=128,
    max_position_embeddings=2048,
)
MODELS: Mapping[str, PretrainedConfig] = {"qwen3": SMALL, "llama": LLAMA, "mixture": MIXTURE}
PADDED_ROWS = 8


def gradient_rows(models: Mapping[str, PretrainedConfig]) -> list[Row]:
    """Measure the largest deviation of a parameter's gradient on packed sequences from single ones."""
    worst = 0.0
    items = make_trajectories(draw_lengths(12, median=40, seed=1))
    for config in models.values():
        with workplace() as folder:
            learner = make_learner(write_model(folder, config))
        alone = gradient(learner, pack_here(items, max_tokens=1))
        for max_tokens in (sum(item.num_tokens for item in items), max(item.num_tokens for item in items)):
            packed = gradient(learner, pack_here(items, max_tokens=max_tokens))
            gaps = [(one - other).norm() / other.norm() for one, other in zip(packed, alone, strict=True)]
            worst = max(worst, float(torch.stack(gaps).max()))
    setting = "12 sequences in one microbatch and in several, Qwen3, Llama, Qwen3-MoE; largest over parameters"
    return [Row("packed_vs_single_grad", worst, "of its norm", setting)]


def speed_rows(batches: StepBatches) -> list[Row]:
    """Compare real tokens a CPU second, packed with padded."""
    with workplace() as folder:
        learner = make_learner(write_model(folder, batches.model))
        plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)

    def padded(order: Callable[[Sequence[Trajectory]], Sequence[Trajectory]], number: int) -> float:
        items = order(batches.draw(number))
        return sum(item.num_tokens for item in items) / cpu_s(lambda: _train_padded(plain, items))

    sides = {
        "packed": lambda number: _packed_tokens_per_s(learner, batches.draw(number)),
        "padded": lambda number: padded(list, number),
        "sorted": lambda number: padded(_by_length, number),
    }
    rates = in_turn(sides, rounds=batches.repeats)
    over = {name: Ratio.between(rates["packed"], rates[name]) for name in ("padded", "sorted")}
    speed = f"packed {statistics.median(rates['packed']):,.0f} real tokens a CPU second"
    setting = f"{batches.conditions()}; padded: {PADDED_ROWS} rows each to its longest; {speed}"
    return [
        Row("packed_over_padded", over["padded"].median, "x, in order of arrival", setting),
        Row("packed_over_sorted", over["sorted"].median, "x, padded rows sorted by length", setting),
    ]


def _by_length(items: Sequence[Trajectory]) -> Sequence[Trajectory]:
    return sorted(items, key=lambda item: item.num_tokens)


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
