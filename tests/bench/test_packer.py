"""The benchmark of the packer in its smallest form: every figure comes, and those that no load changes hold."""

from laminar_lab.bench import packer
from laminar_lab.bench.packer import draw_lengths, make_trajectories, pack_here, quality
from tests.bench.figures import figures


def test_every_figure_comes_and_shares_are_of_the_whole():
    found = figures("packer", "packer", packer.rows(sequences=64, seeds=2))
    assert all(value > 0 for value in found.values())
    assert all(value <= 1 for name, value in found.items() if name.endswith(("fill", "capacity_used")))


def test_a_large_step_is_filled_and_balanced_as_promised():
    packed = pack_here(make_trajectories(draw_lengths(0, 2048)))
    found = quality(packed, max_tokens=16_384)
    assert found.fill >= 0.995
    assert found.imbalance <= 1.015


def test_imbalance_counts_the_slowest_rank_of_every_index():
    one, two = make_trajectories([100, 300])
    packed = pack_here([one, two], ranks=2, max_tokens=300)
    assert 1.5 < quality(packed, max_tokens=300).imbalance < 1.51
