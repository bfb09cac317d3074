"""What a config decides for the control plane."""

import pytest

from laminar_py.config.rollout import WithoutSignal
from laminar_py.control.settings import control_settings
from laminar_py.runtime.orchestrator.resume import describe_surplus
from tests.builders import make_config


def settings_of(**sections):
    return control_settings(make_config(**sections), stop_ids=())


@pytest.mark.parametrize("said", list(WithoutSignal))
@pytest.mark.parametrize(
    "algorithm", [{"name": "reinforce_pp"}, {"name": "ppo"}, {"name": "distill", "teacher": "t"}]
)
def test_what_is_normalised_over_a_step_sees_all_groups_whatever_is_said_of_those_without_signal(algorithm, said):
    rollout = {"without_signal": said}
    assert settings_of(algorithm=algorithm, rollout=rollout).without_signal is WithoutSignal.TRAIN
    assert settings_of(algorithm={"name": "grpo"}, rollout=rollout).without_signal is said


def test_a_batch_is_refilled_only_where_groups_without_signal_leave():
    refill = {"without_signal": WithoutSignal.REFILL}
    assert settings_of(algorithm={"name": "grpo"}, rollout=refill).admission.refills
    assert not settings_of(algorithm={"name": "reinforce_pp"}, rollout=refill).admission.refills


SURPLUS = (
    "24 groups of the run so far are ready or under way: its next 12 steps take 2 of them each before any"
    " new data, the last ones on data about 11 steps old"
)


@pytest.mark.parametrize(
    ("bound", "policies", "groups", "line"),
    [
        (
            4,
            ["wait"],
            24,
            f"{SURPLUS}, above staleness.max_staleness=4; a larger rollout.prompts_per_step uses",
        ),
        (4, ["wait", "drop"], 24, f"{SURPLUS}; beyond staleness.max_staleness=4 groups are dropped"),
        (16, ["wait"], 24, SURPLUS),
        (4, ["wait"], 10, ""),
    ],
)
def test_a_resume_with_a_smaller_step_says_how_old_the_data_of_its_next_steps_is(bound, policies, groups, line):
    staleness = {"max_staleness": bound, "policies": policies}
    settings = settings_of(rollout={"prompts_per_step": 2}, staleness=staleness)
    told = describe_surplus(settings, groups)
    assert told.startswith(line)
    assert bool(told) == bool(line)
