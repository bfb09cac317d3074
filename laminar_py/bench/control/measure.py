"""`laminar bench control`: one controller under the load of a large fleet.

The controller is that of any run, in a process of its own, with its ledger, relay, learner's process and stores;
replicas are hosted by load generators (`generator`), which write and say what real ones would. The learner takes no
time and scorers do not judge, so that what is measured is control. Figures are of the steps after the first few.
"""

import asyncio
import contextlib
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from laminar_py.bench.report import Row
from laminar_py.bench.turns import Tell

SAMPLE_S = 0.01  # between looks at the event loop
LOOK_S = 0.05  # between looks at what is on record
CPU_S = 1.0
WARM_STEPS = 10
OUT = "figures.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """Samples of the controller's process, each with its time on this host's clock."""

    delays: list[tuple[float, float]]
    cpu: list[tuple[float, float]]  # CPU seconds so far
    memory: list[tuple[float, int]]  # bytes, proportional share


def rows(*, replicas: int, rate: float, steps: int, tell: Tell) -> list[Row]:
    """Measure it."""
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        folder = Path(name)
        command = [
            sys.executable,
            "-m",
            "laminar_py.bench.control.measure",
            name,
            str(replicas),
            str(rate),
            str(steps),
        ]
        process = subprocess.Popen(command, stdout=sys.stderr)
        record = OnRecord(folder)
        record.watch(process)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        figures = json.loads((folder / OUT).read_text())
        return _rows(figures, record.ages(figures["from"], figures["to"]), replicas=replicas)


class OnRecord:
    """Watches from outside how soon what ended is on record."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._looks: list[tuple[float, int]] = []  # when, and the last event on record
        self._finished: dict[str, int] = {}

    def watch(self, process: "subprocess.Popen[bytes]") -> None:
        """Look until the process has ended; then read what finished."""
        ledger: Path | None = None
        connection: sqlite3.Connection | None = None
        while process.poll() is None:
            time.sleep(LOOK_S)
            if connection is None:
                ledger = next(self._folder.glob("runs/*/ledger.sqlite"), None)
                if ledger is not None:
                    with contextlib.suppress(sqlite3.Error):
                        connection = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True, isolation_level=None)
                        connection.execute("SELECT seq FROM head").fetchone()
                continue
            with contextlib.suppress(sqlite3.Error):
                (seq,) = connection.execute("SELECT seq FROM head").fetchone()
                self._looks.append((time.monotonic(), seq))
        if connection is not None:
            for seq, subject in connection.execute("SELECT seq, subject FROM event WHERE kind = 'finished'"):
                self._finished[subject] = seq
            connection.close()

    def ages(self, begin: float, end: float) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Seconds from the end of each response until it was on record, of those that ended in between."""
        seen: dict[str, float] = {}
        for file in self._folder.glob("runs/*/logs/ended-*"):
            for line in file.read_text().splitlines():
                id, _, mono = line.partition(" ")
                seen[id] = float(mono)
        times, seqs = map(np.array, zip(*self._looks, strict=True))
        ages = []
        for id, seq in self._finished.items():
            at = seen.get(id)
            if at is not None and begin <= at <= end:
                place = int(np.searchsorted(seqs, seq))
                if place < len(times):
                    ages.append(times[place] - at)
        return np.array(ages)


def _rows(figures: dict[str, Any], ages: Any, *, replicas: int) -> list[Row]:
    detail = f"{figures['rate']:.0f} trajectories/s of {figures['tokens']:.0f} tokens, {figures['seconds']:.0f} s"
    return [
        Row("controller_trajectories_per_s", figures["rate"], detail),
        Row(f"controller_cores_{replicas}", figures["cores"], detail),
        Row("loop_delay_p99_ms", figures["p99_ms"], f"p50 {figures['p50_ms']:.1f}, max {figures['max_ms']:.0f}"),
        Row(
            "record_age_max_s", float(ages.max()), f"p50 {np.median(ages):.2f}, p99 {np.percentile(ages, 99):.2f}"
        ),
        Row("controller_bytes", figures["bytes"], f"at the first {figures['first_bytes'] / 1e6:.0f} MB"),
        Row("live_trajectories", figures["live"], "at the end"),
    ]


# ---- the controller's process


def main(folder: Path, replicas: int, rate: float, steps: int) -> None:
    """Lead the run and leave figures of it."""
    from laminar_py.bench.control.generator import Generators, ReadingScorerActor
    from laminar_py.bench.control.inputs import write_inputs
    from laminar_py.orchestrator.controller import Controller, PartKinds
    from laminar_py.orchestrator.launch import Opened, lead
    from laminar_py.telemetry.view import make_view

    config = write_inputs(folder, replicas=replicas, rate=rate, steps=steps)
    console = Console(file=sys.stderr)
    sampler = Sampler()

    class Measured(Controller):
        async def lead(self) -> Any:
            sampling = asyncio.create_task(sampler.run())
            try:
                return await super().lead()
            finally:
                sampling.cancel()
                sampler.live = len(self._scheduler.book.live)

        def _stepped(self, row: Any) -> None:
            sampler.steps.append(
                (time.monotonic(), row.trained_trajectories if hasattr(row, "trained_trajectories") else 0)
            )
            super()._stepped(row)

    def make(opened: Opened) -> Controller:
        return Measured(
            opened.config,
            opened.run,
            placement=opened.placement,
            inputs=opened.inputs,
            view=make_view(console, steps=steps, max_rl_s=None),
            resume=False,
            kinds=PartKinds(replica=Generators(2).make, scorer=ReadingScorerActor),
        )

    lead(config, make, what="control", resume=None, console=console)
    (folder / OUT).write_text(json.dumps(sampler.figures(config)))


class Sampler:
    """Looks at the process that it is in."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, int]] = []
        self.live = 0
        self._delays: list[tuple[float, float]] = []
        self._usage: list[tuple[float, float, int]] = []

    async def run(self) -> None:
        """Until cancelled."""
        loop, process = asyncio.get_running_loop(), psutil.Process()
        next_s = loop.time()
        while True:
            due = loop.time() + SAMPLE_S
            await asyncio.sleep(SAMPLE_S)
            now = loop.time()
            self._delays.append((now, now - due))
            if now >= next_s:
                next_s = now + CPU_S
                times = process.cpu_times()
                self._usage.append((now, times.user + times.system, process.memory_info().rss))

    def figures(self, config: Any) -> dict[str, Any]:
        """Of the steps after the first `WARM_STEPS`."""
        begin, end = self.steps[WARM_STEPS][0], self.steps[-1][0]
        delays = np.array([delay for at, delay in self._delays if begin <= at <= end]) * 1e3
        usage = [one for one in self._usage if begin <= one[0] <= end]
        seconds = usage[-1][0] - usage[0][0]
        trajectories = (len(self.steps) - 1 - WARM_STEPS) * config.trajectories_per_step
        return {
            "from": begin,
            "to": end,
            "seconds": end - begin,
            "rate": trajectories / (end - begin),
            "tokens": 3000.0,
            "cores": (usage[-1][1] - usage[0][1]) / seconds,
            "p50_ms": float(np.median(delays)),
            "p99_ms": float(np.percentile(delays, 99)),
            "max_ms": float(delays.max()),
            "bytes": usage[-1][2],
            "first_bytes": usage[0][2],
            "live": self.live,
        }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
