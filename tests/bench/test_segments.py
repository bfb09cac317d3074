"""The benchmark of segments in its smallest form: every figure comes and is positive."""

from laminar_lab.bench.segments import local
from tests.bench.figures import figures


def test_every_figure_comes_once_and_is_positive():
    found = figures("segments", "local", local.rows(repeats=1, tokens=300, num_bytes=2**16))
    assert all(value > 0 for value in found.values())
