"""`fleet.jsonl`: what replicas and cores do, once a second of the RL phase; and a sign that all have their GPUs.

Run by the controller.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil

from laminar_py.ledger.row_files import append_row, open_rows
from laminar_py.observe.telemetry.memory import processes
from laminar_py.observe.telemetry.stats import Stats

EVERY_S = 1.0


def cpu_use(cores: set[int]) -> float:
    """Share of these cores that was busy since the call before, whoever kept them so."""
    busy = [use for core, use in enumerate(psutil.cpu_percent(percpu=True)) if core in cores]
    return sum(busy) / (100 * max(1, len(busy)))


class OwnCpu:
    """CPU time of the controller and of all below it, from one call to the next."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, float], float] = {}  # seconds by process, which has a number and a start
        self._since = time.monotonic()

    def use(self, num_cores: int) -> float:
        """Share of so many cores that the run's own processes kept busy since the call before."""
        now, seen, used_s = time.monotonic(), dict[tuple[int, float], float](), 0.0
        for process in processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # what it used since the last call is lost
                times = process.cpu_times()
                key = (process.pid, process.create_time())
                seen[key] = times.user + times.system
                used_s += seen[key] - self._seen.get(key, 0.0)
        elapsed_s, self._since, self._seen = max(now - self._since, 1e-9), now, seen
        return used_s / (elapsed_s * num_cores)


async def note_placed(path: Path, *, all_placed: Callable[[], Awaitable[bool]]) -> None:
    """Write a file once every process has its GPUs; `laminar launch` then starts the next run beside this one."""
    placed = False
    while not placed:
        await asyncio.sleep(EVERY_S)
        placed = await all_placed()
    await asyncio.to_thread(path.write_text, f"{time.time()}\n")


async def watch_fleet(
    path: Path, stats: Stats, *, generated_tokens: Callable[[], int], has_processes: bool = True
) -> None:
    """Append a row for each second of RL until cancelled; of a simulation without the use of cores."""
    cores, own = os.sched_getaffinity(0), OwnCpu()
    use = own_use = None
    with open_rows(path) as file:
        while True:
            await asyncio.sleep(EVERY_S)
            if has_processes:
                use = cpu_use(cores)  # also before RL, since each call counts from the one before
                own_use = await asyncio.to_thread(own.use, len(cores))
            if stats.in_rl:
                count = len(cores) if has_processes else 0
                row = stats.fleet(generated_tokens(), cpu_use=use, own_cpu_use=own_use, cores=count)
                append_row(file, row)
                file.flush()
