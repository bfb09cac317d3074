"""Advantages and targets from a critic's values, and the critic's loss. Pure; `critic` calls it.

An action is a sampled token or a turn. The actions of a response follow each other in the order in which they were
sampled; an environment's tokens lie between them. In an episode of several roles each role has a chain of its own,
since each has a reward of its own. A chain ends with its last action, also where a cap cut the response: the
reward is for the response as it is, and the position in a context of bounded length is part of the state.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from laminar_py.config.critic import Action, CriticConfig
from laminar_py.records.codec import BoolArray

Numbers: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.integer]


def estimate_advantages(
    values: Numbers, returns: Numbers, *, chains: Integers, places: Integers, settings: CriticConfig
) -> tuple[Numbers, Numbers]:
    """Return the advantage of each of N tokens and the target of its value, [N] each.

    `values` [N] are of the state before each token, `returns` [N] the sum of rewards from the token on. Tokens of
    one chain have equal numbers in `chains` [N], and `places` [N] in their response order them. With reward r_t,
    value V_t and V = 0 behind the end: `d_t = r_t + gamma V_{t+1} - V_t`, and the advantage is
    `sum_k (gamma lambda)^k d_{t+k}`. The target is V_t plus the same sum with `value_lambda`.

    Schulman et al. 2016, eq. 16; two lambdas: VC-PPO, Yuan et al. 2025.
    """
    order = np.lexsort((places, chains))
    chain, place = chains[order], places[order]
    begins = np.ones(len(order), np.bool_)  # an action
    if settings.action is Action.TURN:
        begins[1:] = (np.diff(chain) != 0) | (np.diff(place) != 1)
    heads, action = np.flatnonzero(begins), np.cumsum(begins) - 1
    value, later, of_chain = values[order][heads], returns[order][heads], chain[heads]
    continues = np.zeros(len(heads), np.bool_)
    continues[:-1] = of_chain[1:] == of_chain[:-1]
    rewards = later - np.where(continues, np.roll(later, -1), 0.0)
    errors = rewards + settings.gamma * np.where(continues, np.roll(value, -1), 0.0) - value
    advantages, targets = np.empty_like(values), np.empty_like(values)
    advantages[order] = _discounted(errors, continues, settings.gamma * settings.policy_lambda)[action]
    targets[order] = (value + _discounted(errors, continues, settings.gamma * settings.value_lambda))[action]
    return advantages, targets


def _discounted(terms: Numbers, continues: BoolArray, factor: float) -> Numbers:
    """[n] sums `s_i = terms_i + factor s_{i+1}`, without the last part where `continues` [n] is False.

    Each pass doubles the number of terms in every sum, so there are about log2 n passes over the arrays.
    """
    sums, factors, reach = terms.copy(), np.where(continues, factor, 0.0), 1
    while factors.any():
        sums[:-reach] += factors[:-reach] * sums[reach:]
        factors[:-reach] *= factors[reach:]
        reach *= 2
    return sums


def value_loss(
    values: Tensor, *, at_start: Tensor, targets: Tensor, weights: Tensor, clip: float | None
) -> tuple[Tensor, Tensor]:
    """Return `sum_t w_t max((V - T)^2, (clip(V, V_0 - eps, V_0 + eps) - T)^2) / 2`, a scalar, and its clips [N].

    V are the `values`, V_0 the values `at_start` of the step, T the `targets`, w the `weights`, [N] each. The
    second result is True where the clipped value has the larger error, so that the token has no gradient.

    Schulman et al., "openai/baselines" ppo2, 2017; Andrychowicz et al. 2021, section 3.2.
    """
    errors = (values - targets).square()
    if clip is None:
        return 0.5 * (weights * errors).sum(), torch.zeros_like(values, dtype=torch.bool)
    clipped = (at_start + (values - at_start).clamp(-clip, clip) - targets).square()
    return 0.5 * (weights * torch.maximum(errors, clipped)).sum(), clipped > errors
