"""What `python -m benchmarks repack` measures: repacking on an emulated fleet, and whole schedules on one."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.repack.schedules import schedule_rows
from benchmarks.repack.workload import SIGMA, workload_rows
from laminar_py.bench.report import Row
from laminar_py.bench.turns import Tell

SIGMA_20X = 1.288  # p99 is 20 times the median


def rows(parts: Sequence[str], *, seeds: Sequence[int], tell: Tell) -> list[Row]:
    """Figures of these parts; the schedules with the first seed alone."""
    found = workload_rows(seeds=seeds, tell=tell) if "workload" in parts else []
    if "schedules" in parts:
        with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
            for sigma in (SIGMA, SIGMA_20X):
                found += schedule_rows(seeds=seeds[:1], sigma=sigma, tell=tell, folder=Path(folder))
    return found
