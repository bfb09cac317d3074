"""Least squares with coefficients that are not negative, of times that the terms of a formula add up to. Pure.

Relative errors count, so that a short time matters as much as a long one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np


@dataclass(frozen=True, slots=True)
class TimedShape:
    """A measured time and what it is made of, e.g. `TimedShape("64 x 400 tokens", (1, 64, 25600), 0.021)`."""

    name: str
    terms: tuple[float, ...]  # [K] what each coefficient is multiplied with
    seconds: float


@dataclass(frozen=True, slots=True)
class LinearFit:
    """Coefficients [K] of the terms of observations [N], e.g. `LinearFit(observations, (0.006, 8e-6, 2e-8))`."""

    observations: Sequence[TimedShape]
    coefficients: tuple[float, ...]

    def seconds(self, terms: Sequence[float]) -> float:
        """Time that the fit gives."""
        return sum(factor * term for factor, term in zip(self.coefficients, terms, strict=True))

    @property
    def errors(self) -> list[float]:
        """Fitted over measured time less 1, of each observation [N]."""
        return [self.seconds(one.terms) / one.seconds - 1 for one in self.observations]

    @property
    def mean_error(self) -> float:
        """Mean size of the errors."""
        return float(np.mean(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        """Size of the largest error."""
        return max(map(abs, self.errors))


def fit(observations: Sequence[TimedShape]) -> LinearFit:
    """Coefficients, none negative, with the least sum of squared relative errors; 0 for terms that do not help.

    The best is that of the terms which it does not leave out, so each choice of these is tried: there are few.
    """
    terms = np.array([np.array(one.terms) / one.seconds for one in observations])  # [N, K]
    scale = np.abs(terms).max(0)
    best, least = np.zeros(len(scale)), float(len(observations))
    for size in range(1, len(scale) + 1):
        for chosen in map(list, combinations(range(len(scale)), size)):
            found = np.linalg.lstsq(terms[:, chosen] / scale[chosen], np.ones(len(terms)), rcond=None)[0]
            if (found < 0).any():
                continue
            lost = float(np.square(terms[:, chosen] / scale[chosen] @ found - 1).sum())
            if lost < least:
                least, best = lost, np.zeros(len(scale))
                best[chosen] = found / scale[chosen]
    return LinearFit(tuple(observations), tuple(best.tolist()))
