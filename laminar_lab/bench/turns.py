"""Sides of a comparison that take turns, so that whatever else a machine does changes each of them alike."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

Side = Callable[[int], float]  # figure of one round, which is given by its number
Tell = Callable[[str], None]  # takes a line of progress


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median and range of one side over another, round by round, e.g. `Ratio(1.25, 0.98, 1.35, 7)`."""

    median: float
    least: float
    most: float
    count: int  # rounds

    @classmethod
    def of(cls, one: Sequence[float], other: Sequence[float]) -> Self:
        """From the figures of two sides."""
        ratios = [a / b for a, b in zip(one, other, strict=True)]
        return cls(median(ratios), min(ratios), max(ratios), len(ratios))

    def __str__(self) -> str:
        return f"median of {self.count} rounds in turn, {self.least:.2f} to {self.most:.2f}"


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Median and range, e.g. `spread([9, 11, 10])` is "10 (9 to 11)"."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def in_turn(
    sides: Mapping[str, Side], *, rounds: int, warm: int = 0, tell: Tell | None = None
) -> dict[str, list[float]]:
    """Figures of each side, another side first in each round; `warm` rounds before are left out."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(warm + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(sides[name](turn))
        if tell is not None and turn >= warm:
            told = ", ".join(f"{name} {figures[-1]:.3f}" for name, figures in found.items())
            tell(f"round {turn - warm + 1} of {rounds}: {told}")
    return {name: figures[warm:] for name, figures in found.items()}


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this process while `work` runs; a busy machine changes them less than it changes seconds."""
    began = time.process_time()
    work()
    return time.process_time() - began
