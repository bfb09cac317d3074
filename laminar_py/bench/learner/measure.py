"""What `laminar bench learner` measures: speed on packed sequences, what adapters save, and use of a GPU.

All but `mfu` runs on the CPU, one thread a process, fp32. `python -m benchmarks learner` holds the learner against
engines, single sequences and padded batches.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from laminar_py.bench.learner import lora, speed
from laminar_py.bench.learner.mfu import FULL as FULL_STEP
from laminar_py.bench.learner.mfu import GpuStep, mfu_row
from laminar_py.bench.learner.speed import FULL as FULL_BATCHES
from laminar_py.bench.learner.speed import StepBatches
from laminar_py.bench.models import SMALL
from laminar_py.bench.relay.measure import SHARED_MEMORY
from laminar_py.bench.report import Row
from laminar_py.bench.turns import Tell


@dataclass(frozen=True, slots=True)
class LearnerSize:
    """How much is measured; only tests use another than `FULL`."""

    lora_model: PretrainedConfig
    speed: StepBatches = FULL_BATCHES
    refreshes: int = 9
    mfu: GpuStep = FULL_STEP


FULL = LearnerSize(SMALL)


def rows(parts: Sequence[str], *, tell: Tell, size: LearnerSize = FULL) -> list[Row]:
    """Figures of these parts; `tell` hears of each. A few minutes."""
    torch.set_num_threads(1)
    found: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        folder = Path(name)
        if "speed" in parts:
            tell("packed sequences")
            found += speed.rows(folder, size.speed)
        if "lora" in parts:
            tell("adapters against all weights")
            with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir=SHARED_MEMORY) as shm:
                found += lora.rows(folder, shm=Path(shm), config=size.lora_model, repeats=size.refreshes)
        if "mfu" in parts:
            tell("use of the GPU, if there is one")
            found.append(mfu_row(folder, size=size.mfu))
    return found
