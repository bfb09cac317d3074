"""The learner's benchmark on tiny models: every figure is there, and those that no load changes hold."""

from dataclasses import replace

import pytest
import torch

from benchmarks.learner.packing import LLAMA
from laminar_lab.bench.learner import lora, mfu, speed
from laminar_lab.bench.learner.mfu import FULL, measure_steps
from laminar_lab.bench.learner.speed import StepBatches
from tests.bench.figures import figures
from tests.bench.test_engines import TINY

STEP = replace(FULL, model=TINY, sequences=4, median=16, max_tokens=64, steps=2)


def test_packed_sequences_have_a_speed():
    assert figures("learner", "speed", speed.rows(batches=StepBatches(TINY, 4, 16, 1)))["packed_tokens_per_s"] > 0


def test_adapters_take_less_bytes_than_all_weights():
    found = figures("learner", "lora", lora.rows(config=LLAMA, repeats=1))
    assert found["lora_bytes_over_full"] < 1
    assert found["lora_refresh_over_full"] > 0


def test_use_of_a_gpu_is_a_row_without_a_value_where_there_is_none():
    found = figures("learner", "mfu", mfu.rows(size=STEP))
    assert torch.cuda.is_available() or found["mfu"] is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mfu_is_measured_on_whole_steps(tmp_path, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    steps = measure_steps(tmp_path, STEP, device_type=device)
    assert len(steps) == 2
    assert all(step.skipped == 0 and step.work.flops > 0 and step.tokens_per_s > 0 for step in steps)
