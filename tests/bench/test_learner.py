"""The learner's benchmark on a tiny model: every figure is there."""

from dataclasses import replace

import pytest
import torch

from laminar_py.bench.catalog import ROWS, row_names
from laminar_py.bench.learner.measure import LearnerSize, rows
from laminar_py.bench.learner.mfu import FULL, measure_steps
from laminar_py.bench.learner.speed import StepBatches
from tests.bench.test_engines import TINY

STEP = replace(FULL, model=TINY, sequences=4, median=16, max_tokens=64, steps=2)
SIZE = LearnerSize(TINY, StepBatches(TINY, 4, 16, 1), refreshes=1, mfu=STEP)


def test_every_figure_comes_once():
    found = {row.name: row.value for row in rows(list(ROWS["learner"]), tell=lambda line: None, size=SIZE)}
    assert list(found) == row_names(ROWS, "learner")
    assert torch.cuda.is_available() or found["mfu"] is None
    assert found["lora_refresh_over_full"] > 0


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mfu_is_measured_on_whole_steps(tmp_path, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    steps = measure_steps(tmp_path, STEP, device_type=device)
    assert len(steps) == 2
    assert all(step.skipped == 0 and step.work.flops > 0 and step.tokens_per_s > 0 for step in steps)
