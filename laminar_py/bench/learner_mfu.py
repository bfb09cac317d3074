"""How much of a GPU a learner step uses: row `mfu`. Without a GPU there is a row without a value, and why."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from laminar_py.bench.learner_parts import draw_lengths, make_trajectory, pack_here
from laminar_py.bench.report import Row
from laminar_py.config.algorithm import AlgorithmConfig
from laminar_py.config.learner import LearnerConfig, Recompute
from laminar_py.config.model import ModelConfig
from laminar_py.learner.attention import choose_kernel
from laminar_py.learner.distributed import join_group, leave_group
from laminar_py.learner.step import Learner
from laminar_py.records.metrics import StepMetrics

WARM_STEPS = 2
SETTINGS = LearnerConfig(recompute=Recompute.SELECTIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A model and what a step of it is of; only tests use another than `FULL`."""

    model: PretrainedConfig
    settings: LearnerConfig = SETTINGS
    sequences: int = 32
    median: int = 1600
    max_tokens: int = 32_768  # of a microbatch; no sequence has more than half
    steps: int = 5


FULL = Load(
    model=Qwen3Config(  # 1.5 billion parameters
        vocab_size=151_936,
        hidden_size=1536,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=8960,
        tie_word_embeddings=True,
    )
)


def mfu_row(folder: Path, *, load: Load = FULL) -> Row:
    """Median over steps; `folder` takes the model."""
    unit = "of the peak of dense bf16"
    if not torch.cuda.is_available():
        return Row("mfu", None, unit, "not measured: no GPU")
    try:
        steps = measure_steps(folder, load, device_type="cuda")
    except torch.OutOfMemoryError:
        return Row("mfu", None, unit, f"not measured: out of memory on {torch.cuda.get_device_name()}")
    name, found = torch.cuda.get_device_name(), [step.mfu for step in steps if step.mfu is not None]
    conditions = f"{name}, {_conditions(load, steps)}"
    if not found:
        return Row("mfu", None, unit, f"not measured: the peak of this GPU is not known; {conditions}")
    return Row("mfu", statistics.median(found), unit, conditions)


def _conditions(load: Load, steps: Sequence[StepMetrics]) -> str:
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(load.model).parameters())
    return (
        f"one rank, {size / 1e9:.2f}G parameters, bf16 with fp32 masters, attention"
        f" {choose_kernel(torch.device('cuda'))}; {steps[-1].work.num_tokens:,} tokens a step of {load.sequences}"
        f" log-normal lengths (median {load.median}) in microbatches of at most {load.max_tokens:,},"
        f" recompute {load.settings.recompute}, compile {load.settings.compile};"
        f" {statistics.median(step.tokens_per_s for step in steps):,.0f} tokens/s,"
        f" {statistics.median(step.flops_per_s for step in steps) / 1e12:.0f} TFLOPS; median of {len(steps)} steps"
    )


def measure_steps(folder: Path, load: Load, *, device_type: str) -> Sequence[StepMetrics]:
    """Whole optimizer steps of one rank, after some that warm it up."""
    load.model.save_pretrained(folder / "mfu")
    (folder / "mfu" / "tokenizer.json").write_text("{}")  # the learner asks that there is one
    rendezvous = folder / "mfu-rendezvous"
    rendezvous.unlink(missing_ok=True)  # of a measurement before
    mesh = join_group(str(rendezvous), rank=0, world_size=1, device_type=device_type)
    try:
        model = ModelConfig(path=folder / "mfu", from_scratch=True)
        learner = Learner(model, load.settings, AlgorithmConfig(), temperature=1.0, seed=0, mesh=mesh)
        lengths = draw_lengths(load.sequences, median=load.median, seed=0, longest=load.max_tokens // 2)
        vocab = load.model.vocab_size
        items = [make_trajectory(index, length, vocab=vocab) for index, length in enumerate(lengths)]
        batches = pack_here(items, max_tokens=load.max_tokens)
        steps = [learner.step(batches) for _ in range(WARM_STEPS + load.steps)][WARM_STEPS:]
        assert all(step.skipped == 0 for step in steps), "a step without an update takes less time"
        return steps
    finally:
        leave_group()
