"""Figures of an evaluation from its answers: means, intervals, pass@k, votes. Pure.

Called where a pass ends, and by the audit; every view has its figures from here. Invariant: equal answers have
equal figures, in whatever order they came.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from math import comb

import numpy as np

from laminar_py.records.columns import Array
from laminar_py.records.evaluations import Estimate, EvalAnswer, SetFigures

RESAMPLES = 1_000
SEED = 0  # of the resampling, so that figures are the same wherever they are computed
TAILS = (2.5, 97.5)  # percentiles between which 95 % of the resampled means lie


def set_figures(answers: Iterable[EvalAnswer], *, samples: int) -> SetFigures | None:
    """Figures of a pass with `samples` answers to each problem; None where none has a score."""
    ordered = sorted(answers, key=lambda answer: (answer.problem, answer.sample))
    asked: dict[int, list[EvalAnswer]] = {}
    for answer in ordered:
        asked.setdefault(answer.problem, []).append(answer)
    kept = [group for group in asked.values() if any(one.reward is not None for one in group)]
    if not kept:
        return None
    scored = [[one for one in group if one.reward is not None] for group in kept]
    rewards = [[one.reward or 0.0 for one in group] for group in scored]
    is_accuracy = all(reward in (0.0, 1.0) for group in rewards for reward in group)
    votes = samples > 1 and any(one.said for group in scored for one in group)
    lengths = [answer.length for answer in ordered]
    return SetFigures(
        problems=len(asked),
        samples=samples,
        unscored=sum(answer.reward is None for answer in ordered),
        is_accuracy=is_accuracy,
        mean=_estimate([sum(group) / len(group) for group in rewards]),
        pass_at=_pass_at(rewards, samples) if is_accuracy else {},
        majority=_estimate([_vote(group) for group in scored]) if votes else None,
        truncated=_estimate([sum(one.truncated for one in group) / len(group) for group in kept]),
        length_p50=int(np.percentile(lengths, 50, method="higher")),
        length_p95=int(np.percentile(lengths, 95, method="higher")),
    )


def pass_at_k(num_answers: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the chance that one of `k` answers is right, from `num_answers` >= k, some right.

    Chen et al. 2021, "Evaluating large language models trained on code", equation 1.
    """
    return 1.0 - comb(num_answers - num_right, k) / comb(num_answers, k)


def _pass_at(rewards: Sequence[Sequence[float]], samples: int) -> dict[int, Estimate]:
    """pass@k, over the problems with k scored answers or more; no k where there is none."""
    counts = [(len(group), round(sum(group))) for group in rewards]
    found: dict[int, Estimate] = {}
    for k in _sizes(samples):
        chances = [pass_at_k(number, right, k) for number, right in counts if number >= k]
        if chances:
            found[k] = _estimate(chances)
    return found


def _sizes(samples: int) -> list[int]:
    """1, 2, 4, ... below `samples`, and that."""
    return [*(2**power for power in range((samples - 1).bit_length())), samples]


def _vote(group: Sequence[EvalAnswer]) -> float:
    """Reward of what most answers to a problem say; of a tie the mean. What says nothing has no vote."""
    votes = Counter(one.said for one in group if one.said)
    if not votes:
        return 0.0
    most = max(votes.values())
    rewards = [
        sum(one.reward or 0.0 for one in group if one.said == said) / count
        for said, count in votes.items()
        if count == most
    ]
    return sum(rewards) / len(rewards)


def _estimate(numbers: Sequence[float]) -> Estimate:
    """Mean and interval of one number of each problem, by resampling problems."""
    values: Array = np.array(numbers)  # [P]
    draws, size = np.random.default_rng(SEED), len(values)
    means = [values[draws.integers(size, size=size)].mean() for _ in range(RESAMPLES)]
    low, high = np.percentile(means, TAILS)
    return Estimate(float(values.mean()), float(low), float(high))
