"""Costs of recording a run, of its files, and of `laminar audit RUN verify`.

One process, pinned to one core, records a `SyntheticRun` and seals it; then the audit reads the record. CPU
seconds are of processes and threads, since a busy machine changes them less than wall time.
"""

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from laminar_lab.bench.report import Row, log_line
from laminar_lab.bench.synthetic_run import HOST, SyntheticRun
from laminar_lab.bench.workplace import workplace
from laminar_py.ledger import (
    LEDGER_NAME,
    SEGMENTS_NAME,
    Ledger,
    seal_run,
)
from laminar_py.records.host import SystemClock

ROWS = ("accounting_cpu", "ledger_bytes", "segment_bytes", "verify", "verify_cpu")
CHECKPOINT_EVERY = 10  # steps
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingCosts:
    """CPU seconds of the recording process, from the first event until all is on disk."""

    trajectories: int
    append_s: float  # in the event loop's thread, with the making of the events
    write_s: float  # in the writer's thread


def rows(*, trajectories: int = 100_000) -> list[Row]:
    """Measure each figure. About a minute for 100,000 trajectories."""
    with workplace() as folder:
        run = folder / "run"
        run.mkdir()
        log_line(f"recording {trajectories} trajectories")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            costs = pool.submit(_record, run, trajectories).result()
        log_line("verify")
        return [*_recording_rows(costs), *_disk_rows(run, costs), *_verify_rows(run, costs.trajectories)]


def _record(run: Path, trajectories: int) -> RecordingCosts:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    costs = asyncio.run(_record_steps(run, trajectories))
    seal_run(run)
    return costs


async def _record_steps(folder: Path, trajectories: int) -> RecordingCosts:
    """Record so many trajectories into `folder`; return CPU seconds by kind of work."""
    ledger = Ledger(folder / LEDGER_NAME, host=HOST, clock=SystemClock())
    await ledger.start()
    run = SyntheticRun(ledger, folder / SEGMENTS_NAME)
    process_s, thread_s = time.process_time(), time.thread_time()
    run.begin()
    await ledger.commit()
    while run.num_trajectories < trajectories:
        run.advance()
        await ledger.commit()
        if run.step % CHECKPOINT_EVERY == 0:
            run.checkpoint()
            await ledger.commit()
    append_s = time.thread_time() - thread_s
    write_s = time.process_time() - process_s - append_s
    await ledger.close()
    return RecordingCosts(trajectories=run.num_trajectories, append_s=append_s, write_s=write_s)


def _recording_rows(costs: RecordingCosts) -> list[Row]:
    """Return the row of recording: trajectories a CPU second."""
    count = costs.trajectories
    append_us, write_us = 1e6 * costs.append_s / count, 1e6 * costs.write_s / count
    conditions = (
        f"{count} trajectories: 8 events, 2 pieces and about 100 tokens each, 256 a step, a commit each step; one"
        f" core; issued to on disk: {append_us:.0f} us of a trajectory in the event loop,"
        f" {write_us:.0f} us in the writer"
    )
    return [Row("accounting_cpu", count / (costs.append_s + costs.write_s), "trajectories/CPU s", conditions)]


def _disk_rows(run: Path, costs: RecordingCosts) -> list[Row]:
    """Return the sizes of ledger and segments as rows, scaled to a million trajectories."""
    ledger = (run / LEDGER_NAME).stat().st_size
    segments = sum(path.stat().st_size for path in (run / SEGMENTS_NAME).iterdir())
    conditions = "about 100 tokens and log-probabilities in two pieces for each trajectory"
    per_million = MILLION / costs.trajectories
    return [
        Row("ledger_bytes", ledger * per_million / 1e9, "GB/million trajectories", conditions),
        Row("segment_bytes", segments * per_million / 1e9, "GB/million trajectories", conditions),
    ]


def _verify_rows(run: Path, trajectories: int) -> list[Row]:
    """Run `laminar audit RUN verify` and return the rows of its time. Fails if it finds a violation."""
    before, began = os.times(), time.perf_counter()
    laminar = str(Path(sys.executable).with_name("laminar"))
    subprocess.run([laminar, "audit", str(run), "verify"], check=True, stdout=subprocess.DEVNULL)
    elapsed_s, after = time.perf_counter() - began, os.times()
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    conditions = f"`laminar audit RUN verify` of {trajectories} trajectories, sealed, {os.cpu_count()} cores"
    return [Row("verify", elapsed_s, "s", conditions), Row("verify_cpu", used_s, "CPU s", conditions)]
