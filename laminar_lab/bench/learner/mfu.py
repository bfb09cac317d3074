"""Share of a GPU that a learner step uses. Without a GPU the row has no value, and says why."""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig, Qwen3Config

from laminar_lab.bench.learner.parts import draw_lengths, make_trajectories, pack_here
from laminar_lab.bench.report import Row
from laminar_lab.bench.workplace import count_parameters, workplace, write_no_tokenizer
from laminar_py.config import AlgorithmConfig
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig, Recompute
from laminar_py.learner import Learner, choose_kernel, join_group, leave_group
from laminar_py.records.metrics import StepMetrics

ROWS = ("mfu",)
WARM_STEPS = 2
SETTINGS = LearnerConfig(recompute=Recompute.SELECTIVE)
UNIT = "of the peak of dense bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStep:
    """A model and the size of its steps; only tests use another than `FULL`."""

    model: PretrainedConfig
    settings: LearnerConfig = SETTINGS
    sequences: int = 32
    median: int = 1600
    max_tokens: int = 32_768  # of a microbatch; no sequence has more than half
    steps: int = 5


FULL = GpuStep(
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


def rows(*, size: GpuStep = FULL) -> list[Row]:
    """Measure the median over steps, in one row."""
    return [_on_gpu(size) if torch.cuda.is_available() else Row("mfu", None, UNIT, "not measured: no GPU")]


def _on_gpu(size: GpuStep) -> Row:
    """Measure on the GPU; the row has no value where memory is short or the GPU's peak is unknown."""
    name = torch.cuda.get_device_name()
    try:
        with workplace() as folder:
            steps = measure_steps(folder, size, device_type="cuda")
    except torch.OutOfMemoryError:
        return Row("mfu", None, UNIT, f"not measured: out of memory on {name}")
    found = [step.mfu for step in steps if step.mfu is not None]
    conditions = f"{name}, {_conditions(size, steps)}"
    if not found:
        return Row("mfu", None, UNIT, f"not measured: the peak of this GPU is not known; {conditions}")
    return Row("mfu", statistics.median(found), UNIT, conditions)


def _conditions(size: GpuStep, steps: Sequence[StepMetrics]) -> str:
    return (
        f"one rank, {count_parameters(size.model) / 1e9:.2f}G parameters, bf16 with fp32 masters, attention"
        f" {choose_kernel(torch.device('cuda'))}; {steps[-1].work.num_tokens:,} tokens a step of {size.sequences}"
        f" log-normal lengths (median {size.median}) in microbatches of at most {size.max_tokens:,},"
        f" recompute {size.settings.recompute}, compile {size.settings.compile};"
        f" {statistics.median(step.tokens_per_s for step in steps):,.0f} tokens/s,"
        f" {statistics.median(step.flops_per_s for step in steps) / 1e12:.0f} TFLOPS; median of {len(steps)} steps"
    )


def measure_steps(folder: Path, size: GpuStep, *, device_type: str) -> Sequence[StepMetrics]:
    """Make whole optimizer steps of one rank, after warm steps, which do not count in CUDA's peak of memory."""
    with open_learner(folder, size, device_type=device_type) as learner:
        lengths = draw_lengths(size.sequences, median=size.median, seed=0, longest=size.max_tokens // 2)
        items = make_trajectories(lengths, vocab=size.model.vocab_size)
        batches = pack_here(items, max_tokens=size.max_tokens)
        for _ in range(WARM_STEPS):
            learner.step(batches)
        if device_type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps = [learner.step(batches) for _ in range(size.steps)]
        assert all(step.skipped == 0 for step in steps), "a step without an update takes less time"
        return steps


@contextmanager
def open_learner(folder: Path, size: GpuStep, *, device_type: str) -> Iterator[Learner]:
    """Yield the learner of a single rank, with a new model whose files lie in `folder / "model"`."""
    model = ModelConfig(path=folder / "model", from_scratch=True)
    size.model.save_pretrained(model.path)
    write_no_tokenizer(model.path)
    rendezvous = folder / "rendezvous"
    rendezvous.unlink(missing_ok=True)  # left by the measurement before
    mesh = join_group(str(rendezvous), rank=0, world_size=1, device_type=device_type)
    try:
        yield Learner(model, size.settings, AlgorithmConfig(), temperature=1.0, seed=0, mesh=mesh)
    finally:
        leave_group()
