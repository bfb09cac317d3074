"""The learner beside others on tiny models: every figure is there, and the exact ones hold at any size."""

from functools import partial

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.learner import agreement, memory, packing
from benchmarks.learner.packing import LLAMA
from laminar_lab.bench.learner.speed import StepBatches
from tests.bench import figures as bench

figures = partial(bench.figures, "learner", catalog=BENCHMARKS)
QUIET = {"tell": lambda line: None, "tokens": 400, "sglang": False}


def test_gradients_of_packed_sequences_are_those_of_single_ones():
    assert figures("gradients", packing.gradient_rows(models={"llama": LLAMA}))["packed_vs_single_grad"] < 1e-5


def test_the_embedded_engine_and_the_learner_agree_on_whole_and_on_cut_vocabularies():
    found = figures("agreement", agreement.mismatch_rows(config=LLAMA, **QUIET))
    assert found["engine_mismatch_max"] < 1e-4
    assert found["mask_replay_ratio_error"] < 1e-4 < found["mask_replay_ratio_error_without"]


def test_recorded_experts_make_the_learner_agree_with_a_noisy_router():
    found = figures("routing", agreement.routing_rows(**QUIET))
    assert found["router_replay_ratio_error"] < 1e-4 < found["router_replay_ratio_error_without"]


def test_packing_is_laid_beside_both_paddings():
    found = figures("padded", packing.padded_rows(batches=StepBatches(LLAMA, 4, 16, 1)))
    assert all(ratio > 0 for ratio in found.values())


@pytest.mark.slow
def test_memory_of_log_probabilities_is_laid_beside_that_of_all_logits():
    assert figures("memory", memory.rows(sizes=(2048, 4096, 32)))["logprob_memory_over_naive"] > 0
