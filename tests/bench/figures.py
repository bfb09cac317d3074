"""Figures of a benchmark, which must be those that its module names."""

from collections.abc import Sequence
from types import ModuleType

from laminar_lab.bench.report import Row


def figures(benchmark: ModuleType, rows: Sequence[Row]) -> dict[str, float | None]:
    """Values by the names of rows."""
    assert [row.name for row in rows] == list(benchmark.ROWS)
    return {row.name: row.value for row in rows}
