"""Watchers of the controller: `fleet.jsonl` with rows of RL at equal intervals, and the peak of memory.

A row has the load of replicas and cores. The interval is a second; when the file is full, it loses every other
row, and the interval doubles. Memory is the PSS of the controller and its descendants, plus shared memory.
"""

import asyncio
import contextlib
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from laminar_py.ledger.row_files import append_row, halve_rows, open_rows, read_last
from laminar_py.observe.stats import Stats
from laminar_py.records.metrics import FleetRow

MEMORY_EVERY_S = 10.0
FLEET_EVERY_S = 1.0
FLEET_BYTES = 1 << 25  # at which rows get rarer: nine hours of 48 replicas


def processes() -> list[psutil.Process]:
    """Return this process and its descendants."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def pss_bytes(pid: int) -> int:
    """Return the bytes of a process's private pages plus its share of shared pages (PSS); 0 if it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder; a file that is deleted during the call counts 0."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def used_bytes(pids: list[int], shm: Path) -> int:
    """Return the bytes of processes plus the files in the folder `shm`; a mapped page may count twice."""
    return sum(pss_bytes(pid) for pid in pids) + folder_bytes(shm)


async def watch_memory(stats: Stats, shm: Path) -> None:
    """Update `stats.peak_memory_bytes` every `MEMORY_EVERY_S` until cancelled; `shm` has the run's versions."""
    while True:
        pids = [process.pid for process in processes()]
        used = await asyncio.to_thread(used_bytes, pids, shm)
        stats.peak_memory_bytes = max(stats.peak_memory_bytes, used)
        await asyncio.sleep(MEMORY_EVERY_S)


def cpu_use(cores: set[int]) -> float:
    """Return the busy share of the `cores`, under all processes of this host, since the previous call."""
    busy = [use for core, use in enumerate(psutil.cpu_percent(percpu=True)) if core in cores]
    return sum(busy) / (100 * max(1, len(busy)))


class OwnCpu:
    """Measures the CPU time of the controller and its descendants between two calls of `use`."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, float], float] = {}  # seconds by process id and start
        self._since = time.monotonic()

    def use(self, num_cores: int) -> float:
        """Return the share of `num_cores` that the run's processes kept busy since the previous call."""
        now, seen, used_s = time.monotonic(), dict[tuple[int, float], float](), 0.0
        for process in processes():
            with contextlib.suppress(psutil.NoSuchProcess):  # the use of a process that has just ended is lost
                times = process.cpu_times()
                key = (process.pid, process.create_time())
                seen[key] = times.user + times.system
                used_s += seen[key] - self._seen.get(key, 0.0)
        elapsed_s, self._since, self._seen = max(now - self._since, 1e-9), now, seen
        return used_s / (elapsed_s * num_cores)


async def watch_fleet(
    path: Path, stats: Stats, *, generated_tokens: Callable[[], int], has_processes: bool = True
) -> None:
    """Append a row to the file `path` at each interval of RL until cancelled; keep it below `FLEET_BYTES`."""
    cores, own = os.sched_getaffinity(0), OwnCpu()
    use = own_use = None
    every_s = interval_s(path)
    while True:
        with open_rows(path) as file:
            while file.tell() < FLEET_BYTES:
                await asyncio.sleep(every_s)
                if has_processes:
                    use = cpu_use(cores)  # also before RL, since each call measures since the previous call
                    own_use = await asyncio.to_thread(own.use, len(cores))
                if stats.in_rl:
                    count = len(cores) if has_processes else 0
                    row = stats.fleet_row(generated_tokens(), cpu_use=use, own_cpu_use=own_use, cores=count)
                    append_row(file, row)
                    file.flush()
        halve_rows(path)
        every_s *= 2


def interval_s(path: Path) -> float:
    """Return the interval of the rows in a file, `FLEET_EVERY_S` times a power of two."""
    last = read_last(path, FleetRow)
    if last is None:
        return FLEET_EVERY_S
    mean_s = last.rl_s / max(1, path.read_bytes().count(b"\n"))
    return FLEET_EVERY_S * 2.0 ** max(0, round(math.log2(max(mean_s, FLEET_EVERY_S) / FLEET_EVERY_S)))
