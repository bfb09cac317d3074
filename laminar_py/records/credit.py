"""Credit of response tokens: returns of process rewards, and rewards by role. Pure.

A reward for the whole response gives every token the same return. With process rewards, the return of a token is
the sum of the rewards from this token on. In an episode of several roles, e.g. both sides of a game that one
policy plays, each turn of the model belongs to one role and each role has a reward of its own. Then an advantage
compares a role with the same role in the group's other episodes. `control` compares returns, and the packer writes
advantages of tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.codec import BoolArray, FloatArray, IntArray
from laminar_py.records.columns import TOKEN_REWARDS, TokenValues
from laminar_py.records.spans import Span, sampled_mask, turn_ends

Numbers: TypeAlias = npt.NDArray[np.float64]

ROUNDING = 1e-6  # error of a return, relative to the sum of the response's absolute rewards, which are float32
MOST_ROLES = 64  # roles of an episode
ROLE_CHARS = 256  # characters of a role's name


def earlier_rewards(columns: Mapping[str, TokenValues]) -> Numbers | None:
    """[L] sum of the process rewards before each token, which earn it no credit; None without process rewards."""
    column = columns.get(TOKEN_REWARDS)
    if column is None:
        return None
    rewards = column.array
    earlier: Numbers = np.cumsum(rewards, dtype=np.float64) - rewards
    return earlier


class Earned(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a response's `earlier_rewards`: enough to compute its returns without reading its tokens.

    E.g. for rewards [0, 1, 1], whose earlier rewards are [0, 0, 1]:
    `Earned(mean=1/3, variance=2/9, last=1.0, gross=1.0)`.
    """

    mean: float  # over tokens
    variance: float  # over tokens
    last: float  # before the last token
    gross: float  # sum of the absolute rewards before the last token; rounding is in proportion to it


def earned_by(columns: Mapping[str, TokenValues], *, among: BoolArray | None = None) -> Earned | None:
    """Summarise the process rewards in a response's columns; None if there are none, or no token counts.

    Mean and variance are over the tokens where `among` [L] is True, by default over all tokens.
    """
    earlier = earlier_rewards(columns)
    if earlier is None or not len(earlier):
        return None
    counted = earlier if among is None else earlier[among]
    if not len(counted):
        return None
    return Earned(
        mean=float(counted.mean()),
        variance=float(counted.var()),
        last=float(earlier[-1]),
        gross=float(np.abs(np.diff(earlier)).sum()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """Returns of a response's tokens, e.g. for rewards [0, 1]: `Returns(total=1.0, mean=1.0)`."""

    total: float  # of the first token: the reward of the whole response
    mean: float  # over tokens
    variance: float = 0.0  # over tokens
    noise: float = 0.0  # differences up to this are rounding

    def minus(self, cost: float) -> "Returns":
        """Return the returns after a `cost` is taken from the response's last reward."""
        if not cost:
            return self
        return Returns(total=self.total - cost, mean=self.mean - cost, variance=self.variance, noise=self.noise)


def returns_of(total: float, earned: Earned | None = None) -> Returns:
    """Returns of a response whose rewards sum to `total`; `earned` is None without process rewards."""
    if earned is None:
        return Returns(total=total, mean=total)
    gross = earned.gross + abs(total - earned.last)
    return Returns(total=total, mean=total - earned.mean, variance=earned.variance, noise=ROUNDING * gross)


def returns_differ(returns: Sequence[Returns]) -> bool:
    """True if any tokens of these responses have different returns, so that their group has signal."""
    noise = max(item.noise for item in returns)
    means = [item.mean for item in returns]
    return max(means) - min(means) > noise or max(item.variance for item in returns) > noise * noise


class RoleCredit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Reward of one role in an episode, e.g. `RoleCredit(role="white", reward=1.0, turns=(1, 3))`."""

    role: str
    reward: float
    turns: tuple[int, ...]  # turns of the model that the role played, counted from 1
    advantage: float = 0.0  # 0 until the group is complete


def credits_of(rewards: Mapping[str, float], roles: Sequence[str]) -> tuple[RoleCredit, ...]:
    """Credit of each role in `rewards`; `roles` names each turn's role. Raises ValueError for a missing reward."""
    if missing := sorted(set(roles) - set(rewards)):
        raise ValueError(f"role {missing[0]!r} has turns and no reward; give one to each of {sorted(set(roles))}")
    turns: dict[str, list[int]] = {role: [] for role in rewards}
    for turn, role in enumerate(roles, 1):
        turns[role].append(turn)
    return tuple(
        RoleCredit(role=role, reward=float(reward), turns=tuple(turns[role])) for role, reward in rewards.items()
    )


def role_advantages(credits: Sequence[RoleCredit], spans: Sequence[Span]) -> FloatArray:
    """[L] advantage of each token: its role's advantage, 0 on an environment's tokens."""
    ends = [0, *turn_ends(spans)]
    advantages = np.zeros(spans[-1].end if spans else 0, np.float32)
    for credit in credits:
        for turn in credit.turns:
            advantages[ends[turn - 1] : ends[turn]] = credit.advantage
    return advantages


def role_numbers(credits: Sequence[RoleCredit], spans: Sequence[Span]) -> IntArray:
    """[L] number of the role that each token belongs to; 0 without roles."""
    ends = [0, *turn_ends(spans)]
    numbers = np.zeros(spans[-1].end if spans else 0, np.int32)
    for number, credit in enumerate(credits):
        for turn in credit.turns:
            numbers[ends[turn - 1] : ends[turn]] = number
    return numbers


def role_returns(credits: Sequence[RoleCredit], spans: Sequence[Span]) -> Returns:
    """Mean and variance of advantages over a response's sampled tokens, as `Returns`."""
    advantages = role_advantages(credits, spans)
    sampled = advantages[sampled_mask(spans, len(advantages))].astype(np.float64)
    mean = float(sampled.mean())
    return Returns(total=mean, mean=mean, variance=float(sampled.var()))
