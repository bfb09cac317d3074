"""The benchmark of the control plane in its smallest form: every figure comes, and the run was a real one."""

import pytest

from laminar_lab.bench.control.measure import rows
from laminar_lab.commands.bench import BENCHMARKS

NUM_REPLICAS = 8


@pytest.mark.slow
def test_every_figure_comes_once_and_is_positive():
    heard = []
    found = {row.name: row.value for row in rows(replicas=NUM_REPLICAS, rate=8.0, steps=16, tell=heard.append)}
    names = BENCHMARKS["control"].measurements["fleet"].rows
    assert list(found) == names.replace("cores_1024", f"cores_{NUM_REPLICAS}").split()
    assert all(value > 0 for value in found.values())
    assert heard
