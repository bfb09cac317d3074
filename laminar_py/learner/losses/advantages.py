"""Group advantages. The controller computes them, so nothing here imports torch.

An advantage depends only on the group's returns, not on the order in which its members finished
(`tests/learner/losses/test_advantages.py`).
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from laminar_py.config.algorithm import Advantage
from laminar_py.records.codec import FloatArray
from laminar_py.records.credit import Returns

Numbers: TypeAlias = npt.NDArray[np.float64]
Advantages: TypeAlias = tuple[Numbers, float]
"""(advantages [K] of a group's responses, advantage of one unit of reward)."""
STD_FLOOR = 1e-4  # added to the deviation of rewards, which are of the order of 1


def divided_by_std(returns: Sequence[Returns]) -> Advantages:
    """`(r - mean) / (std + 1e-4)` with the sample deviation (K - 1): GRPO, Shao et al. 2024, section 4.1.2.

    E.g. rewards `[1, 0, 0, 1]` give about `[0.866, -0.866, -0.866, 0.866]`. Mean and deviation are over the
    returns of all tokens, where each response counts once; without token rewards, returns are the rewards.
    A deviation that is only rounding gives advantages of 0.
    """
    means = _means(returns)
    within = sum(item.variance for item in returns) / (len(returns) - 1)
    deviation = float(np.sqrt(means.var(ddof=1) + within))
    noise = max(item.noise for item in returns)
    scale = 1.0 / (deviation + STD_FLOOR) if deviation >= noise else 0.0
    return (_totals(returns) - float(means.mean())) * scale, scale


def centred(returns: Sequence[Returns]) -> Advantages:
    """`r - mean` for the group's rewards r: Dr. GRPO, Liu et al. 2025."""
    return _totals(returns) - float(_means(returns).mean()), 1.0


def against_others(returns: Sequence[Returns]) -> Advantages:
    """`r_i - mean_{j != i} r_j` for K rewards r: RLOO, Ahmadian et al. 2024; equals `K / (K - 1) (r - mean)`."""
    means = _means(returns)
    others = (means - float(means.mean())) * (len(means) / (len(means) - 1))
    return (_totals(returns) - means) + others, 1.0


def unchanged(returns: Sequence[Returns]) -> Advantages:
    """Rewards as they are. The packer normalises them over the whole step: REINFORCE++, Hu et al. 2025. Or the
    learner's critic makes advantages of them."""
    return _totals(returns), 1.0


def zero(returns: Sequence[Returns]) -> Advantages:
    """0 for every response: the signal comes from a teacher, a reference or a trajectory balance instead."""
    return np.zeros(len(returns)), 0.0


GroupAdvantage: TypeAlias = Callable[[Sequence[Returns]], Advantages]
ADVANTAGES: dict[Advantage, GroupAdvantage] = {
    Advantage.GROUP_STD: divided_by_std,
    Advantage.GROUP_MEAN: centred,
    Advantage.LEAVE_ONE_OUT: against_others,
    Advantage.BATCH_STD: unchanged,
    Advantage.GAE: unchanged,
    Advantage.NONE: zero,
}


def group_advantages(kind: Advantage) -> Callable[[Sequence[Returns]], tuple[FloatArray, float]]:
    """Return a function that takes the returns of a prompt's K responses, and gives advantages [K] and a scale.

    An advantage is of a response's first token, and the scale is the advantage of one unit of reward. If tokens
    have rewards r_s, the packer subtracts `scale * sum_{s < t} r_s` from the advantage of token t, which leaves
    the return from t on against the same baseline. A single response gets advantage 0, since the group has no
    other to compare it with; `batch_std` and `gae` compare it within the step instead.
    """

    def advantages(returns: Sequence[Returns]) -> tuple[FloatArray, float]:
        """Compute advantages of this kind, [K] as float32, and the scale."""
        if len(returns) < 2 and ADVANTAGES[kind] is not unchanged:
            return np.zeros(len(returns), np.float32), 1.0
        values, scale = ADVANTAGES[kind](returns)
        return values.astype(np.float32), scale

    return advantages


def _totals(returns: Sequence[Returns]) -> Numbers:
    return np.array([item.total for item in returns], dtype=np.float64)


def _means(returns: Sequence[Returns]) -> Numbers:
    return np.array([item.mean for item in returns], dtype=np.float64)


def overlong_cost(cap: int, buffer: int | None) -> Callable[[int], float]:
    """Return a function from a response's length to its cost: 0 up to `cap - buffer` tokens, 1 at `cap`.

    Between the two the cost is linear: with a cap of 100 and a buffer of 20, a response of 90 tokens costs 0.5.
    Without a buffer the cost is always 0. Soft overlong punishment: DAPO, Yu et al. 2025, eq. 13.
    """
    if buffer is None:
        return lambda length: 0.0
    return lambda length: min(1.0, max(0.0, (length - (cap - buffer)) / buffer))
