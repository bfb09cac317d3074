"""Where the seconds of each step went, on runs that can be checked on paper."""

import sqlite3
import warnings
from contextlib import closing

import numpy as np
import pytest

from laminar_lab.report.pipeline import measure_pipeline
from laminar_lab.report.snapshot import read_snapshot
from laminar_py.ledger.database import LEDGER_NAME
from laminar_py.records.events import Leased, RolledBack, Undone
from tests.events import run_started
from tests.report.scripted import TURNS, WITH_ENVIRONMENT, scripted


def pipeline_of(run):
    snapshot = read_snapshot(run)
    return measure_pipeline(snapshot.config, snapshot.trajectories, snapshot.residences, snapshot.history)


async def one_step(run, *overrides, **step):
    """Busy from 0 to 4 s on replica 0 and from 0 to 2 s on replica 1; a step of 10 s."""
    async with scripted(run, *overrides) as script:
        script.issue(0.0, "g0.0", replica=0)
        script.issue(0.0, "g0.1", replica=1)
        script.finish(2.0, "g0.1")
        script.finish(4.0, "g0.0")
        for id in ("g0.1", "g0.0"):
            script.score(5.0, id, elapsed_s=0.5)
        script.step(10.0, 1, "g0.0", "g0.1", **step)
        return script


async def test_a_step_is_generation_and_idle_replicas_or_learner_and_waiting(tmp_path):
    await one_step(tmp_path, waited_s=6.0)
    found = pipeline_of(tmp_path)
    assert found.measured_s.tolist() == pytest.approx([10.0])
    assert found.generation_s.tolist() == pytest.approx([3.0])  # mean of 4 and 2
    assert found.waited_s.tolist() == pytest.approx([6.0])
    assert found.learner_s.tolist() == pytest.approx([4.0])
    assert np.allclose(found.measured_s, found.generation_s + found.late_s + found.held_s)
    assert np.allclose(found.measured_s, found.waited_s + found.learner_s)


async def test_replicas_on_shared_devices_do_not_generate_in_the_learner_s_turns(tmp_path):
    async with scripted(tmp_path, "cluster.share=true") as script:
        script.issue(0.0, "g0.0", replica=0)
        script.issue(0.0, "g0.1", replica=1)
        script.at(3.5, Leased(holder="learner", step=0, elapsed_s=0.5, tokens=0))
        script.at(6.0, Leased(holder="replicas", step=0, elapsed_s=1.0, tokens=0))
        script.finish(2.0, "g0.1")
        script.finish(8.0, "g0.0")
        for id in ("g0.1", "g0.0"):
            script.score(8.0, id)
        script.at(8.5, Leased(holder="learner", step=0, elapsed_s=0.0, tokens=0))  # a turn that does not end
        script.step(10.0, 1, "g0.0", "g0.1", waited_s=6.0)
    found = pipeline_of(tmp_path)
    assert found.generation_s.tolist() == pytest.approx([3.5])  # mean of 5 and 2: a turn from 3 to 6
    assert np.allclose(found.measured_s, found.generation_s + found.late_s + found.held_s)


async def turns_of(run, *overrides, count=2, away=(0, 1)):
    """A replica has so many for 4 of 10 s; those `away` are in their environments half of that."""
    async with scripted(run, WITH_ENVIRONMENT, "rollout.replicas=1", *overrides) as script:
        ids = [f"g0.{sample}" for sample in range(count)]
        for id in ids:
            script.issue(0.0, id)
        for sample, id in enumerate(ids):
            script.finish(4.0, id, spans=TURNS, environment_s=2.0 if sample in away else 0.0)
            script.score(4.0, id)
        script.step(10.0, 1, *ids)
    return pipeline_of(run)


async def test_time_that_trajectories_are_away_is_environment_and_no_generation(tmp_path):
    found = await turns_of(tmp_path)
    assert found.generation_s.tolist() == pytest.approx([2.0])
    assert found.environment_s.tolist() == pytest.approx([2.0])
    assert found.away.tolist() == pytest.approx([0.4])  # two, for two of ten seconds
    idle_s = found.late_s + found.held_s
    assert np.allclose(found.measured_s, found.generation_s + found.environment_s + idle_s)


async def test_environments_cost_nothing_where_others_fill_the_slots(tmp_path):
    found = await turns_of(tmp_path, "rollout.max_batch=8", count=12, away=range(4))
    assert found.generation_s.tolist() == pytest.approx([4.0])  # ten of twelve are there, and eight slots
    assert found.environment_s.tolist() == pytest.approx([0.0])
    assert found.crowded_s.tolist() == pytest.approx([4.0])


async def test_a_trajectory_that_has_not_finished_is_away_as_long_as_others_are(tmp_path):
    async with scripted(tmp_path, WITH_ENVIRONMENT, "rollout.replicas=1") as script:
        for id in ("g0.0", "g1.0"):
            script.issue(0.0, id)
        script.finish(4.0, "g0.0", spans=TURNS, environment_s=1.0)
        script.score(4.0, "g0.0")
        script.step(8.0, 1, "g0.0")
    found = pipeline_of(tmp_path)
    assert found.environment_s.tolist() == pytest.approx([2.0])  # a quarter of all 8 s


async def test_scoring_divides_by_the_workers(tmp_path):
    await one_step(tmp_path, "reward.workers=2")
    assert pipeline_of(tmp_path).reward_s.tolist() == pytest.approx([0.5])


async def test_an_empty_replica_waits_for_weights_from_their_publication_until_it_serves_them(tmp_path):
    async with scripted(tmp_path, "rollout.replicas=1") as script:
        script.issue(0.0, "g0.0")
        script.finish(2.0, "g0.0")
        script.publish(3.0, 1)
        script.load(7.0, 1, elapsed_s=0.5)
        script.score(7.0, "g0.0")
        script.step(10.0, 1, "g0.0")
    found = pipeline_of(tmp_path)
    assert found.generation_s.tolist() == pytest.approx([2.0])
    assert found.late_s.tolist() == pytest.approx([4.0])  # from 3 to 7
    assert found.held_s.tolist() == pytest.approx([4.0])  # from 2 to 3 and from 7 to 10


async def test_a_load_under_running_trajectories_costs_nothing(tmp_path):
    async with scripted(tmp_path, "rollout.replicas=1") as script:
        script.issue(0.0, "g0.0")
        script.publish(1.0, 1)
        script.load(3.0, 1)
        script.finish(10.0, "g0.0")
        script.score(10.0, "g0.0")
        script.step(10.0, 1, "g0.0")
    assert pipeline_of(tmp_path).late_s.tolist() == [0.0]


async def test_a_replica_is_in_its_tail_with_less_than_a_quarter_of_its_usual_batch(tmp_path):
    async with scripted(tmp_path, "rollout.replicas=1", "rollout.max_batch=8") as script:
        for sample in range(8):
            script.issue(0.0, f"g0.{sample}")
        for sample in range(7):
            script.finish(9.0, f"g0.{sample}")
        script.finish(10.0, "g0.7")
        for sample in range(8):
            script.score(10.0, f"g0.{sample}")
        script.step(10.0, 1, *(f"g0.{sample}" for sample in range(8)))
    found = pipeline_of(tmp_path)
    assert found.tail_s.tolist() == pytest.approx([1.0])
    assert found.crowded_s.tolist() == [0.0]


async def test_undone_steps_and_steps_in_which_the_run_was_resumed_do_not_count(tmp_path):
    async with scripted(tmp_path) as script:
        for step in (1, 2, 3):
            script.issue(float(step), f"g{step}.0", index=step)
            script.finish(step + 0.2, f"g{step}.0")
            script.score(step + 0.4, f"g{step}.0")
            script.step(step + 1.0, step, f"g{step}.0")
        script.at(9.0, run_started(incarnation=2, resumed_step=2))
        script.at(9.0, RolledBack(2, "controller_crashed"), Undone("g3.0", 3))
        script.step(10.0, 3, "g3.0")
        script.issue(10.0, "g4.0", index=4)
        script.finish(10.5, "g4.0")
        script.score(10.5, "g4.0")
        script.step(11.0, 4, "g4.0")
    found = pipeline_of(tmp_path)
    assert found.step.tolist() == [1, 2, 4]
    assert found.measured_s.tolist() == pytest.approx([1.0, 1.0, 1.0])


async def test_a_batch_that_stood_while_the_run_was_down_is_not_the_usual_one(tmp_path):
    async with scripted(tmp_path, "rollout.replicas=1", "rollout.max_batch=8") as script:
        for sample in range(8):
            script.issue(0.0, f"g0.{sample}")
        for sample in range(8):
            script.finish(8.0, f"g0.{sample}")
            script.score(8.0, f"g0.{sample}")
        script.issue(8.0, "g1.0", index=1)
        script.step(9.0, 1, *(f"g0.{sample}" for sample in range(8)))
        script.at(900.0, run_started(incarnation=2, resumed_step=1))
        script.finish(901.0, "g1.0")
        script.score(901.0, "g1.0")
        script.step(902.0, 2, "g1.0")
    assert pipeline_of(tmp_path).tail_s.tolist() == pytest.approx(
        [1.0]
    )  # from 8 to 9 s, one where eight are usual


async def test_steps_of_a_ledger_without_times_are_left_out_without_a_word(tmp_path):
    await one_step(tmp_path)
    with closing(sqlite3.connect(tmp_path / LEDGER_NAME)) as connection, connection:
        connection.execute("UPDATE trajectory SET issued_s = NULL")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(pipeline_of(tmp_path)) == 0


async def test_a_run_without_steps_has_no_rows(tmp_path):
    async with scripted(tmp_path) as script:
        script.issue(0.0, "g0.0")
    assert len(pipeline_of(tmp_path)) == 0
