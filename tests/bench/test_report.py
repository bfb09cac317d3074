"""Sides of a comparison take turns, and a ratio is the median over rounds."""

from laminar_lab.bench.report import Ratio, in_turn


def test_another_side_is_first_in_each_round_and_warm_rounds_do_not_count():
    order = []

    def side(name):
        return lambda number: order.append(name) or float(number)

    found = in_turn({name: side(name) for name in "abc"}, rounds=2, warm=1)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert found == {name: [1.0, 2.0] for name in "abc"}


def test_a_ratio_is_the_median_of_rounds_and_no_ratio_of_medians():
    ratio = Ratio.between([1.0, 4.0, 9.0], [1.0, 2.0, 3.0])
    assert (ratio.median, ratio.least, ratio.most) == (2.0, 1.0, 3.0)
    assert ratio.row("faster", "here").conditions == "here; median of 3 rounds in turn, 1.00 to 3.00"
