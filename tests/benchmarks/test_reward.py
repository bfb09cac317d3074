"""Verdicts on pairs that the verifier of mathematics was never tuned on."""

import pytest

from benchmarks.__main__ import BENCHMARKS
from benchmarks.reward import pairs
from tests.bench.figures import figures


@pytest.mark.slow
def test_pairs_that_are_hard_for_the_library_alone_are_judged_as_they_should_be():
    found = figures("reward", "pairs", pairs.rows(), catalog=BENCHMARKS)
    assert found["math_right_unseen"] >= 0.95
    assert found["math_mistaken_unseen"] <= 1
    assert found["math_library_right_unseen"] <= 0.9
