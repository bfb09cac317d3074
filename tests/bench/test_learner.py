"""The learner's benchmark on a tiny model: every figure is there, and the exact ones hold at any size."""

from laminar_py.bench.learner import Scale, rows
from laminar_py.bench.learner_agreement import LLAMA

TINY = Scale(model=LLAMA, sequences=16, median=16, repeats=1, engine_tokens=400, memory=(2048, 4096, 32))


def test_all_figures_of_a_tiny_model():
    found = {row.name: row.value for row in rows(tell=lambda line: None, scale=TINY)}
    assert found["packed_vs_single_grad"] < 1e-5
    assert found["engine_mismatch_max"] < 1e-4
    assert found["mask_replay_ratio_error"] < 1e-4 < found["mask_replay_ratio_error_without"]
    assert found["router_replay_ratio_error"] < 1e-4 < found["router_replay_ratio_error_without"]
    assert {"packed_over_padded", "packed_over_sorted", "logprob_memory_over_naive"} <= set(found)
