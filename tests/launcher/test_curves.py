"""Curves over seeds."""

from statistics import stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laminar_lab.curves import format_mean, half_width
from laminar_lab.launcher.results import make_band, value_at

LINES = st.lists(
    st.lists(
        st.tuples(st.floats(0, 100), st.floats(-5, 5)), min_size=1, max_size=8, unique_by=lambda point: point[0]
    ),
    min_size=1,
    max_size=4,
)


def test_a_band_is_mean_and_range_of_the_seeds_as_far_as_all_of_them_reach():
    band = make_band("a", [([0, 10], [0.0, 1.0]), ([1, 5], [0.3, 0.7])])
    assert band.x == [1, 5]
    assert band.mean == pytest.approx([0.2, 0.6])
    assert band.low == pytest.approx([0.1, 0.5])
    assert band.high == pytest.approx([0.3, 0.7])
    assert band.seeds == 2


def test_what_is_not_finite_is_no_point():
    assert make_band("a", [([0, 1, 2], [1.0, float("nan"), 3.0])]).mean == [1.0, 3.0]
    assert make_band("a", [([0], [float("nan")]), ([], [])]).x == []


@given(LINES)
def test_a_mean_is_within_its_band(lines):
    band = make_band("a", [tuple(zip(*sorted(line), strict=True)) for line in lines])
    for low, mean, high in zip(band.low, band.mean, band.high, strict=True):
        assert low - 1e-9 <= mean <= high + 1e-9
    assert band.seeds == len(lines)


def test_the_interval_of_three_seeds_is_that_of_student():
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert half_width([2.0]) is None
    assert half_width([0.5] * 40) == 0
    assert half_width([1.0, 2.0, 3.0] * 7) == pytest.approx(2.086 * stdev([1.0, 2.0, 3.0] * 7) / 21**0.5, rel=1e-3)
    assert format_mean([1.0, 2.0, 3.0]) == "2.000 ± 2.484"
    assert format_mean([2.0]) == "2.000"


def test_a_value_is_only_where_the_line_reaches():
    assert value_at(([0.0, 2.0], [1.0, 3.0]), 1.0) == 2.0
    assert value_at(([0.0, 2.0], [1.0, 3.0]), 2.1) is None
    assert value_at(([], []), 0.0) is None
