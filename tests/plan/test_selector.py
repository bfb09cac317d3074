"""Choices of another schedule and placement: only what gains, only what the config takes, within the same GPUs."""

import pytest

from laminar_lab.advice.predictions import choices, train_command
from laminar_py.config.loading import dump_config, load_config
from laminar_py.config.rollout import Schedule
from laminar_py.observe.diagnosis import diagnose
from tests.analytics.scripted import CONFIG
from tests.analytics.test_diagnosis import mean_step_of
from tests.runs.runs import REPO

EIGHT_GPUS = REPO / "experiments/math_long_cot/7b_8gpu.yaml"  # five replicas of one GPU, three ranks


def chosen(step, source, tmp_path, *overrides):
    config = load_config(source, [f"schedule={step.schedule}", *overrides])
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config))
    return choices(diagnose(step, config), config, file=file), file


def test_a_synchronous_run_is_told_what_async_would_give(tmp_path):
    step = mean_step_of(Schedule.SYNC, measured_s=10.0, generation_s=6.0, learner_s=4.0)
    found, file = chosen(step, CONFIG, tmp_path)
    best = min(found, key=lambda one: one.step_s)
    assert found[0] == best
    assert best.step_s == pytest.approx(6.0)
    assert "schedule=async" in best.settings
    assert train_command(best, file=file).startswith(f"laminar train {file} schedule=async")


def test_gpus_are_divided_so_that_generation_and_learner_take_alike(tmp_path):
    step = mean_step_of(measured_s=12.0, generation_s=4.0, learner_s=12.0)
    found, _ = chosen(step, EIGHT_GPUS, tmp_path)
    split = next(one for one in found if one.settings[0].startswith("rollout.replicas="))
    assert split.settings == ("rollout.replicas=3", "learner.world_size=5")
    assert split.step_s == pytest.approx(12.0 * 3 / 5)


def test_no_choice_takes_more_gpus_than_there_are(tmp_path):
    step = mean_step_of(measured_s=12.0, generation_s=12.0, learner_s=4.0)
    found, file = chosen(step, EIGHT_GPUS, tmp_path)
    assert found
    assert all(load_config(file, list(one.settings)).gpus <= 8 for one in found)


def test_gpus_that_are_divided_well_stay_so(tmp_path):
    step = mean_step_of(measured_s=12.0, generation_s=12.0, learner_s=12.0)
    found, _ = chosen(step, EIGHT_GPUS, tmp_path)
    assert not [one for one in found if any("replicas" in setting for setting in one.settings)]
    assert all(one.step_s < 12.0 for one in found)
