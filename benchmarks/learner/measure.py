"""What `python -m benchmarks learner` measures: the learner beside engines, single sequences, padding and logits.

On the CPU, one thread a process, fp32. Speed is in CPU seconds and taken in turns, so that a busy machine changes
ratios little.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from benchmarks.learner.agreement import mismatch_rows, routing_rows
from benchmarks.learner.memory import Sizes, memory_row
from benchmarks.learner.packing import MODELS, gradient_row, padded_rows
from benchmarks.learner.samples import find_sglang
from laminar_py.bench.learner.speed import FULL as FULL_BATCHES
from laminar_py.bench.learner.speed import StepBatches
from laminar_py.bench.report import Row
from laminar_py.bench.turns import Tell


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSize:
    """How much is compared; only tests use another than `FULL`."""

    models: Mapping[str, PretrainedConfig]  # that packed gradients are looked at of; the first against engines
    batches: StepBatches = FULL_BATCHES
    engine_tokens: int = 10_000
    sglang: bool = True  # as well, where there is one
    memory: Sizes = (8192, 32_768, 512)


FULL = ComparisonSize(models=MODELS)


def rows(parts: Sequence[str], *, tell: Tell, size: ComparisonSize = FULL) -> list[Row]:
    """Figures of these parts; `tell` hears of each. About ten minutes."""
    torch.set_num_threads(1)
    found: list[Row] = []
    python = find_sglang(tell) if size.sglang and {"agreement", "routing"} & set(parts) else None
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        folder = Path(name)
        for part in parts:
            tell(part)
            if part == "gradients":
                found.append(gradient_row(folder, size.models))
            elif part == "agreement":
                model = next(iter(size.models.values()))
                found += mismatch_rows(folder, model, tokens=size.engine_tokens, python=python)
            elif part == "routing":
                found += routing_rows(folder, tokens=size.engine_tokens, python=python)
            elif part == "padded":
                found += padded_rows(folder, size.batches)
            else:
                found.append(memory_row(size.memory))
    return found
