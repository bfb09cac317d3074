"""The learner's benchmark on tiny models: every figure is there, and the exact ones hold at any size."""

import re
from dataclasses import replace

import pytest
import torch

from laminar_lab.bench.learner import agreement, mfu, packing
from laminar_lab.bench.learner.mfu import FULL, measure_steps
from laminar_lab.bench.learner.packing import LLAMA, StepBatches
from tests.bench.figures import figures
from tests.bench.test_engines import TINY

STEP = replace(FULL, model=TINY, sequences=4, median=16, max_tokens=64, steps=2)


def test_packed_sequences_have_the_gradients_of_single_ones_and_a_speed_beside_both_paddings():
    rows = packing.rows(batches=StepBatches(LLAMA, 4, 16, 1), models={"llama": LLAMA})
    found = figures("learner", "packing", rows)
    assert found.pop("packed_vs_single_grad") < 1e-5
    assert all(value > 0 for value in found.values())


def test_engine_and_learner_agree_on_whole_and_cut_vocabularies_and_with_recorded_experts():
    rows = agreement.rows(config=LLAMA, tokens=400, sglang=False)
    found = figures("learner", "agreement", rows)
    conditions = {row.name: row.conditions for row in rows}
    (unmasked,) = re.findall(r"on average embedded ([\d.e-]+)", conditions["mask_replay_ratio_error"])
    (rerouted,) = re.findall(r"choice ([\d.e-]+)", conditions["router_replay_ratio_error"])
    assert found["engine_mismatch_max"] < 1e-4
    assert found["mask_replay_ratio_error"] < 1e-4 < float(unmasked)
    assert found["router_replay_ratio_error"] < 1e-4 < float(rerouted)


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
