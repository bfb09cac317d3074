"""The benchmark of planning: a fleet of the size that its row names."""

import numpy as np

from laminar_py.bench.catalog import ROWS, row_names
from laminar_py.bench.repack import ramp_down, rows


def test_planning_a_fleet_is_measured_on_all_its_trajectories():
    [row] = rows(repeats=1)
    assert [row.name] == row_names(ROWS, "repack")
    assert row.value > 0
    surveys = ramp_down(np.random.default_rng(0))
    assert sum(len(survey.running) for survey in surveys) == 8192
    assert all(survey.kv_used <= survey.kv_capacity for survey in surveys)
