"""Group advantages: numbers by hand, and what holds for any group."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.config.algorithm import Advantage
from laminar_py.learner.losses.advantages import group_advantages, overlong_cost
from laminar_py.records.columns import TOKEN_REWARDS, token_values
from laminar_py.records.credit import Returns, earned_by, returns_differ, returns_of


def advantages(kind, rewards):
    return group_advantages(kind)([returns_of(reward) for reward in rewards])[0]


def by_token(rewards) -> Returns:
    """Returns of a response whose tokens have these rewards."""
    values = np.asarray(rewards, np.float32)
    return returns_of(float(values.sum(dtype=np.float64)), earned_by({TOKEN_REWARDS: token_values(values)}))


def of_tokens(kind, group):
    """Advantages [L] of each response's tokens, as the packer makes them."""
    found, scale = group_advantages(kind)([by_token(rewards) for rewards in group])
    return [
        advantage - scale * (np.cumsum(rewards) - np.asarray(rewards))
        for advantage, rewards in zip(found, group, strict=True)
    ]


def grpo(rewards):
    return advantages(Advantage.GROUP_STD, rewards)


IN_THE_STEP = (Advantage.BATCH_STD, Advantage.GAE)  # kinds that compare there, by packer or critic
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


@pytest.mark.parametrize("kind", sorted(set(Advantage) - set(IN_THE_STEP)))
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


@pytest.mark.parametrize("kind", Advantage)
def test_one_alone_is_compared_with_nothing_in_its_group(kind):
    expected = 1.0 if kind in IN_THE_STEP else 0.0
    assert advantages(kind, [1.0]) == [expected]


def test_advantages_do_without_torch():
    code = "import sys, laminar_py.learner.losses.advantages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


@pytest.mark.parametrize("kind", [Advantage.GROUP_STD, Advantage.GROUP_MEAN, Advantage.LEAVE_ONE_OUT])
def test_the_scale_is_what_a_unit_of_reward_is(kind: Advantage):
    """Between members, since the baseline of one depends on the others alone or is common to all."""
    rewards = [1.0, 0.25, 0.0, 3.0]
    found, scale = group_advantages(kind)([returns_of(reward) for reward in rewards])
    others = len(rewards) / (len(rewards) - 1) if kind is Advantage.LEAVE_ONE_OUT else 1.0
    assert found[3] - found[1] == pytest.approx(2.75 * scale * others, rel=1e-5)


CENTRING = [Advantage.GROUP_STD, Advantage.GROUP_MEAN, Advantage.LEAVE_ONE_OUT]
PROCESS = st.lists(
    st.lists(st.sampled_from([-1.0, -0.25, 0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=20), min_size=2, max_size=8
)


def test_equal_totals_of_different_token_rewards_give_bounded_advantages():
    found = np.concatenate(of_tokens(Advantage.GROUP_STD, [[0.75, 0, 0, 0], [0, 0, 0, 0.75]]))
    assert 0.5 < np.abs(found).max() < 2.0


@given(PROCESS)
def test_no_token_is_further_from_the_mean_than_its_share_of_the_deviation_allows(group):
    """One token among n of one response among K: at most sqrt(n (K - 1)) deviations."""
    for found in of_tokens(Advantage.GROUP_STD, group):
        assert np.abs(found).max() <= np.sqrt(len(found) * (len(group) - 1)) + 1e-4


@given(PROCESS)
def test_returns_over_their_deviation_have_mean_0_and_deviation_1_each_response_counting_once(group):
    returns = [by_token(rewards) for rewards in group]
    found = of_tokens(Advantage.GROUP_STD, group)
    assert np.mean([item.mean() for item in found]) == pytest.approx(0.0, abs=1e-4)
    if returns_differ(returns):
        squares = sum(np.mean(item**2) for item in found) / (len(group) - 1)
        assert squares == pytest.approx(1.0, rel=0.05)  # 1e-4 is added to the deviation


@pytest.mark.parametrize("kind", CENTRING)
@given(rewards=GROUPS, length=st.integers(1, 9))
def test_a_reward_on_the_last_token_is_the_reward_of_the_response(kind: Advantage, rewards, length):
    rewards = [float(np.float32(reward)) for reward in rewards]
    found = of_tokens(kind, [[0.0] * (length + index) + [reward] for index, reward in enumerate(rewards)])
    for tokens, expected in zip(found, advantages(kind, rewards), strict=True):
        np.testing.assert_allclose(tokens, expected, rtol=1e-5, atol=1e-6)


def test_what_differs_by_rounding_is_no_signal_and_moves_nothing():
    """A thousandth of ten thousand, as which float32 has token rewards."""
    earned = earned_by({TOKEN_REWARDS: token_values(np.array([0, 10_000], np.float32))})
    group = [returns_of(10_000.0, earned), returns_of(10_000.001, earned)]
    assert not returns_differ(group)
    found, _ = group_advantages(Advantage.GROUP_STD)(group)
    assert np.abs(found).max() == 0.0


@pytest.mark.parametrize("kind", CENTRING)
def test_a_cost_of_length_is_taken_from_every_token(kind: Advantage):
    plain, costly = [by_token([0, 1]), by_token([1, 0, 1])], [by_token([0, 0.75]), by_token([1, 0, 1])]
    expected, _ = group_advantages(kind)(costly)
    found, _ = group_advantages(kind)([plain[0].minus(0.25), plain[1]])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@settings(deadline=None)  # the first call imports it
@given(st.lists(st.lists(st.floats(-10, 10), min_size=4, max_size=4), min_size=1, max_size=4))
def test_advantages_of_groups_are_those_of_trl(groups):
    """Its `scale_rewards`: `group`, and `none`, which is the division left out."""
    utils = pytest.importorskip("trl.trainer.utils", reason="trl is not installed")
    rewards = torch.tensor(groups, dtype=torch.float64)
    centre = rewards - rewards.nanmean(1, keepdim=True)
    expected = centre / (utils.nanstd(rewards, dim=1, keepdim=True) + 1e-4)
    for row, group in enumerate(groups):
        np.testing.assert_allclose(grpo(group), expected[row].numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(advantages(Advantage.GROUP_MEAN, group), centre[row].numpy(), atol=1e-5)
