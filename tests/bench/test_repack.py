"""The benchmarks of repacking: a small fleet, and what is computed from whole runs, which take minutes."""

import pytest

from laminar_lab.bench.repack import fleet, schedules
from laminar_lab.bench.repack.schedules import CONTENDERS, DEVICES, SYNC, ScheduleRate
from tests.bench.figures import figures


@pytest.mark.slow
def test_a_simulated_fleet_gives_all_rows_and_the_ceiling_is_above_what_drains(monkeypatch):
    for name, value in {"REPLICAS": 4, "BATCH": 64, "STEPS": 3}.items():
        monkeypatch.setattr(fleet, name, value)
    found = figures("repack", "fleet", fleet.rows(seeds=1))
    assert 1 < found["throughput_repack_over_off"] < found["throughput_full_over_off"]


def test_schedules_are_compared_with_the_colocated_one():
    names = [contender.name for contender in (SYNC, *CONTENDERS)]
    rates = {name: ScheduleRate(float(number + 1), 0.2) for number, name in enumerate(names)}
    found = figures("repack", "schedules", schedules.table(rates, sigma=0.99))
    assert found["async_repack_over_full"] == 5 / 6
    assert found["async_over_sync"] == 4.0
    assert found["sync_generation_share"] == 0.8


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_a_split_leaves_devices_to_both_sides(contender):
    assert 1 <= contender.replicas < DEVICES
