"""Figures of a measurement, which must be those that its module names."""

from collections.abc import Sequence

from laminar_lab.bench.registry import find
from laminar_lab.bench.report import Row


def figures(benchmark: str, only: str, rows: Sequence[Row]) -> dict[str, float | None]:
    """Values by the names of rows."""
    [measurement] = find(benchmark, only)
    assert sorted(row.name for row in rows) == sorted(measurement.row_names)
    return {row.name: row.value for row in rows}
