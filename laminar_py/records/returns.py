"""Returns of a response's tokens: the rewards from each token on. Pure; shared by `control`, `packing`, `learner`.

Where a reward function scores the response as a whole, every token has the same return: its reward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_py.records.codec import BoolArray
from laminar_py.records.columns import TOKEN_REWARDS, TokenValues

Numbers: TypeAlias = npt.NDArray[np.float64]

ROUNDING = 1e-6  # of what a response's rewards add up to without their signs: they travel as float32


def earlier_rewards(columns: Mapping[str, TokenValues]) -> Numbers | None:
    """[L] what the tokens before each one earned, no credit of it; None where only the whole is scored."""
    given = columns.get(TOKEN_REWARDS)
    if given is None:
        return None
    rewards = given.array
    earlier: Numbers = np.cumsum(rewards, dtype=np.float64) - rewards
    return earlier


class Earned(msgspec.Struct, frozen=True, kw_only=True):
    """Process rewards of one response in short: of what the tokens before each one earned, mean and variance.

    E.g. of rewards [0, 1, 1], before whose tokens 0, 0 and 1 were earned: mean 1/3, last 1, gross 1.
    """

    mean: float  # over tokens
    variance: float
    last: float  # before the last token
    gross: float  # all up to there without their signs, by which rounding is judged


def earned_by(columns: Mapping[str, TokenValues], *, among: BoolArray | None = None) -> Earned | None:
    """Process rewards in the columns of one response in short; None where there are none, or no token.

    Mean and variance are over the tokens `among` [L], if given.
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
    """Returns of one response's tokens, e.g. of rewards [0, 1]: total 1, mean 1, variance 0."""

    total: float  # of the first token: the reward of the whole response
    mean: float  # over tokens
    variance: float = 0.0  # over tokens
    noise: float = 0.0  # differences up to this are rounding

    def less(self, cost: float) -> "Returns":
        """Returns of a response that loses `cost` at its end."""
        if not cost:
            return self
        return Returns(total=self.total - cost, mean=self.mean - cost, variance=self.variance, noise=self.noise)


def returns_of(total: float, earned: Earned | None = None) -> Returns:
    """Returns of a response with the reward `total`, mean and variance over its tokens."""
    if earned is None:
        return Returns(total=total, mean=total)
    gross = earned.gross + abs(total - earned.last)
    return Returns(total=total, mean=total - earned.mean, variance=earned.variance, noise=ROUNDING * gross)


def differ(returns: Sequence[Returns]) -> bool:
    """True where the tokens of these responses have different returns, so that something can be learned."""
    noise = max(item.noise for item in returns)
    means = [item.mean for item in returns]
    return max(means) - min(means) > noise or max(item.variance for item in returns) > noise * noise
