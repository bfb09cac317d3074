"""The benchmark of the packer in its smallest form: every figure comes, and those that no load changes hold."""

from laminar_py.bench.packer import Scale, draw_lengths, make_trajectories, pack_here, quality, rows


def test_every_figure_comes_once():
    found = {row.name: row.value for row in rows(tell=lambda line: None, scale=Scale(64, 2, 5, 3))}
    timed = ["pack_2048_ms", "stream_us", "stream_add_us", "stream_send_us", "ready_ms", "stream_imbalance"]
    looks = [f"look_ahead_{window}_capacity_used" for window in (0, 4, 8, 16)]
    prefixes = [f"prefix_{case}_{what}" for case in ("400_1500", "2000_500") for what in ("tokens", "flops")]
    names = ["fill", "stream_fill", "capacity_used", "imbalance", "cap_violations", *timed, *looks, *prefixes]
    assert sorted(found) == sorted(names)
    assert all(0 < found[name] <= 1 for name in ("fill", "capacity_used", *looks, *prefixes))
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
