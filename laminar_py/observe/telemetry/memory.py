"""Peak memory of a run: summed PSS of the controller and all its descendants, and shared memory."""

import asyncio
import contextlib
import os
from pathlib import Path

import psutil

from laminar_py.ledger.run_folder import RunFolder
from laminar_py.observe.telemetry.stats import Stats

EVERY_S = 10.0


def processes() -> list[psutil.Process]:
    """Own process and everything below it."""
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def pss_bytes(pid: int) -> int:
    """Proportional set size: private pages plus this process's share of shared ones."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def folder_bytes(folder: Path) -> int:
    """Bytes of the files below a folder; what vanishes meanwhile counts 0."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def used_bytes(pids: list[int], shm: Path) -> int:
    """Bytes that these processes and the version folders in `shm` take; pages mapped twice may count twice."""
    return sum(pss_bytes(pid) for pid in pids) + folder_bytes(shm)


async def watch_memory(run: RunFolder, stats: Stats, shm: Path) -> None:
    """Note the run's processes and their peak of memory until cancelled."""
    while True:
        pids = [process.pid for process in processes()]
        run.note_processes(pids)
        used = await asyncio.to_thread(used_bytes, pids, shm)
        stats.peak_memory_bytes = max(stats.peak_memory_bytes, used)
        await asyncio.sleep(EVERY_S)
