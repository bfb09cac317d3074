"""The controller's process of `bench.control`: a run like any other, and samples of the process that leads it.

`fleet` starts it as `python -m laminar_lab.bench.control.process FOLDER REPLICAS RATE STEPS`.
"""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil
from rich.console import Console

from laminar_lab.bench.control.generator import Generators, ReadingScorerActor
from laminar_py.config import load_config
from laminar_py.observe import View
from laminar_py.runtime.orchestrator import Controller, Result, lead
from laminar_py.runtime.workers import PartKinds, RunStart

CONFIG = Path("configs/emulation/control.yaml")
GROUP = 16  # samples of a prompt
STEP_S = 2  # from step to step
SAMPLES = "samples.json"
DELAY_S = 0.01  # between looks at the event loop
USE_S = 0.2  # between looks at processor and memory
NUM_GENERATORS = 2


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


class SampledLeader:
    """A controller, and samples of its process while it leads."""

    def __init__(self, controller: Controller, samples: ProcessSamples) -> None:
        self._controller = controller
        self._samples = samples

    def interrupt(self) -> None:
        """See `Controller.interrupt`."""
        self._controller.interrupt()

    async def lead(self) -> Result:
        """See `Controller.lead`."""
        sampling = asyncio.create_task(self._samples.take_samples(), name="samples")
        try:
            return await self._controller.lead()
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
    console = Console(file=sys.stderr)
    samples = ProcessSamples()

    def make(start: RunStart) -> SampledLeader:
        kinds = PartKinds(replica=Generators(NUM_GENERATORS).make, scorer=ReadingScorerActor)
        start = replace(start, kinds=kinds)
        controller = Controller(start, view=View(console, steps=steps))
        return SampledLeader(controller, samples)

    lead(config, make, what=f"{replicas} emulated replicas", resume=None, console=console)
    (folder / SAMPLES).write_bytes(msgspec.json.encode(samples))


if __name__ == "__main__":
    main(Path(sys.argv[1]), replicas=int(sys.argv[2]), rate=float(sys.argv[3]), steps=int(sys.argv[4]))
