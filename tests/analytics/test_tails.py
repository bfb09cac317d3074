"""Tails of hand-made trajectories."""

import numpy as np
import pytest

from laminar_py.config.loading import dump_config, load_config
from laminar_py.observe.quality import read_curves
from laminar_py.observe.tails import (
    MOST_ROWS,
    Measure,
    distribution,
    group_wait,
    measure_stragglers,
    measure_tails,
)
from laminar_py.records.trajectory import DropReason, Status
from tests.analytics.builders import make_fleet_row, make_step_row, make_trajectories, write_rows
from tests.builders import make_evaluated
from tests.ledger.runs import begin, open_ledger
from tests.runs.runs import REPO

NAN = float("nan")


def test_a_distribution_is_that_of_the_known_values():
    found = distribution(np.array([NAN, 4.0, 1.0, 2.0, 3.0, NAN]))
    assert (found.count, found.mean, found.p50, found.max) == (4, 2.5, 2.5, 4.0)
    assert (found.p90, found.p95, found.p99) == pytest.approx((3.7, 3.85, 3.97))
    assert found.tail == pytest.approx(3.85 / 2.5)


def test_a_ratio_to_a_median_of_nothing_is_none():
    assert distribution(np.array([0.0, 0.0, 5.0])).tail is None


def test_nothing_known_has_no_distribution():
    assert distribution(np.array([NAN])) is None


def test_each_stage_is_measured_between_its_events():
    overall = measure_tails(make_trajectories(2, queue_s=0.5, issued_s=[0.0, 0.5])).overall
    expected = {
        Measure.LENGTH: 10.0,
        Measure.REPLICA_WAIT: 0.75,
        Measure.GENERATION: 1.0,
        Measure.FIRST_TOKENS: 0.5,
        Measure.SCORER_WAIT: 0.75,
        Measure.REWARD: 0.25,
        Measure.GROUP_WAIT: 0.0,
        Measure.BUFFER: 1.0,
        Measure.END_TO_END: 4.75,
    }
    assert {measure: found.mean for measure, found in overall.items()} == expected


def test_time_in_environments_is_no_generation_and_turns_are_counted():
    found = make_trajectories(2, queue_s=0.5, turns=[3, 1], environment_s=[0.75, 0.0], group=0)
    tails = measure_tails(found)
    told = {measure: one.mean for measure, one in tails.overall.items()}
    assert told[Measure.ENVIRONMENT] == 0.375
    assert told[Measure.GENERATION] == 1.0 - 0.375
    assert told[Measure.TURNS] == 2.0
    assert tails.longest_over_mean.mean == 1.0  # both were there for a second


def test_a_group_waits_for_its_last_member_be_it_scored_or_dropped():
    trajectories = make_trajectories(
        5,
        group=[0, 0, 1, 1, 2],
        status=[Status.READY, Status.READY, Status.READY, Status.DROPPED, Status.READY],
        scored_s=[3.0, 7.5, 2.0, NAN, 4.0],
        ended_s=[NAN, NAN, NAN, 6.0, NAN],
    )
    assert group_wait(trajectories).tolist() == pytest.approx([4.5, 0.0, 4.0, NAN, 0.0], nan_ok=True)


def test_a_group_that_is_not_complete_is_not_judged():
    trajectories = make_trajectories(2, group=0, scored_s=[3.0, NAN], ended_s=NAN)
    assert np.isnan(group_wait(trajectories)).all()


def test_the_longest_over_the_mean_is_taken_of_groups_with_two_finished():
    trajectories = make_trajectories(5, group=[0, 0, 0, 1, 1], started_s=0.0, finished_s=[1.0, 1.0, 4.0, 9.0, NAN])
    found = measure_tails(trajectories).longest_over_mean
    assert (found.count, found.max) == (1, 2.0)


def test_replicas_versions_and_tasks_are_told_apart_where_there_are_several():
    versions = np.arange(100)
    tails = measure_tails(
        make_trajectories(
            100,
            oldest_version=versions,
            replica=versions % 2,
            task=(versions >= 90).astype(int),
            tasks=("algebra", ""),
            length=versions,
        )
    )
    assert {key: row[Measure.LENGTH].count for key, row in tails.by_replica.items()} == {"0": 50, "1": 50}
    assert tails.by_task["(no name)"][Measure.LENGTH].mean == 94.5
    assert len(tails.by_version) <= MOST_ROWS
    assert list(tails.by_version)[:2] == ["0-8", "9-17"]
    assert list(tails.by_version)[-1] == "99-99"
    assert sum(row[Measure.LENGTH].count for row in tails.by_version.values()) == 100
    alone = measure_tails(make_trajectories(3))
    assert (alone.by_replica, alone.by_version, alone.by_task) == ({}, {}, {})


def test_time_lost_to_stragglers_is_what_the_formulas_say():
    trajectories = make_trajectories(4, group=[0, 0, 1, 1], scored_s=[3.0, 4.0, 3.0, 3.0], ended_s=5.0)
    running, kv_use = ([8, 8], [8, 8], [1, 8], [0, 8]), ([0.5, 0.4], [0.5, 0.4], [0.25, 0.4], [0.0, 0.4])
    fleet = [make_fleet_row(*row) for row in zip((1.0, 2.0, 4.0, 5.0), running, kv_use, strict=True)]
    found = measure_stragglers(trajectories, fleet)
    assert found.group_wait == pytest.approx(1.0 / 20.0)
    assert found.slots == pytest.approx(2.0 * 7 / (5.0 * 16)), "an empty replica is not held by a straggler"
    assert found.kv == pytest.approx(2.0 * 0.25 / (5.0 * 0.9))


def test_without_samples_of_the_fleet_no_share_of_its_slots_is_told():
    trajectories = make_trajectories(1, status=Status.DROPPED, drop=DropReason.STALE)
    found = measure_stragglers(trajectories, [])
    assert (found.slots, found.kv) == (None, None)


def test_a_ledger_of_a_release_without_times_has_lengths_alone():
    times = dict.fromkeys(("issued_s", "started_s", "finished_s", "scored_s", "ready_s", "ended_s"), NAN)
    found = measure_tails(make_trajectories(3, score_s=NAN, **times))
    assert (list(found.overall), found.longest_over_mean) == ([Measure.LENGTH], None)


async def test_a_curve_has_each_set_with_its_costs_in_the_order_of_time(tmp_path):
    config = load_config(
        REPO / "configs/quickstart.yaml",
        ["eval.sets={easy: easy.jsonl, hard: hard.jsonl, rare: rare.jsonl}", "rollout.replicas=3"],
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    write_rows(tmp_path / "metrics.jsonl", [make_step_row(1, 10.0, trained_tokens=1_000)])
    async with open_ledger(tmp_path) as ledger:
        begin(ledger)
        for index, (name, mean, rl_s) in enumerate(
            [("hard", 0.25, 0.0), ("easy", 0.5, 0.0), ("easy", 1.0, 10.0), ("easy", 0.75, 5.0)]
        ):
            ledger.append(make_evaluated(mean, rl_s=rl_s, set_name=name, index=index))
    curves = read_curves(tmp_path)
    assert list(curves) == ["easy", "hard"]
    easy = curves["easy"]
    assert [(point.rl_s, point.value, point.tokens) for point in easy] == [
        (0.0, 0.5, 0),
        (5.0, 0.75, 500),
        (10.0, 1.0, 1_000),
    ]
    assert easy[2].device_hours == pytest.approx(10.0 * (3 + 1) / 3600)
    assert easy[0].figures.mean.low < 0.5 < easy[0].figures.mean.high
    assert {k: one.value for k, one in easy[0].figures.pass_at.items()} == {1: 0.5}
