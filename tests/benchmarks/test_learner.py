"""The learner beside others on tiny models: every figure is there, and the exact ones hold at any size."""

from benchmarks.catalog import ROWS
from benchmarks.learner.measure import ComparisonSize, rows
from benchmarks.learner.packing import LLAMA
from laminar_py.bench.catalog import row_names
from laminar_py.bench.learner.speed import StepBatches

SIZE = ComparisonSize(
    models={"llama": LLAMA},
    batches=StepBatches(LLAMA, 4, 16, 1),
    engine_tokens=400,
    sglang=False,
    memory=(2048, 4096, 32),
)


def test_every_figure_comes_once():
    found = {row.name: row.value for row in rows(list(ROWS["learner"]), tell=lambda line: None, size=SIZE)}
    assert list(found) == row_names(ROWS, "learner")
    assert found["packed_vs_single_grad"] < 1e-5
    assert found["engine_mismatch_max"] < 1e-4
    assert found["mask_replay_ratio_error"] < 1e-4 < found["mask_replay_ratio_error_without"]
    assert found["router_replay_ratio_error"] < 1e-4 < found["router_replay_ratio_error_without"]
