"""The benchmark of the control plane in its smallest form: every figure comes, and the run was a real one."""

from laminar_py.bench.control.measure import rows
from tests.bench.figures import figures


def test_every_figure_comes_once_and_is_positive():
    heard = []
    found = figures("control", "fleet", rows(replicas=8, rate=8.0, steps=12, tell=heard.append))
    assert all(value > 0 for value in found.values())
    assert found["record_age_max_s"] < 30
    assert heard
