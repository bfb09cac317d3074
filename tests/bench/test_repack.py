"""What the repack benchmark computes from runs; the runs themselves take minutes."""

import pytest

from laminar_py.bench.repack import make_surveys, plan_rows
from laminar_py.bench.repack_schedules import PLANS, Pilot, best_split
from laminar_py.bench.repack_workload import Figures, latency_p95_s, table
from tests.ledger.runs import begin, make_ready, open_ledger

PILOT = Pilot(
    full_s=250.0,
    tail_s=250.0,
    train_s=100.0,
    step_tokens=7.5e6,
    rates={"none": 15_000.0, "predictive": 18_750.0, "full": 20_000.0},
)


def test_planning_a_fleet_is_measured_on_all_its_trajectories():
    [row] = plan_rows(repeats=1)
    assert row.name == "plan_256x8192_ms"
    assert row.value > 0
    surveys = make_surveys(seed=0)
    assert sum(len(survey.running) for survey in surveys) == 8192
    assert all(survey.kv_used <= survey.kv_capacity for survey in surveys)


def test_ratios_are_medians_over_seeds_and_the_gain_is_that_of_the_ceiling():
    none, paper, ours, full = (
        [Figures(tokens_per_s=rate, kv_use=use, latency_p95_s=100.0, round_s=0.5, release_s=0.1)] * 3
        for rate, use in ((10, 0.6), (12, 0.7), (13, 0.8), (16, 0.9))
    )
    rows = {
        row.name: row.value for row in table({"none": none, "paper": paper, "predictive": ours, "full": full}, "")
    }
    assert rows["throughput_repack_over_off"] == pytest.approx(1.3)
    assert rows["ours_over_paper_planner"] == pytest.approx(13 / 12)
    assert rows["gain_of_ceiling"] == pytest.approx(0.5)
    assert (rows["kv_use_off"], rows["kv_use_repack"]) == (0.6, 0.8)
    assert rows["latency_p95_over_off"] == 1.0


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_a_split_leaves_devices_to_both_sides_and_none_next_to_it_is_better(plan):
    replicas = best_split(plan, PILOT)
    assert 1 <= replicas < 16
    expected = {"sync_disaggregated": 10, "one_step": 12, "async": 13, "async_repack": 12, "async_full": 12}
    assert abs(replicas - expected[plan.name]) <= 1


async def test_latency_counts_from_issue_to_the_last_token(tmp_path):
    async with open_ledger(tmp_path) as ledger:  # its clock goes on by a second with every event
        begin(ledger)
        for index in range(3):
            make_ready(ledger, f"g0.{index}")
        await ledger.commit()
    assert 1 <= latency_p95_s(tmp_path, newest_s=1e9) <= 5
