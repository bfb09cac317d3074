"""`fleet.jsonl`: what replicas and cores do, once a second of the RL phase. Run by the controller."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import psutil

from laminar_py.ledger.row_files import append_row, open_rows
from laminar_py.telemetry.stats import Stats

EVERY_S = 1.0


def cpu_use(cores: set[int]) -> float:
    """Share of these cores that was busy since the call before, whoever kept them so."""
    busy = [use for core, use in enumerate(psutil.cpu_percent(percpu=True)) if core in cores]
    return sum(busy) / (100 * max(1, len(busy)))


async def watch_fleet(path: Path, stats: Stats, *, generated_tokens: Callable[[], int]) -> None:
    """Append a row for each second of RL until cancelled."""
    cores = os.sched_getaffinity(0)
    with open_rows(path) as file:
        while True:
            await asyncio.sleep(EVERY_S)
            use = cpu_use(cores)  # also before RL, since each call counts from the one before
            if stats.in_rl:
                append_row(file, stats.fleet(generated_tokens(), cpu_use=use, cores=len(cores)))
                file.flush()
