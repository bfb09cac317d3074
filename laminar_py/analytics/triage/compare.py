"""Runs side by side: how soon each reaches what all reach, and what each has learned at equal device-hours. Pure.

Accuracy is compared where every run was evaluated twice or more, else the reward in training. A level counts as
reached at the first point at or above it; nothing is guessed between two evaluations.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from laminar_py.analytics.measure.quality import Point
from laminar_py.analytics.triage.report import RunReport

_STAGES = (0.25, 0.5, 0.75, 1.0)  # of the way from the best start to the worst end


@dataclass(frozen=True, slots=True)
class Reached:
    """A level of quality, and for each run the first point at which it was there; None: never."""

    level: float
    points: tuple[Point | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Figures that the reports alone do not have; tuples have one entry for each run, in their order."""

    measure: str  # "accuracy" or "reward"
    reached: tuple[Reached, ...]
    device_hours: float  # that all have taken at least
    at_equal: tuple[Point | None, ...]  # the last point within them, which may lie well before their end
    reward_at_equal: tuple[Point | None, ...]  # in training


def compare(reports: Sequence[RunReport]) -> Comparison:
    """Comparison of two runs or more."""
    accuracy = all(len(report.quality.accuracy) >= 2 for report in reports)
    curves = [report.quality.accuracy if accuracy else report.quality.reward for report in reports]
    budget = min(report.rl_s * report.quality.devices / 3600 for report in reports)
    return Comparison(
        measure="accuracy" if accuracy else "reward",
        reached=tuple(
            Reached(level, tuple(_first(curve, level) for curve in curves)) for level in _levels(curves)
        ),
        device_hours=budget,
        at_equal=tuple(_within(curve, budget) for curve in curves),
        reward_at_equal=tuple(_within(report.quality.reward, budget) for report in reports),
    )


def _levels(curves: Sequence[Sequence[Point]]) -> list[float]:
    if not all(curves):
        return []
    start = max(curve[0].value for curve in curves)
    end = min(max(point.value for point in curve) for curve in curves)
    return [start + (end - start) * stage for stage in _STAGES] if end > start else []


def _first(curve: Sequence[Point], level: float) -> Point | None:
    return next((point for point in curve if point.value >= level - 1e-9), None)


def _within(curve: Sequence[Point], device_hours: float) -> Point | None:
    inside = [point for point in curve if point.device_hours <= device_hours * (1 + 1e-9)]
    return inside[-1] if inside else None
