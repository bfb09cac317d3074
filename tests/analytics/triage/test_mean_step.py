"""The mean step that a diagnosis judges, on trajectories made by hand."""

import numpy as np
import pytest

from laminar_py.analytics.measure.pipeline import Pipeline
from laminar_py.analytics.triage.mean_step import FEW_STEPS, mean_step
from laminar_py.config.loading import load_config
from laminar_py.records.trajectory import DropReason, Status
from tests.analytics.builders import make_trajectories
from tests.analytics.scripted import CONFIG


def mean_step_of(trajectories, *, steps=1, **columns):
    """Of steps of one second each, all of whose other times are one half."""
    given = {name: np.full(steps, 0.5) for name in Pipeline.__dataclass_fields__}
    given |= {"step": np.arange(1, steps + 1), "measured_s": np.ones(steps), "end_s": np.arange(1.0, steps + 1)}
    return mean_step(load_config(CONFIG, []), trajectories, Pipeline(**{**given, **columns}))


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


def test_the_warm_up_is_left_out_where_enough_steps_remain():
    slow_start = np.array([9.0, 9.0, *[1.0] * (FEW_STEPS - 2)])
    trajectories = make_trajectories(1, epoch=1)
    assert mean_step_of(trajectories, steps=FEW_STEPS, learner_s=slow_start).times.learner_s == 1.0
    few = FEW_STEPS - 1
    assert mean_step_of(trajectories, steps=few, learner_s=slow_start[:few]).times.learner_s > 1.0


def test_a_run_without_whole_steps_has_no_mean_step():
    assert mean_step_of(make_trajectories(1), steps=0) is None
