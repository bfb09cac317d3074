"""The benchmark of segments in its smallest form: every figure comes and is positive."""

from functools import partial

import pytest

from laminar_lab.bench import segments
from tests.bench.figures import figures

MEASUREMENTS = {"write": partial(segments.write_rows, num_bytes=2**16), "fetch": segments.fetch_rows}


@pytest.mark.slow
@pytest.mark.parametrize("only", MEASUREMENTS)
def test_every_figure_comes_once_and_is_positive(only):
    heard = []
    found = figures("segments", only, MEASUREMENTS[only](repeats=1, tell=heard.append))
    assert all(value > 0 for value in found.values())
    assert heard
