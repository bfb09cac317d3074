"""One controller under the load of a large fleet.

The controller leads a run in a process of its own, with ledger, relay, learner's process and segments as in any
run. Load generators (`generator`) host the replicas, which write and report as real replicas do. The learner takes
no time and scorers do not judge, so the figures are of control alone. All parts stand on one host, where a fleet
has many: references cost no look for a store; no part crashes, joins or leaves; nothing goes to journals.
Generators share the controller's cores at a lower priority, so a response may end later than in a fleet. Other
processes write large archives, as in any run, and count in no figure. Emulated time is compressed: a response
lives for seconds instead of a minute, and live responses wait for the learner. Figures are of the steps after the
first ten, in which the fleet fills. Run this in the project's folder.
"""

import contextlib
import sqlite3
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from laminar_lab.bench.control.generator import ENDED
from laminar_lab.bench.control.process import CONFIG, SAMPLES, ProcessSamples
from laminar_lab.bench.report import Row, log_line
from laminar_lab.bench.runs import require_project_file
from laminar_py.ledger import decode_event, reading
from laminar_py.records.events import Stepped

ROWS = (
    "control_trajectories_per_s",
    "controller_cores_1024",
    "loop_delay_p99_ms",
    "controller_bytes",
    "record_age_max_s",
)
LOOK_S = 0.05  # between looks at the ledger
WARM_STEPS = 10
MODULE = "laminar_lab.bench.control.process"

Seconds: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedSteps:
    """The steps that count, on this host's monotonic clock."""

    begin: float
    end: float
    trajectories: int
    tokens: int

    def has(self, at: float) -> bool:
        """True where a moment lies within these steps."""
        return self.begin <= at <= self.end

    @property
    def seconds(self) -> float:
        """Seconds from the first to the last."""
        return self.end - self.begin


def rows(*, replicas: int = 1024, rate: float = 960.0, steps: int = 110) -> list[Row]:
    """Lead and measure a run whose replicas may finish `rate` trajectories a second together."""
    require_project_file(CONFIG)
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as name:
        command = [sys.executable, "-m", MODULE, name, str(replicas), str(rate), str(steps)]
        with subprocess.Popen(command, stdout=sys.stderr) as process:
            looks = _watch_record(Path(name), process)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command)
        (run,) = Path(name).glob("runs/*/")
        samples = msgspec.json.decode((Path(name) / SAMPLES).read_bytes(), type=ProcessSamples)
        window = _window(run)
        log_line(f"{window.seconds:.0f} s count")
        return [
            _rate_row(run, window),
            *_process_rows(samples, window, replicas=replicas),
            _age_row(_ages(run, looks, window)),
        ]


def _watch_record(folder: Path, process: "subprocess.Popen[bytes]") -> list[tuple[float, int]]:
    """Look into the ledger until the process ends; return moments, each with the last event that a reader saw."""
    looks: list[tuple[float, int]] = []
    while process.poll() is None:
        time.sleep(LOOK_S)
        for ledger in folder.glob("runs/*/ledger.sqlite"):
            with contextlib.suppress(sqlite3.Error), contextlib.closing(_open(ledger)) as connection:
                looks += _look_on(connection, process)
    return looks


def _open(ledger: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{ledger}?mode=ro", uri=True, isolation_level=None)


def _look_on(connection: sqlite3.Connection, process: "subprocess.Popen[bytes]") -> list[tuple[float, int]]:
    looks: list[tuple[float, int]] = []
    while process.poll() is None:
        with contextlib.suppress(sqlite3.Error):  # before its tables are there
            (seq,) = connection.execute("SELECT seq FROM head").fetchone()
            looks.append((time.monotonic(), seq))
        time.sleep(LOOK_S)
    return looks


def _window(run: Path) -> CountedSteps:
    """Read the steps after the warm ones."""
    with reading(run) as connection:
        found = connection.execute("SELECT mono, body FROM event WHERE kind = 'stepped' ORDER BY seq").fetchall()
    steps = [(mono, event) for mono, body in found if isinstance(event := decode_event(body), Stepped)]
    counted = [event for _, event in steps[WARM_STEPS:]]
    return CountedSteps(
        begin=steps[WARM_STEPS - 1][0],
        end=steps[-1][0],
        trajectories=sum(event.num_trajectories for event in counted),
        tokens=sum(event.num_tokens for event in counted),
    )


def _ages(run: Path, looks: list[tuple[float, int]], window: CountedSteps) -> Seconds:
    """Return the seconds from the end of each response until a reader of the ledger could see it."""
    ended: dict[str, float] = {}
    for file in run.glob(f"logs/{ENDED}-*"):
        for line in file.read_text().splitlines():
            name, _, mono = line.partition(" ")
            ended[name] = max(ended.get(name, 0.0), float(mono))  # an earlier note is an interruption
    times, seqs = np.array([at for at, _ in looks]), np.array([seq for _, seq in looks])
    with reading(run) as connection:
        finished = connection.execute("SELECT seq, subject FROM event WHERE kind = 'finished'").fetchall()
    on_record = [(ended[name], int(np.searchsorted(seqs, seq))) for seq, name in finished if name in ended]
    return np.array([times[place] - at for at, place in on_record if window.has(at) and place < len(times)])


def _rate_row(run: Path, window: CountedSteps) -> Row:
    """Return the row of trained trajectories per second; its conditions have tokens and live trajectories."""
    with reading(run) as connection:
        query = "SELECT count(*) FROM trajectory WHERE status NOT IN ('consumed', 'dropped')"
        (live,) = connection.execute(query).fetchone()
    mean = window.tokens / window.trajectories
    conditions = (
        f"trained, {window.trajectories} in {window.seconds:.0f} s, {mean:.0f} tokens each; {live} live at the"
        f" end; {CONFIG}"
    )
    return Row("control_trajectories_per_s", window.trajectories / window.seconds, "1/s", conditions)


def _process_rows(samples: ProcessSamples, window: CountedSteps, *, replicas: int) -> list[Row]:
    """Return the rows of cores, timer delays and memory of the controller's process within the counted steps."""
    delays = 1e3 * np.array([delay for at, delay in samples.delays if window.has(at)])
    uses = [use for use in samples.uses if window.has(use[0])]
    cores = (uses[-1][1] - uses[0][1]) / (uses[-1][0] - uses[0][0])
    memory = [num_bytes for _, _, num_bytes in uses]
    halves = [max(half) / 1e6 for half in (memory[: len(memory) // 2], memory[len(memory) // 2 :])]
    p99 = float(np.percentile(delays, 99))
    spread = f"p50 {np.median(delays):.1f} ms, at most {delays.max():.0f} ms"
    growth = f"resident, at most; in the first half {halves[0]:.0f} MB, in the second {halves[1]:.0f} MB"
    return [
        Row(
            f"controller_cores_{replicas}",
            cores,
            "cores",
            "all threads of the controller's process; archives are written by others",
        ),
        Row("loop_delay_p99_ms", p99, "ms", spread),
        Row("controller_bytes", max(memory), "B", growth),
    ]


def _age_row(ages: Any) -> Row:
    spread = f"p50 {np.median(ages):.2f} s, p99 {np.percentile(ages, 99):.2f} s, of {len(ages)} responses"
    return Row("record_age_max_s", float(ages.max()), "s", spread)
