"""The benchmark of the relay in its smallest form: every figure comes and is positive."""

from functools import partial
from pathlib import Path

import pytest

from laminar_lab.bench.relay import hop, steps
from laminar_lab.bench.workplace import SHARED_MEMORY
from tests.bench.figures import figures
from tests.bench.test_engines import TINY

MEASUREMENTS = {"hop": partial(hop.rows, num_bytes=2**20), "steps": partial(steps.rows, config=TINY)}


def left() -> set[Path]:
    return set(SHARED_MEMORY.glob("laminar-bench-*"))


@pytest.mark.slow
@pytest.mark.parametrize("only", MEASUREMENTS)
def test_every_figure_comes_once_and_is_positive_and_nothing_is_left(only):
    before = left()
    found = figures("relay", only, MEASUREMENTS[only](shm=SHARED_MEMORY, repeats=1))
    assert all(value > 0 for value in found.values())
    assert left() <= before
