"""Advantages and targets of a critic against sums that are written out; the clipped loss of values."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laminar_py.config.critic import Action, CriticConfig
from laminar_py.learner.losses.value import estimate_advantages, value_loss
from tests.depth import examples

NUMBERS = st.floats(-2, 2, allow_nan=False, width=32)
TURNS = st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=6), min_size=1, max_size=4)
CHAINS = st.lists(TURNS, min_size=0, max_size=4)  # turns of (reward, value) of each token
SETTINGS = st.builds(
    CriticConfig,
    action=st.sampled_from(Action),
    gamma=st.sampled_from([0.5, 0.97, 1.0]),
    policy_lambda=st.sampled_from([0.0, 0.6, 0.95, 1.0]),
    value_lambda=st.sampled_from([0.0, 0.6, 1.0]),
)


def closed_form(rewards, values, gamma, decay):
    """`sum_k (gamma decay)^k (r + gamma V' - V)` of each action, term by term."""
    after = [*values[1:], 0.0]
    errors = [r + gamma * v_next - v for r, v, v_next in zip(rewards, values, after, strict=True)]
    return [
        sum((gamma * decay) ** (later - place) * errors[later] for later in range(place, len(errors)))
        for place in range(len(errors))
    ]


def expected(turns, given):
    """Advantages and targets of a chain's tokens, from the definition."""
    if given.action is Action.TOKEN:
        turns = [[token] for turn in turns for token in turn]
    rewards, values = [sum(r for r, _ in turn) for turn in turns], [turn[0][1] for turn in turns]
    advantages = closed_form(rewards, values, given.gamma, given.policy_lambda)
    targets = closed_form(rewards, values, given.gamma, given.value_lambda)
    lengths = [len(turn) for turn in turns]
    return np.repeat(advantages, lengths), np.repeat(np.add(values, targets), lengths)


def arrays(chains):
    """Values, returns, chains and places of all tokens; three tokens of an environment lie between two turns."""
    rows = []
    for chain, turns in enumerate(chains):
        left, place = sum(r for turn in turns for r, _ in turn), 0
        for turn in turns:
            for reward, value in turn:
                rows.append((value, left, chain * 7, place))
                left, place = left - reward, place + 1
            place += 3
    columns = np.array(rows, np.float64).reshape(-1, 4).T
    return columns[0], columns[1], columns[2].astype(np.int64), columns[3].astype(np.int64)


@settings(max_examples=examples(100), deadline=None)
@given(CHAINS, SETTINGS, st.randoms(use_true_random=False))
def test_advantages_are_the_closed_form_over_tokens_and_turns_in_any_order(chains, given, shuffle):
    values, returns, chain, place = arrays(chains)
    order = list(range(len(values)))
    shuffle.shuffle(order)
    found = estimate_advantages(
        values[order], returns[order], chains=chain[order], places=place[order], settings=given
    )
    wanted = [expected(turns, given) for turns in chains]
    for got, part in zip(found, range(2), strict=True):
        numbers = np.concatenate([np.zeros(0), *[one[part] for one in wanted]])
        np.testing.assert_allclose(got, numbers[order], rtol=1e-9, atol=1e-9)


def estimate(rewards, values, **changes):
    """Advantages and targets of one turn's tokens."""
    rewards, values = np.array(rewards, float), np.array(values, float)
    returns, count = np.cumsum(rewards[::-1])[::-1], len(values)
    return estimate_advantages(
        values,
        returns,
        chains=np.zeros(count, np.int64),
        places=np.arange(count),
        settings=CriticConfig(**changes),
    )


def test_with_lambda_1_the_advantage_is_the_return_above_the_value():
    advantages, targets = estimate([0, 0.5, 0, 1], [0.2, 0.4, -1.0, 0.9], policy_lambda=1.0)
    np.testing.assert_allclose(advantages, [1.3, 1.1, 2.0, 0.1])
    np.testing.assert_allclose(targets, [1.5, 1.5, 1.0, 1.0])


def test_with_lambda_0_it_is_the_error_of_one_step_and_no_value_follows_the_end():
    advantages, targets = estimate([0, 0, 1], [0.2, 0.4, 0.9], policy_lambda=0.0, value_lambda=0.0, gamma=0.5)
    np.testing.assert_allclose(advantages, [0.0, 0.05, 0.1])
    np.testing.assert_allclose(targets, [0.2, 0.45, 1.0])


def test_an_end_at_a_cap_is_an_end_like_others_on_its_own_chain():
    """A response cut before its reward, packed beside others: no value follows its last token."""
    given = CriticConfig(gamma=0.9, policy_lambda=0.5, value_lambda=0.5)
    alone, targets = estimate([0, 0, 0], [0.2, 0.4, 0.9], gamma=0.9, policy_lambda=0.5, value_lambda=0.5)
    np.testing.assert_allclose([alone[-1], targets[-1]], [-0.9, 0.0], atol=1e-12)
    beside = estimate_advantages(
        np.array([0.2, 0.4, 0.9, 5.0, 6.0]),
        np.array([0.0, 0.0, 0.0, 1.0, 1.0]),
        chains=np.array([0, 0, 0, 1, 1]),
        places=np.array([0, 1, 2, 0, 1]),
        settings=given,
    )
    np.testing.assert_allclose(beside[0][:3], alone)
    np.testing.assert_allclose(beside[1][:3], targets, atol=1e-12)


def test_a_long_chain_needs_no_power_that_underflows():
    advantages, _ = estimate(np.eye(1, 30_000, 29_999)[0], np.zeros(30_000), policy_lambda=0.5)
    np.testing.assert_allclose(advantages[-3:], [0.25, 0.5, 1.0])
    assert advantages[0] == 0.0


def loss_of(values, clip):
    """Loss, gradient and clips of values whose start was 0 and whose target is 1, with weights 1 and 2."""
    values = torch.tensor(values, requires_grad=True)
    weights, ones = torch.tensor([1.0, 2.0]), torch.ones(2)
    loss, is_clipped = value_loss(values, at_start=0 * ones, targets=ones, weights=weights, clip=clip)
    loss.backward()
    return loss.item(), values.grad.tolist(), is_clipped.tolist()


def test_a_value_that_has_moved_too_far_has_the_clipped_error_and_no_gradient():
    assert loss_of([0.25, 0.1], 0.2) == (
        pytest.approx((0.8**2 + 2 * 0.9**2) / 2),
        pytest.approx([0.0, -1.8]),
        [True, False],
    )
    assert loss_of([0.25, 0.1], None) == (
        pytest.approx((0.75**2 + 2 * 0.9**2) / 2),
        pytest.approx([-0.75, -1.8]),
        [False, False],
    )


def test_a_value_beyond_its_clip_on_the_wrong_side_keeps_its_gradient():
    loss, gradient, is_clipped = loss_of([-0.5, -0.1], 0.2)
    assert loss == pytest.approx((1.5**2 + 2 * 1.1**2) / 2)
    assert gradient == pytest.approx([-1.5, -2.2])
    assert is_clipped == [False, False]
