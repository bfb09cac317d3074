"""The benchmark of the packer in its smallest form: every figure comes, and those that no load changes hold."""

from laminar_lab.bench import packer
from laminar_lab.bench.packer import draw_lengths, make_trajectories, pack_here, quality
from tests.bench.figures import figures


def test_a_step_fills_at_most_what_there_is():
    found = figures("packer", "step", packer.step_rows(sequences=64, seeds=2))
    assert all(0 < found[name] <= 1 for name in ("fill", "capacity_used"))


def test_no_random_batch_breaks_the_cap():
    assert figures("packer", "random", packer.random_rows(batches=5)) == {"cap_violations": 0}


def test_a_stream_has_a_fill_and_a_cost_of_each_stage():
    found = figures("packer", "stream", packer.stream_rows(sequences=64, seeds=1))
    assert all(value > 0 for value in found.values())


def test_shares_of_look_ahead_and_prefixes_are_of_the_whole():
    ahead = figures("packer", "look_ahead", packer.look_ahead_rows(steps=3))
    prefixes = figures("packer", "prefix", packer.prefix_rows(groups=64))
    assert all(0 < share <= 1 for share in (*ahead.values(), *prefixes.values()))


def test_a_large_step_is_filled_and_balanced_as_promised():
    packed = pack_here(make_trajectories(draw_lengths(0, 2048)))
    found = quality(packed, max_tokens=16_384)
    assert found.fill >= 0.995
    assert found.imbalance <= 1.015


def test_imbalance_counts_the_slowest_rank_of_every_index():
    one, two = make_trajectories([100, 300])
    packed = pack_here([one, two], ranks=2, max_tokens=300)
    assert 1.5 < quality(packed, max_tokens=300).imbalance < 1.51
