"""Reports of benchmarks and experiments: a table, or one JSON object and nothing else on standard output.

The object is `{"bench", "machine", "rows": [{"name", "value", "unit", "conditions"}]}`.
"""

import os
import platform
from pathlib import Path

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
