"""Costs of recording, of its files and of reading them back.

A `SyntheticRun` is recorded by one process that is pinned to one core, sealed, and read again. CPU seconds are of
processes and threads, so that a busy machine changes them less than it changes seconds.
"""

import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import psutil

from laminar_lab.bench.ledger.synthetic import CHECKPOINT_EVERY, HOST, SyntheticRun
from laminar_lab.bench.report import Row, Tell
from laminar_py.ledger import (
    LEDGER_NAME,
    SEGMENTS_NAME,
    ArchiveAnswer,
    ArchiveRequest,
    Ledger,
    archive_pieces,
    file_name,
    reading,
    seal_run,
)
from laminar_py.ledger.audit import accounting, describe_events, read_story
from laminar_py.observe import pss_bytes
from laminar_py.records.codec import decode, encode
from laminar_py.records.host import Clock, SystemClock

ROWS = (
    "accounting accounting_cpu append_cpu writer_cpu archive_cpu accounting_while_read read_while_written "
    "ledger_bytes archive_bytes verify verify_cpu verify_memory show_p50 show_max show_command"
)
SHOWN = 40  # trajectories
READ_PAUSE_S = 0.2
SAMPLE_S = 0.2  # of memory
MILLION = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingCosts:
    """Measurements of the recording process, in seconds of CPU where not said otherwise."""

    trajectories: int
    elapsed_s: float  # wall, from the first event until all is on disk; archiving not counted
    append_s: float  # in the event loop's thread, with what makes the events
    write_s: float  # in the writer's
    archive_s: float
    archived: int  # trajectories
    reads_s: tuple[float, ...] = ()  # wall, of readers that asked meanwhile


def rows(*, trajectories: int = 100_000, tell: Tell) -> list[Row]:
    """Measure each figure. About a minute for 100,000 trajectories."""
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        alone, watched = Path(folder) / "alone", Path(folder) / "watched"
        tell(f"recording {trajectories} trajectories")
        recorded = _in_process(alone, trajectories, reads=False)
        tell("the same, a fifth of it, while a reader asks")
        read = _in_process(watched, max(trajectories // 5, 1), reads=True)
        tell("verify")
        return [
            *_recording_rows(recorded, read),
            *_disk_rows(alone, recorded),
            *_verify_rows(alone, recorded.trajectories),
            *_show_rows(alone, recorded.trajectories),
        ]


def _in_process(run: Path, trajectories: int, *, reads: bool) -> RecordingCosts:
    run.mkdir()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_record, run, trajectories, reads=reads).result()


def _record(run: Path, trajectories: int, *, reads: bool) -> RecordingCosts:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    done = threading.Event()
    times: list[float] = []
    reader = threading.Thread(target=_ask, args=(run, done, times), daemon=True)
    recorded = asyncio.run(_lead(run, trajectories, SystemClock(), reader=reader if reads else None))
    done.set()
    if reads:
        reader.join()
    seal_run(run)
    return replace(recorded, reads_s=tuple(times))


async def archive_here(ledger: Ledger, run: Path, step: int) -> int:
    """Archive what nobody needs who goes back to `step` or later, of a run of one host; how many trajectories."""
    rows = await ledger.settled_pieces(step)
    if not rows:
        return 0
    request = encode(ArchiveRequest(str(run), file_name(ledger.seq, 0), rows))
    answer = decode(ArchiveAnswer, await asyncio.to_thread(archive_pieces, request))
    numbers = sorted({row.trajectory for row in rows})
    await ledger.archived([answer.event], numbers)
    return len(numbers)


async def _lead(
    folder: Path, trajectories: int, clock: Clock, *, reader: threading.Thread | None
) -> RecordingCosts:
    ledger = Ledger(folder / LEDGER_NAME, host=HOST, clock=clock)
    await ledger.start()
    run = SyntheticRun(ledger, folder / SEGMENTS_NAME)
    archived, archive_s, archive_wall_s = 0, 0.0, 0.0
    began, process_s, thread_s = time.perf_counter(), time.process_time(), time.thread_time()
    run.begin()
    await ledger.commit()
    if reader is not None:
        reader.start()
    while run.num_trajectories < trajectories:
        run.advance()
        await ledger.commit()
        if run.step % CHECKPOINT_EVERY == 0:
            run.checkpoint()
            await ledger.commit()
            before, wall = time.process_time(), time.perf_counter()
            archived += await archive_here(ledger, folder, run.step - CHECKPOINT_EVERY)
            archive_s += time.process_time() - before
            archive_wall_s += time.perf_counter() - wall
    elapsed_s = time.perf_counter() - began - archive_wall_s
    append_s = time.thread_time() - thread_s
    write_s = time.process_time() - process_s - append_s - archive_s
    await ledger.close()
    return RecordingCosts(
        trajectories=run.num_trajectories,
        elapsed_s=elapsed_s,
        append_s=append_s,
        write_s=write_s,
        archive_s=archive_s,
        archived=archived,
    )


def _ask(run: Path, done: threading.Event, times: list[float]) -> None:
    while not done.wait(READ_PAUSE_S):
        began = time.perf_counter()
        assert accounting(run).balanced
        times.append(time.perf_counter() - began)


def _recording_rows(recorded: RecordingCosts, read: RecordingCosts) -> list[Row]:
    count = recorded.trajectories
    conditions = (
        f"{count} trajectories: 8 events, 2 pieces and about 100 tokens each, 256 a step, a commit each step; one"
        " core; issued to on disk, without archiving"
    )
    asked = (
        f"{read.trajectories} trajectories, a thread of the same core counts all rows up to five times a second"
    )
    used = recorded.append_s + recorded.write_s
    return [
        Row("accounting", count / recorded.elapsed_s, "trajectories/s", conditions),
        Row("accounting_cpu", count / used, "trajectories/CPU s", conditions),
        Row("append_cpu", recorded.append_s / count * 1e6, "us/trajectory", conditions),
        Row("writer_cpu", recorded.write_s / count * 1e6, "us/trajectory", conditions),
        Row(
            "archive_cpu",
            recorded.archive_s / max(recorded.archived, 1) * 1e6,
            "us/trajectory",
            "after every checkpoint, one in ten steps; copies and deletion",
        ),
        Row("accounting_while_read", read.trajectories / read.elapsed_s, "trajectories/s", asked),
        Row("read_while_written", statistics.median(read.reads_s) * 1e3 if read.reads_s else None, "ms", asked),
    ]


def _disk_rows(run: Path, recorded: RecordingCosts) -> list[Row]:
    ledger = (run / LEDGER_NAME).stat().st_size
    archive = sum(path.stat().st_size for path in (run / "archive").glob("*.segment"))
    conditions = "random tokens and log-probabilities, which nothing compresses; all but the last archived"
    per_million = MILLION / recorded.trajectories
    return [
        Row("ledger_bytes", ledger * per_million / 1e9, "GB/million trajectories", conditions),
        Row("archive_bytes", archive * per_million / 1e9, "GB/million trajectories", conditions),
    ]


def _verify_rows(run: Path, trajectories: int) -> list[Row]:
    before = os.times()
    began = time.perf_counter()
    with subprocess.Popen([*_laminar(), "audit", str(run), "verify"], stdout=subprocess.DEVNULL) as process:
        peak = _watch(process)
    elapsed_s = time.perf_counter() - began
    assert process.returncode == 0, f"verify ended with {process.returncode}"
    after = os.times()
    used_s = after.children_user + after.children_system - before.children_user - before.children_system
    conditions = f"`laminar audit RUN verify` of {trajectories} trajectories, sealed, {os.cpu_count()} cores"
    return [
        Row("verify", elapsed_s, "s", conditions),
        Row("verify_cpu", used_s, "CPU s", conditions),
        Row("verify_memory", peak / 2**20, "MiB, all its processes", conditions),
    ]


def _watch(process: "subprocess.Popen[bytes]") -> int:
    """Bytes at the peak of a process and its children, as seen a few times a second."""
    peak = 0
    while process.poll() is None:
        try:
            family = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
        except psutil.NoSuchProcess:
            break
        peak = max(peak, sum(map(pss_bytes, family)))
        time.sleep(SAMPLE_S)
    return peak


def _show_rows(run: Path, trajectories: int) -> list[Row]:
    rng = random.Random(0)
    with reading(run) as connection:
        numbers = [rng.randint(1, trajectories) for _ in range(SHOWN)]
        query = "SELECT id FROM trajectory WHERE number = ?"
        ids = [connection.execute(query, (number,)).fetchone()[0] for number in numbers]
    describe_events(read_story(run, ids[0]))  # imports
    times = []
    for id in ids:
        began = time.perf_counter()
        describe_events(read_story(run, id))
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    subprocess.run([*_laminar(), "audit", str(run), "show", ids[1]], check=True, stdout=subprocess.DEVNULL)
    whole_s = time.perf_counter() - began
    conditions = f"{SHOWN} random ones of {trajectories}"
    return [
        Row("show_p50", statistics.median(times) * 1e3, "ms", conditions),
        Row("show_max", max(times) * 1e3, "ms", conditions),
        Row("show_command", whole_s * 1e3, "ms", "the whole command, imports included"),
    ]


def _laminar() -> list[str]:
    return [str(Path(sys.executable).with_name("laminar"))]
