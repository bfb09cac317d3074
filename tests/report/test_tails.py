"""Tails of hand-made trajectories."""

import numpy as np
import pytest

from laminar_lab.report.tails import Measure, distribution, group_wait, measure_tails
from laminar_py.records.trajectory import Status
from tests.report.builders import make_trajectories

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
    overall = measure_tails(make_trajectories(2, queue_s=0.5, issued_s=[0.0, 0.5]))
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
    told = {measure: one.mean for measure, one in measure_tails(found).items()}
    assert told[Measure.ENVIRONMENT] == 0.375
    assert told[Measure.GENERATION] == 1.0 - 0.375
    assert told[Measure.TURNS] == 2.0


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


def test_a_ledger_of_a_release_without_times_has_lengths_alone():
    times = dict.fromkeys(("issued_s", "started_s", "finished_s", "scored_s", "ready_s", "ended_s"), NAN)
    found = measure_tails(make_trajectories(3, score_s=NAN, **times))
    assert list(found) == [Measure.LENGTH]
