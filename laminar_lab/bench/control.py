"""One controller under the load of a large fleet.

The controller leads a run in a process of its own, with ledger, relay, learner's process and segments as in any
run. Load generators (`generator`) host the replicas, which write and report as real replicas do. The learner takes
no time and scorers do not judge, so the figures are of control alone. All processes share one host, where a fleet
has many: no process crashes, joins or leaves, and nothing goes to journals. Emulated time is compressed: a
response lives for seconds instead of a minute, and live responses wait for the learner. Figures are of the steps
after the first ten, in which the fleet fills. Run this in the project's folder.

`python -m laminar_lab.bench.control FOLDER REPLICAS RATE STEPS` is the controller's process.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import psutil
from rich.console import Console

from laminar_lab.bench.generator import GeneratorCluster
from laminar_lab.bench.report import Row
from laminar_lab.bench.runs import require_project_file
from laminar_lab.bench.workplace import workplace
from laminar_py.config import load_config
from laminar_py.ledger import decode_event, reading
from laminar_py.observe import View
from laminar_py.records.events import Stepped
from laminar_py.records.host import SystemClock
from laminar_py.runtime.cluster import cluster, use_cluster
from laminar_py.runtime.orchestrator import Controller, Result, lead
from laminar_py.runtime.workers import RunStart

ROWS = ("control_trajectories_per_s", "controller_cores_1024", "loop_delay_p99_ms", "controller_bytes")
CONFIG = Path("configs/emulation/control.yaml")
GROUP = 16  # samples of a prompt
STEP_S = 2  # from step to step
WARM_STEPS = 10
DELAY_S = 0.01  # between looks at the event loop
USE_S = 0.2  # between looks at processor and memory
NUM_GENERATORS = 2
SAMPLES = "samples.json"


def rows(*, replicas: int = 1024, rate: float = 960.0, steps: int = 110) -> list[Row]:
    """Lead and measure a run whose replicas may finish `rate` trajectories a second together."""
    require_project_file(CONFIG)
    with workplace() as folder:
        command = [sys.executable, "-m", __name__, str(folder), str(replicas), str(rate), str(steps)]
        subprocess.run(command, stdout=sys.stderr, check=True)
        samples = msgspec.json.decode((folder / SAMPLES).read_bytes(), type=ProcessSamples)
        (run,) = folder.glob("runs/*/")
        return _rows(run, samples, replicas=replicas)


def _rows(run: Path, samples: "ProcessSamples", *, replicas: int) -> list[Row]:
    """Return the rows of throughput, cores, timer delays and memory, within the counted steps."""
    with reading(run) as connection:
        query = "SELECT count(*) FROM trajectory WHERE status NOT IN ('consumed', 'dropped')"
        (live,) = connection.execute(query).fetchone()
        found = connection.execute("SELECT mono, body FROM event WHERE kind = 'stepped' ORDER BY seq").fetchall()
    steps = [(mono, event) for mono, body in found if isinstance(event := decode_event(body), Stepped)]
    begin, end = steps[WARM_STEPS - 1][0], steps[-1][0]
    trajectories = sum(event.num_trajectories for _, event in steps[WARM_STEPS:])
    tokens = sum(event.num_tokens for _, event in steps[WARM_STEPS:])
    delays = 1e3 * np.array([delay for at, delay in samples.delays if begin <= at <= end])
    uses = [use for use in samples.uses if begin <= use[0] <= end]
    cores = (uses[-1][1] - uses[0][1]) / (uses[-1][0] - uses[0][0])
    memory = [num_bytes for _, _, num_bytes in uses]
    halves = [max(half) / 1e6 for half in (memory[: len(memory) // 2], memory[len(memory) // 2 :])]
    trained = (
        f"trained, {trajectories} in {end - begin:.0f} s, {tokens / trajectories:.0f} tokens each; {live} live at"
        f" the end; {CONFIG}"
    )
    threads = "all threads of the controller's process"
    late = f"p50 {np.median(delays):.1f} ms, at most {delays.max():.0f} ms"
    grown = f"resident, at most; in the first half {halves[0]:.0f} MB, in the second {halves[1]:.0f} MB"
    return [
        Row("control_trajectories_per_s", trajectories / (end - begin), "1/s", trained),
        Row(f"controller_cores_{replicas}", cores, "cores", threads),
        Row("loop_delay_p99_ms", float(np.percentile(delays, 99)), "ms", late),
        Row("controller_bytes", max(memory), "B", grown),
    ]


# ---- the controller's process


class ProcessSamples(msgspec.Struct):
    """Samples of the process, each with its time on this host's monotonic clock."""

    delays: list[tuple[float, float]] = []  # seconds by which a timer would be late, one every `DELAY_S`
    uses: list[tuple[float, float, int]] = []  # CPU seconds of all threads so far, bytes of resident memory

    async def take_samples(self) -> None:
        """Take samples until cancelled."""
        loop, process = asyncio.get_running_loop(), psutil.Process()
        due = next_s = loop.time()
        while True:
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            while due <= now:  # any timer that was due while the loop stood still waited too
                self.delays.append((due, now - due))
                due += DELAY_S
            if now >= next_s:
                next_s = now + USE_S
                times = process.cpu_times()
                self.uses.append((now, times.user + times.system, process.memory_info().rss))


class SampledController(Controller):
    """A controller of replicas in generators, which samples its process while it leads."""

    samples: ProcessSamples

    async def lead(self) -> Result:
        """See `Controller.lead`."""
        sampling = asyncio.create_task(self.samples.take_samples(), name="samples")
        try:
            with use_cluster(GeneratorCluster(cluster(), NUM_GENERATORS)):
                return await super().lead()
        finally:
            sampling.cancel()


def main(folder: Path, *, replicas: int, rate: float, steps: int) -> None:
    """Lead a run of a fleet that finishes `rate` trajectories a second; write the samples into `folder`."""
    settings = {
        "runs": folder / "runs",
        "steps": steps,
        "rollout.replicas": replicas,
        "rollout.prompts_per_step": max(1, round(STEP_S * rate / GROUP)),
    }
    config = load_config(CONFIG, [f"{key}={value}" for key, value in settings.items()])
    console, samples = Console(file=sys.stderr), ProcessSamples()

    def make(start: RunStart) -> Controller:
        controller = SampledController(start, view=View(console, clock=SystemClock(), steps=steps))
        controller.samples = samples
        return controller

    lead(config, make, what=f"{replicas} emulated replicas", resume=None, console=console)
    (folder / SAMPLES).write_bytes(msgspec.json.encode(samples))


if __name__ == "__main__":
    main(Path(sys.argv[1]), replicas=int(sys.argv[2]), rate=float(sys.argv[3]), steps=int(sys.argv[4]))
