"""Whole steps of a learner, by default of one rank, on random weights and random tokens of log-normal lengths."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PretrainedConfig, Qwen3Config

from laminar_lab.bench.workplace import log_normal_lengths, write_no_tokenizer
from laminar_lab.calibration.learner import make_trajectory
from laminar_py.config import AlgorithmConfig
from laminar_py.config.algorithm import Aggregation
from laminar_py.config.data import ModelConfig
from laminar_py.config.learner import LearnerConfig, Recompute
from laminar_py.learner import Learner, join_group, leave_group
from laminar_py.learner.packing import pack
from laminar_py.records import Trajectory
from laminar_py.records.metrics import StepMetrics
from laminar_py.records.trajectory import MicroBatch

SETTINGS = LearnerConfig(recompute=Recompute.SELECTIVE)
SIGMA = float(np.log(5) / 1.645)  # p95 = 5 * p50
WARM_STEPS = 2
UNIT = "of the peak of dense bf16"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuStep:
    """A model and the size of its steps."""

    model: PretrainedConfig
    settings: LearnerConfig = SETTINGS
    sequences: int = 32
    median: int = 1600
    max_tokens: int = 32_768  # of a microbatch; no sequence has more than half
    steps: int = 5

    def lengths(self, seed: int) -> list[int]:
        """Draw the lengths of a step's sequences, prompt and response together."""
        rng, longest = np.random.default_rng(seed), self.max_tokens // 2
        return log_normal_lengths(rng, self.sequences, median=self.median, sigma=SIGMA, cap=longest, least=4)

    def pack(self, items: Sequence[Trajectory], *, rank: int = 0, ranks: int = 1) -> list[MicroBatch]:
        """Pack the microbatches of a rank."""
        packed = pack(
            items, max_tokens=self.max_tokens, ranks=ranks, aggregation=Aggregation.TOKEN_MEAN, attention_share=0.0
        )
        return list(packed.microbatches(rank))

    def batches(self, seed: int = 0, *, rank: int = 0, ranks: int = 1) -> list[MicroBatch]:
        """Make the microbatches of a rank's step on random tokens, which `seed` draws."""
        vocab, first = self.model.vocab_size, seed * self.sequences
        items = [make_trajectory(first + n, length, vocab=vocab) for n, length in enumerate(self.lengths(seed))]
        return self.pack(items, rank=rank, ranks=ranks)


ONE_B = {  # a Qwen3 of 1.5 billion parameters
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 8960,
    "tie_word_embeddings": True,
}
FULL = GpuStep(model=Qwen3Config(**ONE_B))

SEVEN_B = {  # sizes of Qwen2.5-7B
    "vocab_size": 152_064,
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18_944,
    "tie_word_embeddings": False,
}


def measure_steps(folder: Path, size: GpuStep, *, device_type: str) -> Sequence[StepMetrics]:
    """Make whole optimizer steps of one rank, after warm steps, which do not count in CUDA's peak of memory."""
    with open_learner(folder, size, device_type=device_type) as learner:
        batches = size.batches()
        for _ in range(WARM_STEPS):
            learner.step(batches)
        if device_type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        steps = [learner.step(batches) for _ in range(size.steps)]
        assert all(step.skipped == 0 for step in steps), "a step without an update takes less time"
        return steps


@contextmanager
def open_learner(
    folder: Path,
    size: GpuStep,
    *,
    device_type: str,
    start: Path | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[Learner]:
    """Yield a rank's learner, of the model in `start`, or of a new one, whose files lie in `folder / "model"`.

    Several ranks share the device; they need a `start`, and a new `folder` each time.
    """
    model = ModelConfig(path=start or folder / "model", from_scratch=start is None)
    if start is None:
        size.model.save_pretrained(model.path)
        write_no_tokenizer(model.path)
    rendezvous = folder / "rendezvous"
    if ranks == 1:
        rendezvous.unlink(missing_ok=True)  # left by the measurement before
    on_cuda = "nccl" if ranks == 1 else "gloo"
    mesh = join_group(str(rendezvous), rank=rank, world_size=ranks, device_type=device_type, on_cuda=on_cuda)
    try:
        yield Learner(model, size.settings, AlgorithmConfig(), temperature=1.0, seed=0, mesh=mesh)
    finally:
        leave_group()
