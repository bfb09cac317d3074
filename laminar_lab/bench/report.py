"""Figures and how they are told: rows in a table or in one JSON object, sides that take turns, lines of progress.

The object is `{"bench", "machine", "rows": [{"name", "value", "unit", "conditions"}]}` and nothing else is on
standard output. Sides of a comparison take turns, so that other work of the machine changes each of them alike.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Self

import msgspec
from rich.console import Console
from rich.table import Table


class Row(msgspec.Struct, frozen=True):
    """A figure, e.g. `Row("async_over_sync", 1.3, "x", "quickstart, seed 0, 60 s of RL each")`."""

    name: str
    value: float | None  # None: not measured, and `conditions` say why
    unit: str
    conditions: str


class Report(msgspec.Struct, frozen=True):
    """Figures of a benchmark."""

    bench: str
    machine: str
    rows: list[Row]


def machine() -> str:
    """Processor, cores, memory and Python of this host."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def show(bench: str, rows: list[Row], *, as_json: bool) -> None:
    """Print the figures."""
    report = Report(bench, machine(), rows)
    console = Console()
    if as_json:
        console.file.write(msgspec.json.encode(report).decode() + "\n")
        return
    table = Table("figure", "value", "unit", title=f"{bench} on {report.machine}")
    for row in rows:
        value = "-" if row.value is None else f"{row.value:,.3f}".rstrip("0").rstrip(".")
        table.add_row(row.name, value, row.unit)
    console.print(table)
    for conditions in dict.fromkeys(row.conditions for row in rows):
        console.print(conditions, soft_wrap=True, highlight=False)


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


def tell(line: str) -> None:
    """Print a line of progress on standard error."""
    Console(stderr=True).print(line, soft_wrap=True, markup=False, highlight=False)
