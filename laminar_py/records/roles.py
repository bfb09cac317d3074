"""Credit by role: an episode in which one policy plays several roles, e.g. both sides of a game. Pure.

An episode is one trajectory. Each turn of the model is of one role, each role has a reward of its own, and the
advantage of its tokens is against the same role of the other episodes of the group. Shared by `control`, which
compares, and `packing`, which gives each token its advantage. Invariant: a turn is of one role.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from laminar_py.records.codec import FloatArray
from laminar_py.records.returns import Returns
from laminar_py.records.spans import Span, sampled_mask
from laminar_py.records.tree import turn_ends

MOST_ROLES = 64  # of an episode
ROLE_CHARS = 256  # of a role's name


class RoleCredit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reward of one role in an episode, e.g. `RoleCredit(role="white", reward=1.0, turns=(1, 3))`."""

    role: str
    reward: float
    turns: tuple[int, ...]  # of the model, 1 the first
    advantage: float = 0.0  # once its group is complete


def credits_of(rewards: Mapping[str, float], roles: Sequence[str]) -> tuple[RoleCredit, ...]:
    """Credit of the roles that have rewards, from the role of each turn. Raises ValueError for one without."""
    if missing := sorted(set(roles) - set(rewards)):
        raise ValueError(f"role {missing[0]!r} has turns and no reward; give one to each of {sorted(set(roles))}")
    turns: dict[str, list[int]] = {role: [] for role in rewards}
    for turn, role in enumerate(roles, 1):
        turns[role].append(turn)
    return tuple(
        RoleCredit(role=role, reward=float(reward), turns=tuple(turns[role])) for role, reward in rewards.items()
    )


def role_advantages(credits: Sequence[RoleCredit], spans: Sequence[Span]) -> FloatArray:
    """[L] advantage of each token of a response that spans cover: that of its turn's role, else 0."""
    ends = [0, *turn_ends(spans)]
    advantages = np.zeros(spans[-1].end if spans else 0, np.float32)
    for credit in credits:
        for turn in credit.turns:
            advantages[ends[turn - 1] : ends[turn]] = credit.advantage
    return advantages


def role_returns(credits: Sequence[RoleCredit], spans: Sequence[Span]) -> Returns:
    """Mean and variance of the advantages of a response's sampled tokens."""
    advantages = role_advantages(credits, spans)
    sampled = advantages[sampled_mask(spans, len(advantages))].astype(np.float64)
    mean = float(sampled.mean())
    return Returns(total=mean, mean=mean, variance=float(sampled.var()))
