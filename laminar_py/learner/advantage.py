"""Advantages of a group of trajectories. Called by the controller, so nothing here imports torch.

Invariant: depends on the group's rewards alone, in whatever order its members finished.
"""

from collections.abc import Sequence

import numpy as np

from laminar_py.codec import FloatArray

STD_FLOOR = 1e-4  # added to the deviation; rewards are of the order of 1


def has_signal(rewards: Sequence[float]) -> bool:
    """Whether the rewards differ; where they are all equal every advantage is 0."""
    return max(rewards) > min(rewards)


def group_advantages(rewards: Sequence[float]) -> FloatArray:
    """`(r - mean) / (std + 1e-4)` of the K >= 2 rewards of one prompt [K], with the sample deviation (K - 1).

    E.g. `[1, 0, 0, 1]` gives about `[0.866, -0.866, -0.866, 0.866]`. GRPO, Shao et al. 2024, section 4.1.2.
    """
    assert len(rewards) >= 2, f"a group of {len(rewards)} has no baseline"
    values = np.asarray(rewards, dtype=np.float64)
    advantages: FloatArray = ((values - values.mean()) / (values.std(ddof=1) + STD_FLOOR)).astype(np.float32)
    return advantages
