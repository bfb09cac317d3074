"""The benchmark of planning: a fleet of the size that its row names."""

import numpy as np

from laminar_py.bench.repack import ramp_down, rows
from tests.bench.figures import figures


def test_planning_a_fleet_is_measured_on_all_its_trajectories():
    assert figures("repack", "plan", rows(repeats=1))["plan_256x8192_ms"] > 0
    surveys = ramp_down(np.random.default_rng(0))
    assert sum(len(survey.running) for survey in surveys) == 8192
    assert all(survey.kv_used <= survey.kv_capacity for survey in surveys)
