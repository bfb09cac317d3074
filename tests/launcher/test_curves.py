"""The interval of a mean over seeds."""

from statistics import stdev

import pytest

from laminar_lab.curves import format_mean, half_width


def test_the_interval_of_three_seeds_is_that_of_student():
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5)
    assert half_width([2.0]) is None
    assert half_width([0.5] * 40) == 0
    assert half_width([1.0, 2.0, 3.0] * 7) == pytest.approx(2.086 * stdev([1.0, 2.0, 3.0] * 7) / 21**0.5, rel=1e-3)
    assert format_mean([1.0, 2.0, 3.0]) == "2.000 ± 2.484"
    assert format_mean([2.0]) == "2.000"
