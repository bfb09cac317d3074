"""What the benchmark of SGLang makes of the times at which tokens came."""

import pytest

from laminar_py.bench.engine_sglang import Crowd


def crowd(*streams):
    crowd = Crowd(engine=None, length=0)
    crowd.times = dict(enumerate(streams))
    return crowd


def test_a_pause_is_the_gap_around_the_load_less_the_usual_gap_and_the_mean_of_all_streams():
    late = crowd([1.0, 2.0, 3.0, 9.0, 10.0], [1.5, 2.5, 3.5, 7.5, 8.5])
    assert late.pause_s(5.0) == pytest.approx((5.0 + 3.0) / 2)


def test_an_earlier_pause_does_not_count_as_the_usual_gap():
    twice = crowd([0.0, 1.0, 2.0, 12.0, 13.0, 14.0, 20.0, 21.0])
    assert twice.pause_s(15.0) == pytest.approx(5.0)


def test_streams_that_begin_after_the_load_waited_since_the_round_before_ended():
    new = crowd([6.0, 7.0, 8.0], [8.0, 9.0, 10.0])
    assert new.pause_s(5.0, since=4.0) == pytest.approx((1.0 + 3.0) / 2)
