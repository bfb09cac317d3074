"""What a config decides for the control plane."""

import pytest

from laminar_py.config.loading import parse_config
from laminar_py.config.rollout import WithoutSignal
from laminar_py.control.settings import control_settings


def settings_of(**sections):
    config = parse_config(
        {
            "name": "t",
            "steps": 3,
            "model": {"path": "m"},
            "data": {"train": "t.jsonl"},
            "reward": {"use": ["t.py:t"]},
            **sections,
        }
    )
    return control_settings(config, stop_ids=())


@pytest.mark.parametrize("said", list(WithoutSignal))
def test_what_is_normalised_over_a_step_sees_all_groups_whatever_is_said_of_those_without_signal(said):
    rollout = {"without_signal": said}
    assert settings_of(algorithm={"name": "reinforce_pp"}, rollout=rollout).without_signal is WithoutSignal.TRAIN
    assert settings_of(algorithm={"name": "grpo"}, rollout=rollout).without_signal is said


def test_a_batch_is_refilled_only_where_groups_without_signal_leave():
    refill = {"without_signal": WithoutSignal.REFILL}
    assert settings_of(algorithm={"name": "grpo"}, rollout=refill).admission.refills
    assert not settings_of(algorithm={"name": "reinforce_pp"}, rollout=refill).admission.refills
