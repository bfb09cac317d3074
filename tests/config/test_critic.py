"""Settings of a critic: where they are filled in, and which combinations are refused."""

import pytest

from laminar_py.config.algorithm import Advantage, AlgorithmConfig
from laminar_py.config.critic import CriticConfig
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.records.columns import Source
from tests.runs.runs import REPO

QUICKSTART = REPO / "configs/quickstart.yaml"


def test_ppo_fills_in_its_critic_and_keeps_what_is_given():
    plain = load_config(QUICKSTART, ["algorithm.name=ppo"]).algorithm
    assert (plain.advantage, plain.critic) == (Advantage.GAE, CriticConfig())
    given = load_config(QUICKSTART, ["algorithm.name=ppo", "algorithm.critic.lr=1e-3"]).algorithm
    assert given.critic == CriticConfig(lr=1e-3)
    assert AlgorithmConfig(name="grpo", advantage=Advantage.GAE).critic == CriticConfig()
    again = AlgorithmConfig.model_validate_json(given.model_dump_json())
    assert again == given


def test_a_step_with_a_critic_keeps_every_group_and_whole_responses():
    algorithm = AlgorithmConfig(name="ppo")
    assert algorithm.normalises_step
    assert algorithm.needs_whole_responses
    assert {column.source for column in algorithm.packed_columns} == {Source.PACKER}
    assert {column.source for column in algorithm.columns} == {Source.PACKER, Source.CRITIC}
    assert AlgorithmConfig(name="grpo").columns == ()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["algorithm.critic.lr=1e-3"], "algorithm.critic: advantage=group_std uses no values; leave critic out"),
        (["algorithm.name=ppo", "algorithm.critic=null"], "advantage=gae needs a critic; leave critic out"),
        (["algorithm.name=tba", "algorithm.advantage=gae"], "objective=balance has no advantages"),
        (
            ["rollout.group_size=1"],
            "a group of one has no advantages; set at least 2, or set algorithm.name to ppo",
        ),
        (["algorithm.name=ppo", "algorithm.critic.gamma=0.0"], "gamma"),
    ],
)
def test_settings_that_contradict_each_other_are_named(settings, words):
    with pytest.raises(ConfigError, match=words):
        load_config(QUICKSTART, settings)


@pytest.mark.parametrize("name", ["ppo", "reinforce_pp"])
def test_a_prompt_may_have_one_response_where_nothing_compares_a_group(name):
    config = load_config(QUICKSTART, [f"algorithm.name={name}", "rollout.group_size=1"])
    assert config.trajectories_per_step == config.rollout.prompts_per_step
