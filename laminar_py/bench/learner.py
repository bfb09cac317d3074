"""What `laminar bench learner` measures: that packing is right, what it saves, how near engine and learner are.

All but `mfu` runs on the CPU, one thread a process, fp32. Speed is in CPU seconds, but for the refresh of an
engine, and taken in turns, so that a busy machine changes ratios little.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PretrainedConfig

from laminar_py.bench.engine_local import MODEL
from laminar_py.bench.learner_agreement import agreement_rows
from laminar_py.bench.learner_lora import lora_rows
from laminar_py.bench.learner_mfu import FULL as FULL_LOAD
from laminar_py.bench.learner_mfu import Load, mfu_row
from laminar_py.bench.learner_samples import find_sglang
from laminar_py.bench.learner_speed import memory_row, throughput_rows
from laminar_py.bench.relay import SHARED_MEMORY
from laminar_py.bench.report import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How much is measured; only tests use another than `FULL`."""

    model: PretrainedConfig
    sequences: int = 64
    median: int = 128
    repeats: int = 3
    refreshes: int = 9
    engine_tokens: int = 10_000
    sglang: bool = True  # as well, where there is one
    memory: tuple[int, int, int] = (8192, 32_768, 512)  # T, V, H
    mfu: Load = FULL_LOAD


FULL = Scale(model=MODEL)


def rows(*, tell: Callable[[str], None], scale: Scale = FULL) -> list[Row]:
    """All figures; `tell` hears of each part. About ten minutes."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        tell("packed against one by one, engines against learner, replay")
        python = find_sglang(tell) if scale.sglang else None
        out = agreement_rows(Path(folder), model=scale.model, engine_tokens=scale.engine_tokens, python=python)
        tell("packed against padded")
        out += throughput_rows(
            Path(folder),
            config=scale.model,
            sequences=scale.sequences,
            median=scale.median,
            repeats=scale.repeats,
        )
        tell("adapters against all weights")
        with tempfile.TemporaryDirectory(prefix="laminar-bench-", dir=SHARED_MEMORY) as shm:
            out += lora_rows(Path(folder), shm=Path(shm), config=scale.model, repeats=scale.refreshes)
        tell("memory of log-probabilities")
        out.append(memory_row(scale.memory))
        tell("use of the GPU, if there is one")
        return [*out, mfu_row(Path(folder), load=scale.mfu)]
