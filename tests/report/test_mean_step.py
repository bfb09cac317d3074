"""The mean step that a diagnosis judges, on trajectories made by hand."""

import msgspec
import numpy as np
import pytest

from laminar_lab.report.mean_step import BACKGROUND, FEW_STEPS, Age, Use, mean_step, measure_age
from laminar_lab.report.pipeline import Pipeline
from laminar_lab.report.snapshot import Samples
from laminar_py.config.loading import load_config
from laminar_py.records.metrics import TokenMetrics
from laminar_py.records.trajectory import DropReason, Status
from tests.report.builders import make_fleet_row, make_step_row, make_trajectories
from tests.report.scripted import CONFIG

NO_SAMPLES = Samples((), (), 0.0)


def mean_step_of(trajectories, *, steps=1, samples=NO_SAMPLES, **columns):
    """Of steps of one second each, all of whose other times are one half."""
    given = {name: np.full(steps, 0.5) for name in Pipeline.__dataclass_fields__}
    given |= {"step": np.arange(1, steps + 1), "measured_s": np.ones(steps), "end_s": np.arange(1.0, steps + 1)}
    return mean_step(load_config(CONFIG, []), trajectories, Pipeline(**{**given, **columns}), samples)


def without_signal(rewards):
    return make_trajectories(
        4, group=[0, 0, 1, 1], status=Status.DROPPED, drop=DropReason.NO_SIGNAL, reward=rewards, epoch=1
    )


@pytest.mark.parametrize(
    ("rewards", "share"),
    [([0.0, 0.0, 1.0, 1.0], 0.5), ([0.0] * 4, 1.0), ([1.0] * 4, 0.0), ([-1.0, -1.0, 2.0, 2.0], 0.5)],
)
def test_a_group_is_hopeless_if_all_failed_and_not_if_all_succeeded(rewards, share):
    assert mean_step_of(without_signal(rewards)).hopeless_share == share


def test_the_speed_of_long_responses_is_that_of_those_that_one_replica_wrote():
    moved = make_trajectories(
        10, length=100, epoch=[1] * 8 + [2] * 2, queue_s=0.0, generate_s=[5.0] * 8 + [0.1] * 2
    )
    assert mean_step_of(moved).longest_s == pytest.approx(5.0)


def test_a_turn_takes_what_environments_took_over_the_turns():
    found = make_trajectories(2, epoch=1, turns=[4, 2], environment_s=[2.0, 1.0])
    assert mean_step_of(found).turn_p95_s == pytest.approx(0.5)
    assert mean_step_of(make_trajectories(2, epoch=1)).turn_p95_s == 0.0


def test_the_warm_up_is_left_out_where_enough_steps_remain():
    slow_start = np.array([9.0, 9.0, *[1.0] * (FEW_STEPS - 2)])
    trajectories = make_trajectories(1, epoch=1)
    assert mean_step_of(trajectories, steps=FEW_STEPS, learner_s=slow_start).times.learner_s == 1.0
    few = FEW_STEPS - 1
    assert mean_step_of(trajectories, steps=few, learner_s=slow_start[:few]).times.learner_s > 1.0


def test_a_run_without_whole_steps_has_no_mean_step():
    assert mean_step_of(make_trajectories(1), steps=0) is None


def test_slots_kv_and_cores_are_those_of_the_samples_after_the_warm_up():
    rows = tuple(make_step_row(step, float(step)) for step in range(1, FEW_STEPS + 1))
    cold = msgspec.structs.replace(
        make_fleet_row(1.0, [64, 64], [1.0, 1.0]), cpu_use=0.1, own_cpu_use=0.1, cores=2
    )
    warm = msgspec.structs.replace(
        make_fleet_row(5.0, [128, 0], [0.5, 0.0]), cpu_use=0.98, own_cpu_use=0.96, cores=2
    )
    samples = Samples(rows, (cold, warm), 8.0)
    found = mean_step_of(make_trajectories(1, epoch=1), steps=FEW_STEPS, samples=samples)
    assert found.use == Use(slots=0.25, kv=0.25, cpu=0.98, own_cpu=0.96, cores=2)
    assert found.cpu_s == pytest.approx(0.96)
    assert found.cores_full


@pytest.mark.parametrize(
    ("own", "work_s"),
    [
        (0.2, 0.4),  # scorers wait, and other programs compute
        (0.3, 0.4),  # what goes on beside it leaves the rest of the cores to the step
        (0.7, 1.4 - BACKGROUND),  # scorers compute
    ],
)
def test_a_step_fills_the_cores_with_what_its_own_processes_compute(own, work_s):
    row = make_fleet_row(5.0, [8, 8], [0.1, 0.1])
    row = msgspec.structs.replace(row, cpu_use=1.0, own_cpu_use=own, cores=2)
    seconds = {"generation_s": 0.1, "reward_s": 1.0, "reference_s": 0.0, "learner_s": 0.2}
    columns = {name: np.array([value]) for name, value in seconds.items()}
    found = mean_step_of(make_trajectories(1, epoch=1), samples=Samples((), (row,), 8.0), **columns)
    background = min(2 * own - 0.4, BACKGROUND)
    assert found.cpu_s == pytest.approx(work_s / (2 - background))
    assert not found.cores_full


def test_samples_of_an_older_release_say_nothing_of_the_cores():
    samples = Samples((), (make_fleet_row(5.0, [256, 0], [0.5, 0.0]),), 8.0)
    found = mean_step_of(make_trajectories(1, epoch=1), samples=samples)
    assert found.use == Use(slots=0.5, kv=0.25, cpu=0.0, own_cpu=0.0, cores=0)
    assert not found.cores_full


def test_weight_that_age_takes_is_counted_beside_fresh_data_and_what_is_not_finite_is_left_out():
    buckets = {
        "0": TokenMetrics(effective_share=0.9, kl_behaviour_k3=0.001, num_tokens=300),
        "3-4": TokenMetrics(effective_share=0.4, kl_behaviour_k3=0.03, num_tokens=100),
    }
    first = make_step_row(1, 1.0, effective_share=0.6, by_staleness=buckets)
    second = make_step_row(2, 2.0, effective_share=0.75, by_staleness=buckets)
    broken = make_step_row(3, 3.0, effective_share=float("nan"))
    age = measure_age([first, second, broken])
    assert age.lost == pytest.approx(1 - 0.675 / 0.9)
    assert age.kl == pytest.approx({"0": 0.001, "3-4": 0.03})
    assert measure_age([first, second, broken], weighs=False).lost == 0.0
    assert measure_age([]) == Age(lost=0.0, kl={})
