"""Credit by role reaches the tokens of its turns, whatever tree these stand in."""

import numpy as np
import pytest

from laminar_py.records.codec import decode, encode
from laminar_py.records.credit import RoleCredit, credits_of, role_advantages, role_returns
from laminar_py.records.spans import NEW_CONVERSATION, Span

# four turns of two roles: each begins anew, the third goes on behind the first, and two versions had a part in it
SPANS = (
    Span(None, 0, 2, follows=NEW_CONVERSATION),
    Span(3, 2, 4),
    Span(None, 4, 5, follows=NEW_CONVERSATION),
    Span(3, 5, 8),
    Span(None, 8, 9, follows=4),
    Span(3, 9, 10),
    Span(4, 10, 12),
    Span(None, 12, 13, follows=8),
    Span(4, 13, 14),
)


def test_turns_are_of_the_role_that_took_them():
    credits = credits_of({"black": 1.0, "white": -1.0, "judge": 0.5}, ["black", "white", "black", "white"])
    assert [(one.role, one.reward, one.turns) for one in credits] == [
        ("black", 1.0, (1, 3)),
        ("white", -1.0, (2, 4)),
        ("judge", 0.5, ()),
    ]
    assert decode(tuple[RoleCredit, ...], encode(credits)) == credits


def test_a_role_that_has_turns_has_a_reward():
    with pytest.raises(ValueError, match=r"role 'white' has turns and no reward; give one to each of"):
        credits_of({"black": 1.0}, ["black", "white"])


def test_tokens_have_the_advantage_of_their_role_and_the_rest_none():
    credits = [
        RoleCredit(role="black", reward=1.0, turns=(1, 3), advantage=0.5),
        RoleCredit(role="white", reward=0.0, turns=(2,), advantage=-2.0),
    ]
    found = role_advantages(credits, SPANS)
    sampled = np.array([span.version is not None for span in SPANS for _ in range(span.end - span.start)])
    assert found[sampled].tolist() == [0.5] * 2 + [-2.0] * 3 + [0.5] * 3 + [0.0]
    returns = role_returns(credits, SPANS)
    assert returns.mean == pytest.approx(found[sampled].mean())
    assert returns.variance == pytest.approx(found[sampled].astype(np.float64).var())
