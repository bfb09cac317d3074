"""Another fleet for a run: checked like the one that it began with."""

import pytest

from laminar_py.config.loading import load_config, scaled
from laminar_py.config.section import ConfigError
from tests.runs.runs import REPO


def config(*settings):
    return load_config(REPO / "configs/quickstart.yaml", ["rollout.batch_per_replica=128", *settings])


def test_the_config_of_a_larger_fleet_differs_in_that_alone():
    before = config("rollout.replicas=2")
    after = scaled(before, 6)
    assert after.rollout.replicas == 6
    assert after.capacity == before.capacity + 4 * 128
    assert scaled(after, 2) == before


@pytest.mark.parametrize(
    ("settings", "replicas", "line"),
    [
        ((), 0, "rollout.replicas=0: input should be greater than or equal to 1"),
        (
            ("rollout.prompts_per_step=64", "rollout.group_size=4"),
            1,
            "rollout.replicas=1: a learner step takes 256 trajectories (rollout.prompts_per_step *"
            " rollout.group_size), and 1 with rollout.batch_per_replica=128 admit 128 under a version; ask for 2",
        ),
        (
            ("rollout.engine.kind=sglang", "rollout.engine.urls=[http://127.0.0.1:1]", "rollout.replicas=1"),
            2,
            "rollout.replicas=2: this run attaches to 1 servers; stop it and resume it with another",
        ),
    ],
)
def test_what_no_fleet_can_be_is_refused_in_one_line(settings, replicas, line):
    with pytest.raises(ConfigError) as refused:
        scaled(config(*settings), replicas)
    assert str(refused.value).startswith(line)
    assert "\n" not in str(refused.value)


def test_a_fleet_that_grows_or_whose_versions_mix_may_be_smaller_than_a_step():
    large = ["rollout.prompts_per_step=96", "rollout.group_size=4", "rollout.replicas=1"]
    assert scaled(config(*large), 2).rollout.replicas == 2
    mixing = [*large[:2], "rollout.replicas=3", "rollout.on_new_weights=resume"]
    assert scaled(config(*mixing), 1).rollout.replicas == 1
