"""Samples of the fleet: the use of cores is on record beside slots and KV."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from itertools import pairwise

from laminar_lab.report.snapshot import read_samples
from laminar_py.ledger.row_files import append_row, read_rows
from laminar_py.observe import fleet
from laminar_py.observe.fleet import OwnCpu, cpu_use, watch_fleet
from laminar_py.observe.stats import Stats, Totals
from laminar_py.records.host import SystemClock
from laminar_py.records.metrics import FleetRow
from tests.control.fleet import ManualClock


def test_cores_that_a_loop_fills_are_busy():
    own = os.sched_getaffinity(0)
    cpu_use(own)
    deadline = os.times().user + 0.3
    while os.times().user < deadline:
        pass
    assert 0.5 / len(own) <= cpu_use(own) <= 1.0


def test_cores_that_the_run_may_not_use_do_not_count(monkeypatch):
    monkeypatch.setattr(fleet.psutil, "cpu_percent", lambda percpu: [100.0, 40.0, 60.0, 100.0])
    assert cpu_use({1, 2}) == 0.5


COMPUTE = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"


def test_what_a_child_computes_is_the_runs_own():
    own = OwnCpu()
    own.use(1)
    began, before_s = time.monotonic(), time.process_time()
    with subprocess.Popen([sys.executable, "-c", COMPUTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()  # it has computed, and waits
        share = own.use(1)
        used_s = share * (time.monotonic() - began)
        child.kill()
    assert used_s - (time.process_time() - before_s) > 0.3, "beside what this process computed"


async def test_every_sample_has_the_use_of_the_cores(tmp_path, monkeypatch):
    written = asyncio.Event()

    def append(file, row):
        append_row(file, row)
        written.set()

    monkeypatch.setattr(fleet, "append_row", append)
    monkeypatch.setattr(fleet, "FLEET_EVERY_S", 0.01)
    monkeypatch.setattr(fleet, "cpu_use", lambda cores: 0.97)
    stats = Stats(SystemClock(), replicas=2, totals=Totals())
    stats.set_rl_phase(True)
    task = asyncio.create_task(watch_fleet(tmp_path / "fleet.jsonl", stats, generated_tokens=lambda: 7))
    await written.wait()
    task.cancel()
    await asyncio.wait([task])
    first = read_samples(tmp_path).fleet[0]
    assert (first.cpu_use, first.cores, first.generated_tokens) == (0.97, len(os.sched_getaffinity(0)), 7)
    assert first.own_cpu_use is not None


async def test_a_long_run_keeps_rows_at_equal_intervals_in_a_bounded_file(tmp_path, monkeypatch):
    path, clock, largest, ends_s = tmp_path / "fleet.jsonl", ManualClock(), 0, [3000.0, 6000.0]
    monkeypatch.setattr(fleet, "FLEET_BYTES", 10_700)

    async def sleep(seconds):
        nonlocal largest
        largest = max(largest, path.stat().st_size)
        if clock.now() > ends_s[0]:
            raise asyncio.CancelledError
        clock.time += seconds

    monkeypatch.setattr(fleet.asyncio, "sleep", sleep)
    stats = Stats(clock, replicas=2, totals=Totals())
    stats.set_rl_phase(True)
    while ends_s:  # the second is a resumed run
        with suppress(asyncio.CancelledError):
            await watch_fleet(path, stats, generated_tokens=lambda: 7, has_processes=False)
        ends_s.pop(0)
    rows = list(read_rows(path, FleetRow))
    assert largest < 10_900
    assert {after.rl_s - before.rl_s for before, after in pairwise(rows)} == {128.0}
    assert rows[-1].rl_s > 6000.0 - 128.0
