"""The benchmarks of repacking: a fleet of the size that a row names, and the fleet of the published tables."""

import numpy as np
import pytest

from laminar_lab.bench.repack import fleet
from laminar_lab.bench.repack.plan import ramp_down, rows
from tests.bench.figures import figures


def test_planning_a_fleet_is_measured_on_all_its_trajectories():
    assert figures("repack", "plan", rows(repeats=1))["plan_256x8192_ms"] > 0
    surveys = ramp_down(np.random.default_rng(0))
    assert sum(len(survey.running) for survey in surveys) == 8192
    assert all(survey.kv_used <= survey.kv_capacity for survey in surveys)


@pytest.mark.slow
def test_a_simulated_fleet_gives_all_rows_and_the_ceiling_is_above_what_drains(monkeypatch):
    for name, value in {"REPLICAS": 4, "BATCH": 64, "STEPS": 3}.items():
        monkeypatch.setattr(fleet, name, value)
    found = figures("repack", "fleet", fleet.rows(seeds=1))
    assert 1 < found["throughput_repack_over_off_7b"] < found["throughput_full_over_off_7b"]
