"""Staleness of what the learner consumed, in learner steps. Pure."""

from collections import Counter
from dataclasses import dataclass

from laminar_py.observe.analytics.read.columns import Trajectories
from laminar_py.records.trajectory import Status


@dataclass(frozen=True, slots=True)
class Staleness:
    """Figures of consumed trajectories, e.g. `Staleness(0.75, 2, {0: 2, 1: 1, 2: 1})`."""

    mean: float
    max: int
    counts: dict[int, int]  # trajectories at each staleness, ascending


def measure_staleness(trajectories: Trajectories) -> Staleness | None:
    """Staleness so far; None before anything was consumed."""
    staleness = trajectories.staleness[trajectories.is_status(Status.CONSUMED)]
    if not len(staleness):
        return None
    counts = Counter(staleness.tolist())
    return Staleness(float(staleness.mean()), int(staleness.max()), dict(sorted(counts.items())))
