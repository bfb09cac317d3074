"""One harness for figures: rounds in which sides take turns, medians, ratios, and a report as a table or as JSON.

Measurements of `laminar bench` and experiments call it. The JSON report is `{"bench", "machine", "rows": [{"name",
"value", "unit", "conditions"}]}`; nothing else is printed on standard output. The sides of a comparison take
turns, so that other work on the machine changes each of them alike. This module imports no heavy library.
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
    """Describe processor, cores, memory and Python of this host."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else platform.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}"


def load_now() -> str:
    """Describe the load of this machine; the work of other programs makes times longer."""
    return f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def show(bench: str, rows: list[Row], *, as_json: bool) -> None:
    """Print the rows of a benchmark on standard output, as a table or as one line of JSON."""
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


def log_line(line: str) -> None:
    """Print a line of progress on standard error."""
    Console(stderr=True).print(line, soft_wrap=True, markup=False, highlight=False)


Side = Callable[[int], float]  # takes the number of a round and returns the side's figure of that round


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median and range of one side over another, round by round, e.g. `Ratio(1.25, 0.98, 1.35, 7)`."""

    median: float
    least: float
    most: float
    count: int  # rounds

    @classmethod
    def between(cls, one: Sequence[float], other: Sequence[float]) -> Self:
        """Divide the figures of one side by the figures of another, round by round."""
        ratios = [a / b for a, b in zip(one, other, strict=True)]
        return cls(median(ratios), min(ratios), max(ratios), len(ratios))

    def row(self, name: str, conditions: str) -> Row:
        """Make the row of this ratio; its conditions end with the range."""
        return Row(name, self.median, "x", f"{conditions}; {self}")

    def __str__(self) -> str:
        return f"median of {self.count} rounds in turn, {self.least:.2f} to {self.most:.2f}"


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Format median and range, e.g. `spread([9, 11, 10])` is "10 (9 to 11)"."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def in_turn(sides: Mapping[str, Side], *, rounds: int, warm: int = 0) -> dict[str, list[float]]:
    """Return the figures of each side, round by round; another side comes first in each round.

    `warm` further rounds precede the counted ones and are left out. Each counted round is a line of progress.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for turn in range(warm + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(sides[name](turn))
        if turn >= warm:
            latest = ", ".join(f"{name} {figures[-1]:.3f}" for name, figures in found.items())
            log_line(f"round {turn - warm + 1} of {rounds}: {latest}")
    return {name: figures[warm:] for name, figures in found.items()}


def cpu_s(work: Callable[[], object]) -> float:
    """Run `work` and return the CPU seconds of this process; a busy machine changes them less than wall time."""
    began = time.process_time()
    work()
    return time.process_time() - began
