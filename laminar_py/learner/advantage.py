"""Advantages of a group of trajectories. Called by the controller, so nothing here imports torch.

Invariant: depends on the group's rewards alone, in whatever order its members finished.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from laminar_py.algorithm import Advantage
from laminar_py.codec import FloatArray

Rewards: TypeAlias = npt.NDArray[np.float64]
STD_FLOOR = 1e-4  # added to the deviation; rewards are of the order of 1


def over_std(rewards: Rewards) -> Rewards:
    """`(r - mean) / (std + 1e-4)` with the sample deviation (K - 1): GRPO, Shao et al. 2024, section 4.1.2.

    E.g. `[1, 0, 0, 1]` gives about `[0.866, -0.866, -0.866, 0.866]`.
    """
    deviation = float(rewards.std(ddof=1))
    return centred(rewards) / (deviation + STD_FLOOR)


def centred(rewards: Rewards) -> Rewards:
    """`r - mean`: Dr. GRPO, Liu et al. 2025."""
    return rewards - float(rewards.mean())


def against_others(rewards: Rewards) -> Rewards:
    """`r_i - mean_{j != i} r_j`: RLOO, Ahmadian et al. 2024; equals `K / (K - 1) (r - mean)`."""
    return centred(rewards) * (len(rewards) / (len(rewards) - 1))


def as_they_are(rewards: Rewards) -> Rewards:
    """`r`; the packer normalises by mean and deviation of the whole step: REINFORCE++, Hu et al. 2025."""
    return rewards


def nothing(rewards: Rewards) -> Rewards:
    """0: only a teacher teaches."""
    return np.zeros_like(rewards)


GroupAdvantage: TypeAlias = Callable[[Rewards], Rewards]
ADVANTAGES: dict[Advantage, GroupAdvantage] = {
    Advantage.GROUP_STD: over_std,
    Advantage.GROUP_MEAN: centred,
    Advantage.LEAVE_ONE_OUT: against_others,
    Advantage.BATCH_STD: as_they_are,
    Advantage.NONE: nothing,
}


def group_advantages(kind: Advantage) -> Callable[[Sequence[float]], FloatArray]:
    """Of the K >= 2 rewards of one prompt [K], their advantages [K]."""

    def advantages(rewards: Sequence[float]) -> FloatArray:
        assert len(rewards) >= 2, f"a group of {len(rewards)} has no baseline"
        return ADVANTAGES[kind](np.asarray(rewards, dtype=np.float64)).astype(np.float32)

    return advantages
