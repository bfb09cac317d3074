"""The learner's benchmark on a tiny model: every figure is there, and the exact ones hold at any size."""

from dataclasses import replace

import pytest
import torch

from laminar_py.bench.learner import Scale, rows
from laminar_py.bench.learner_agreement import LLAMA
from laminar_py.bench.learner_mfu import FULL, measure_steps

SIZES = {
    "sequences": 16,
    "median": 16,
    "repeats": 1,
    "refreshes": 1,
    "engine_tokens": 400,
    "memory": (2048, 4096, 32),
}
TINY_LOAD = replace(FULL, model=LLAMA, sequences=4, median=16, max_tokens=64, steps=2)
TINY = Scale(model=LLAMA, sglang=False, mfu=TINY_LOAD, **SIZES)


def test_all_figures_of_a_tiny_model():
    found = {row.name: row.value for row in rows(tell=lambda line: None, scale=TINY)}
    assert found["packed_vs_single_grad"] < 1e-5
    assert found["engine_mismatch_max"] < 1e-4
    assert found["mask_replay_ratio_error"] < 1e-4 < found["mask_replay_ratio_error_without"]
    assert found["router_replay_ratio_error"] < 1e-4 < found["router_replay_ratio_error_without"]
    assert torch.cuda.is_available() or found["mfu"] is None
    assert {"packed_over_padded", "packed_over_sorted", "logprob_memory_over_naive"} <= set(found)
    assert found["lora_bytes_over_full"] < 1
    assert found["lora_refresh_over_full"] > 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mfu_is_measured_on_whole_steps(tmp_path, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    steps = measure_steps(
        tmp_path, replace(FULL, model=LLAMA, sequences=4, median=16, max_tokens=64, steps=2), device_type=device
    )
    assert len(steps) == 2
    assert all(step.skipped == 0 and step.work.flops > 0 and step.tokens_per_s > 0 for step in steps)
