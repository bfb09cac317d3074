"""The benchmark of the control plane in its smallest form: every figure comes, and the run was a real one."""

import pytest

from laminar_lab.bench.control.fleet import rows
from laminar_lab.bench.registry import find

NUM_REPLICAS = 8


@pytest.mark.slow
def test_every_figure_comes_once_and_is_positive():
    found = {row.name: row.value for row in rows(replicas=NUM_REPLICAS, rate=8.0, steps=16)}
    [measurement] = find("control", "fleet")
    assert list(found) == [name.replace("_1024", f"_{NUM_REPLICAS}") for name in measurement.row_names]
    assert all(value > 0 for value in found.values())
