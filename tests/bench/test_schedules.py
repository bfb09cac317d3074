"""What the benchmarks of repacking compute from runs; the runs themselves take minutes."""

import pytest

from laminar_lab.bench.repack import schedules, workload
from laminar_lab.bench.repack.schedules import CONTENDERS, SIGMA_20X, PilotRun, ScheduleRate, best_split
from laminar_lab.bench.repack.workload import ArmFigures, latency_p95_s
from tests.bench.figures import figures
from tests.ledger.runs import begin, make_ready, open_ledger

PILOT = PilotRun(
    full_s=250.0,
    tail_s=250.0,
    train_s=100.0,
    step_tokens=7.5e6,
    rates={"none": 15_000.0, "predictive": 18_750.0, "full": 20_000.0},
)


def test_ratios_are_medians_over_seeds_and_the_gain_is_that_of_the_ceiling():
    none, paper, ours, full = (
        [ArmFigures(tokens_per_s=rate, kv_use=use, latency_p95_s=100.0, round_s=0.5)] * 3
        for rate, use in ((10, 0.6), (12, 0.7), (13, 0.8), (16, 0.9))
    )
    arms = {"none": none, "paper": paper, "predictive": ours, "full": full}
    rows = figures("repack", "workload", workload.table(arms))
    assert rows["throughput_repack_over_off"] == pytest.approx(1.3)
    assert rows["ours_over_paper_planner"] == pytest.approx(13 / 12)
    assert rows["gain_of_ceiling"] == pytest.approx(0.5)
    assert (rows["kv_use_off"], rows["kv_use_repack"]) == (0.6, 0.8)
    assert rows["latency_p95_over_off"] == 1.0


def test_schedules_are_told_by_their_skew():
    names = ["sync", *(contender.name for contender in CONTENDERS)]
    found = {name: ScheduleRate(float(number + 1), 0.2) for number, name in enumerate(names)}
    splits = dict.fromkeys(names[1:], 12)
    rows = [row for sigma in (workload.SIGMA, SIGMA_20X) for row in schedules.table(found, splits, sigma=sigma)]
    assert figures("repack", "schedules", rows)["async_repack_of_ceiling"] == 5 / 6


@pytest.mark.parametrize("contender", CONTENDERS, ids=lambda contender: contender.name)
def test_a_split_leaves_devices_to_both_sides_and_none_next_to_it_is_better(contender):
    replicas = best_split(contender, PILOT)
    assert 1 <= replicas < 16
    expected = {"sync_disaggregated": 10, "one_step": 12, "async": 13, "async_repack": 12, "async_full": 12}
    assert abs(replicas - expected[contender.name]) <= 1


async def test_latency_counts_from_issue_to_the_last_token(tmp_path):
    async with open_ledger(tmp_path) as ledger:  # its clock goes on by a second with every event
        begin(ledger)
        for index in range(3):
            make_ready(ledger, f"g0.{index}")
        await ledger.commit()
    assert 1 <= latency_p95_s(tmp_path, newest_s=1e9) <= 5
