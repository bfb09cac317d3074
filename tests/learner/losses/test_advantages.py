"""Group advantages: numbers by hand, and what holds for any group."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laminar_py.config.algorithm import Advantage
from laminar_py.learner.losses.advantages import group_advantages, overlong_cost


def advantages(kind, rewards):
    return group_advantages(kind)(rewards)[0]


def grpo(rewards):
    return advantages(Advantage.GROUP_STD, rewards)


GROUPS = st.lists(st.floats(-10, 10), min_size=2, max_size=16)


def test_advantages_by_hand():
    deviation = (1.0 / 3.0) ** 0.5  # sample deviation of [1, 0, 0, 1]
    expected = 0.5 / (deviation + 1e-4)
    np.testing.assert_allclose(grpo([1, 0, 0, 1]), np.array([1, -1, -1, 1]) * expected, rtol=1e-6)


@given(GROUPS)
def test_advantages_equal_the_torch_formula(rewards: list[float]):
    values = torch.tensor(rewards, dtype=torch.float64)
    expected = (values - values.mean()) / (values.std() + 1e-4)
    np.testing.assert_allclose(grpo(rewards), expected.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(set(Advantage) - {Advantage.BATCH_STD}))
def test_a_group_without_signal_has_no_advantages(kind: Advantage):
    np.testing.assert_allclose(advantages(kind, [0.7] * 5), 0.0, atol=1e-6)


def test_the_last_tokens_below_the_cap_cost_reward():
    cost = overlong_cost(100, 20)
    assert [cost(length) for length in (0, 80, 90, 100, 101)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert overlong_cost(100, None)(100) == 0.0


@given(GROUPS)
def test_leaving_one_out_compares_with_the_mean_of_the_others(rewards: list[float]):
    found = advantages(Advantage.LEAVE_ONE_OUT, rewards)
    for index, advantage in enumerate(found):
        others = rewards[:index] + rewards[index + 1 :]
        assert advantage == pytest.approx(rewards[index] - sum(others) / len(others), abs=1e-5)


@given(rewards=GROUPS)
def test_without_a_deviation_advantages_are_in_units_of_reward(rewards: list[float]):
    expected = np.array(rewards) - np.mean(rewards)
    np.testing.assert_allclose(advantages(Advantage.GROUP_MEAN, rewards), expected, atol=1e-5)


def test_a_group_of_one_has_no_baseline():
    with pytest.raises(AssertionError, match="group of 1"):
        grpo([1.0])


def test_advantages_do_without_torch():
    code = "import sys, laminar_py.learner.losses.advantages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("kind", [Advantage.GROUP_STD, Advantage.GROUP_MEAN, Advantage.LEAVE_ONE_OUT])
def test_the_scale_is_what_a_unit_of_reward_is(kind: Advantage):
    """Between members, since the baseline of one depends on the others alone or is common to all."""
    rewards = [1.0, 0.25, 0.0, 3.0]
    found, scale = group_advantages(kind)(rewards)
    others = len(rewards) / (len(rewards) - 1) if kind is Advantage.LEAVE_ONE_OUT else 1.0
    assert found[3] - found[1] == pytest.approx(2.75 * scale * others, rel=1e-5)
