"""Returns of a response's tokens: the rewards from each token on. Pure; shared by `control`, `packing`, `learner`.

Where a reward function scores the response as a whole, every token has the same return: its reward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """Returns of one response's tokens, e.g. of rewards [0, 1]: total 1, mean 1, variance 0."""

    total: float  # of the first token: the reward of the whole response
    mean: float  # over tokens
    variance: float = 0.0  # over tokens
    noise: float = 0.0  # differences up to this are rounding

    def less(self, cost: float) -> "Returns":
        """Returns of a response that loses `cost` at its end."""
        return replace(self, total=self.total - cost, mean=self.mean - cost)


def returns_of(
    total: float, columns: Mapping[str, TokenValues] | None = None, *, among: BoolArray | None = None
) -> Returns:
    """Returns of a response with the reward `total`, mean and variance over the tokens `among` [L], if given."""
    earlier = earlier_rewards(columns or {})
    if earlier is None or not len(earlier):
        return Returns(total=total, mean=total)
    gross = float(np.abs(np.diff(earlier)).sum()) + abs(total - float(earlier[-1]))
    counted = earlier if among is None else earlier[among]
    if not len(counted):
        return Returns(total=total, mean=total)
    return Returns(
        total=total,
        mean=total - float(counted.mean()),
        variance=float(counted.var()),
        noise=ROUNDING * gross,
    )


def differ(returns: Sequence[Returns]) -> bool:
    """True where the tokens of these responses have different returns, so that something can be learned."""
    noise = max(item.noise for item in returns)
    means = [item.mean for item in returns]
    return max(means) - min(means) > noise or max(item.variance for item in returns) > noise * noise
