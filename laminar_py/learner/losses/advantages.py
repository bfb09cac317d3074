"""Advantages of a group of trajectories. Called by the controller, so nothing here imports torch.

Invariant: depends on the group's rewards alone, in whatever order its members finished.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from laminar_py.config.algorithm import Advantage
from laminar_py.records.codec import FloatArray

Rewards: TypeAlias = npt.NDArray[np.float64]
Advantages: TypeAlias = tuple[Rewards, float]
STD_FLOOR = 1e-4  # added to the deviation; rewards are of the order of 1


def over_std(rewards: Rewards) -> Advantages:
    """`(r - mean) / (std + 1e-4)` with the sample deviation (K - 1): GRPO, Shao et al. 2024, section 4.1.2.

    E.g. `[1, 0, 0, 1]` gives about `[0.866, -0.866, -0.866, 0.866]`.
    """
    scale = 1.0 / (float(rewards.std(ddof=1)) + STD_FLOOR)
    return (rewards - float(rewards.mean())) * scale, scale


def centred(rewards: Rewards) -> Advantages:
    """`r - mean`: Dr. GRPO, Liu et al. 2025."""
    return rewards - float(rewards.mean()), 1.0


def against_others(rewards: Rewards) -> Advantages:
    """`r_i - mean_{j != i} r_j`: RLOO, Ahmadian et al. 2024; equals `K / (K - 1) (r - mean)`."""
    return (rewards - float(rewards.mean())) * (len(rewards) / (len(rewards) - 1)), 1.0


def as_they_are(rewards: Rewards) -> Advantages:
    """`r`; the packer normalises by mean and deviation of the whole step: REINFORCE++, Hu et al. 2025."""
    return rewards, 1.0


def nothing(rewards: Rewards) -> Advantages:
    """0: only a teacher, a reference or a balance teaches."""
    return np.zeros_like(rewards), 0.0


GroupAdvantage: TypeAlias = Callable[[Rewards], Advantages]
ADVANTAGES: dict[Advantage, GroupAdvantage] = {
    Advantage.GROUP_STD: over_std,
    Advantage.GROUP_MEAN: centred,
    Advantage.LEAVE_ONE_OUT: against_others,
    Advantage.BATCH_STD: as_they_are,
    Advantage.NONE: nothing,
}


def group_advantages(kind: Advantage) -> Callable[[Sequence[float]], tuple[FloatArray, float]]:
    """Function from the K >= 2 rewards of one prompt [K] to advantages [K], and what a unit of reward is in them.

    Rewards are those of whole responses; where each token has its own, the advantage of token t is that of its
    response less `scale * sum_{s < t} r_s`: the return from there on against the same baseline (`packing.packer`).
    """

    def advantages(rewards: Sequence[float]) -> tuple[FloatArray, float]:
        assert len(rewards) >= 2, f"a group of {len(rewards)} has no baseline"
        values, scale = ADVANTAGES[kind](np.asarray(rewards, dtype=np.float64))
        return values.astype(np.float32), scale

    return advantages


def overlong_cost(cap: int, buffer: int | None) -> Callable[[int], float]:
    """Cost of a response's length: 0 up to `cap - buffer` tokens, 1 at `cap`, linear between; 0 without a buffer.

    With a cap of 100 and a buffer of 20 a response of 90 tokens loses 0.5. One that is cut says little about its
    answer, and one that ends shortly before is not as welcome as one that ends early.
    Soft overlong punishment: DAPO, Yu et al. 2025, eq. 13.
    """
    if buffer is None:
        return lambda length: 0.0
    return lambda length: min(1.0, max(0.0, (length - (cap - buffer)) / buffer))
