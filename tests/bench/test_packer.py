"""The benchmark of the packer in its smallest form: every figure comes, and those that no load changes hold."""

from laminar_py.bench.catalog import ROWS, row_names
from laminar_py.bench.packer import PackerSize, draw_lengths, make_trajectories, pack_here, quality, rows

TINY = PackerSize(sequences=64, seeds=2, random_batches=5, steps=3)


def test_every_figure_comes_once():
    found = {row.name: row.value for row in rows(tell=lambda line: None, size=TINY)}
    assert list(found) == row_names(ROWS, "packer")
    shares = row_names(ROWS, "packer", "look_ahead", "prefix")
    assert all(0 < found[name] <= 1 for name in ("fill", "capacity_used", *shares))
    assert found["cap_violations"] == 0


def test_a_large_step_is_filled_and_balanced_as_promised():
    packed = pack_here(make_trajectories(draw_lengths(0, 2048)))
    found = quality(packed, max_tokens=16_384)
    assert found.fill >= 0.995
    assert found.imbalance <= 1.015


def test_imbalance_counts_the_slowest_rank_of_every_index():
    one, two = make_trajectories([100, 300])
    packed = pack_here([one, two], ranks=2, max_tokens=300)
    assert 1.5 < quality(packed, max_tokens=300).imbalance < 1.51
