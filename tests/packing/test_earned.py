"""Process rewards in short say of a response's returns all that its tokens one by one would."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from laminar_py.config.algorithm import Aggregation
from laminar_py.learner.packing.balance import fit_bins
from laminar_py.learner.packing.packer import STD_FLOOR, step_weights
from laminar_py.records.codec import decode, encode
from laminar_py.records.columns import TOKEN_REWARDS, token_values
from laminar_py.records.credit import ROUNDING, Earned, earned_by, returns_differ, returns_of
from laminar_py.records.pieces import TokensRef
from tests.builders import make_ref, make_trajectory
from tests.stored import by_reference

REWARDS = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=30)
WHOLE = st.lists(st.integers(-2, 2), min_size=1, max_size=4)  # their sums are exact


def earned(rewards, **kwargs):
    """In short, after the way to the controller."""
    return decode(Earned, encode(earned_by({TOKEN_REWARDS: column(rewards)}, **kwargs)))


def column(rewards):
    return token_values(np.array(rewards, np.float32))


def returns_from_each_token(rewards, total):
    """[L] directly: the reward of the response, less what the tokens before one earned."""
    return np.array([total - float(sum(rewards[:place])) for place in range(len(rewards))])


@given(rewards=REWARDS, cost=st.floats(0, 2))
def test_mean_and_variance_of_returns_are_those_of_its_tokens(rewards, cost):
    total = float(sum(rewards)) - cost
    direct, found = returns_from_each_token(rewards, total), returns_of(total, earned(rewards))
    gross = sum(map(abs, rewards[:-1])) + abs(total - sum(rewards[:-1]))
    assert found.total == pytest.approx(direct[0], abs=1e-9)
    assert found.mean == pytest.approx(direct.mean(), abs=1e-9)
    assert found.variance == pytest.approx(direct.var(), abs=1e-9)
    assert found.noise == pytest.approx(ROUNDING * gross, abs=1e-12)


@given(rewards=REWARDS, data=st.data())
def test_among_some_of_the_tokens_only_these_count(rewards, data):
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards))))
    if not mask.any():
        assert earned_by({TOKEN_REWARDS: column(rewards)}, among=mask) is None
        return
    direct = returns_from_each_token(rewards, 1.0)[mask]
    found = returns_of(1.0, earned(rewards, among=mask))
    assert (found.mean, found.variance) == pytest.approx((direct.mean(), direct.var()), abs=1e-9)


@given(group=st.lists(WHOLE, min_size=2, max_size=4))
def test_responses_differ_exactly_where_returns_of_some_two_tokens_do(group):
    direct = np.concatenate([returns_from_each_token(rewards, sum(rewards)) for rewards in group])
    found = returns_differ([returns_of(float(sum(rewards)), earned(rewards)) for rewards in group])
    assert found == (np.ptp(direct) > 0)


def test_without_rewards_of_tokens_every_token_has_the_same_return():
    assert earned_by({}) is None
    found = returns_of(0.75)
    assert (found.total, found.mean, found.variance, found.noise) == (0.75, 0.75, 0.0, 0.0)


def referred_to(item):
    """A trajectory as the controller has it."""
    return by_reference(item, (TokensRef(0, len(item.response_ids), make_ref()),))


@given(group=st.lists(st.tuples(REWARDS, st.booleans()), min_size=1, max_size=6))
def test_a_step_that_was_normalised_by_references_is_normalised_over_its_tokens(group):
    """The advantages that a learner makes are (R - mean R) / (std R + floor) over all tokens of the step."""
    items, returns = [], []
    for place, (rewards, by_token) in enumerate(group):
        total = float(sum(rewards))
        item = make_trajectory(f"g{place}.0", response=len(rewards), advantage=total)
        if by_token:
            item = replace(item, columns={TOKEN_REWARDS: column(rewards)})
        items.append(item)
        returns.append(returns_from_each_token(rewards, total) if by_token else np.full(len(rewards), total))
    direct = np.concatenate(returns)
    bins = fit_bins([referred_to(item) for item in items], max_tokens=64)
    terms = step_weights(bins, aggregation=Aggregation.TOKEN_MEAN, normalises=True)
    assert terms.advantage_mean == pytest.approx(direct.mean(), abs=1e-9)
    if terms.advantage_scale:
        found = np.concatenate([terms.advantages(item) * np.ones(len(item.response_ids)) for item in items])
        expected = (direct - direct.mean()) / (direct.std() + STD_FLOOR)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    else:
        assert direct.std() <= ROUNDING * max(np.abs(direct).max() + sum(map(abs, r)) * 2 for r, _ in group)
