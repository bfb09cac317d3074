"""Curves over seeds. Pure: arrays in, arrays out."""

from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

MOST_POINTS = 400

Line = tuple[Sequence[float], Sequence[float]]
"""Places, ascending, and values of one seed."""


class Band(msgspec.Struct, frozen=True, kw_only=True):
    """Curve of a variant: mean, lowest and highest seed at each place, e.g.

    `Band(name="lr-0.001", x=[0, 5], mean=[0.1, 0.4], low=[0.1, 0.3], high=[0.1, 0.5], seeds=3)`.
    """

    name: str
    x: list[float]  # [P]
    mean: list[float]  # [P]
    low: list[float]  # [P]
    high: list[float]  # [P]
    seeds: int  # each of which is in every point


def make_band(name: str, lines: Sequence[Line]) -> Band:
    """Curve over seeds, each taken linearly between its own points, at every place that some seed has a point.

    From where the last of them begins to where the first ends: a mean over fewer would jump.
    """
    known = [line for line in map(finite, lines) if line[0]]
    assert all(a <= b for x, _ in known for a, b in pairwise(x)), f"{name}: places in no order"
    if not known:
        return Band(name=name, x=[], mean=[], low=[], high=[], seeds=0)
    first, last = max(x[0] for x, _ in known), min(x[-1] for x, _ in known)
    places = np.unique(np.concatenate([np.asarray(x, np.float64) for x, _ in known]))
    places = places[(places >= first) & (places <= last)]
    if len(places) > MOST_POINTS:
        places = places[np.linspace(0, len(places) - 1, MOST_POINTS).round().astype(int)]
    values = np.array([np.interp(places, x, y) for x, y in known])
    return Band(
        name=name,
        x=places.tolist(),
        mean=values.mean(axis=0).tolist(),
        low=values.min(axis=0).tolist(),
        high=values.max(axis=0).tolist(),
        seeds=len(known),
    )


def finite(line: Line) -> Line:
    """Points of a line whose values are numbers."""
    kept = [(x, y) for x, y in zip(*line, strict=True) if np.isfinite(x) and np.isfinite(y)]
    return [x for x, _ in kept], [y for _, y in kept]


def value_at(line: Line, place: float) -> float | None:
    """Value of a line at a place, between its points; None where it does not reach so far."""
    x, y = finite(line)
    return float(np.interp(place, x, y)) if x and x[0] <= place <= x[-1] else None
