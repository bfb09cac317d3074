"""Figures of a measurement, which must be those that its table names."""

from collections.abc import Sequence

from laminar_lab.bench.catalog import Catalog
from laminar_lab.bench.report import Row
from laminar_lab.commands.bench import BENCHMARKS


def figures(
    benchmark: str, only: str, rows: Sequence[Row], *, catalog: Catalog = BENCHMARKS
) -> dict[str, float | None]:
    """Values by the names of rows."""
    assert [row.name for row in rows] == catalog[benchmark].measurements[only].rows.split()
    return {row.name: row.value for row in rows}
