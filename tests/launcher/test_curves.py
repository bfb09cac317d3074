"""The interval of a mean over seeds."""

from statistics import stdev

import pytest

from laminar_lab.curves import BAR, draw_mean, format_mean, half_width


def test_the_interval_of_three_seeds_is_that_of_student():
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert half_width([2.0]) is None
    assert half_width([0.5] * 40) == 0
    assert half_width([1.0, 2.0, 3.0] * 7) == pytest.approx(2.086 * stdev([1.0, 2.0, 3.0] * 7) / 21**0.5, rel=1e-3)
    assert format_mean([1.0, 2.0, 3.0], seeds=3) == "2.000 ± 2.484"
    assert format_mean([1.0, 2.0, 3.0], seeds=4) == "2.000 ± 2.484, 3 of 4 seeds"
    assert format_mean([2.0], seeds=1) == "2.000, one seed"
    assert format_mean([2.0], seeds=3) == "2.000, 1 of 3 seeds", "the others have no evaluation yet"


@pytest.mark.parametrize(
    ("values", "drawn"),
    [
        ([0.5], "·········●·········"),
        ([0.45, 0.5, 0.55], "·······├─●─┤·······"),
        ([0.0, 1.0], "─────────●─────────"),
        ([0.98, 0.99, 1.0], "·················├●"),
        ([], "·" * BAR),
    ],
)
def test_an_interval_is_drawn_from_0_on_and_has_no_end_where_it_leaves_the_axis(values, drawn):
    assert draw_mean(values, low=0.0, high=1.0) == drawn
