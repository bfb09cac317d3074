"""A learner that takes the time of GPUs and computes nothing, to measure schedules with the real runtime.

The backend puts it in the place of the run's own learner. Its state is the number of steps taken. Its weights are
a few small tensors that depend on this number, so that versions differ and relays have bytes to carry.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from laminar_lab.emulation.settings import LearnerTimes
from laminar_py.learner import Architecture, complete_checkpoint, read_marker
from laminar_py.learner.packing import RowSize
from laminar_py.records.metrics import StepMetrics, Work
from laminar_py.records.trajectory import MicroBatch

NUM_TENSORS = 4
SHAPE = (64, 64)
MODEL = Architecture(model_type="emulated", num_parameters=0, fingerprint="")


class EmulatedLearner:
    """One process in place of `devices` GPUs; `compression` emulated seconds pass in one real second."""

    def __init__(
        self,
        times: LearnerTimes,
        *,
        devices: int,
        compression: float,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._times = times
        self._devices = devices
        self._compression = compression
        self._now = now
        self._sleep = sleep
        self.steps_taken = 0

    def step(self, microbatches: Sequence[MicroBatch]) -> StepMetrics:
        """Make an optimizer step: sleep for as long as GPUs would take, less the time to read `microbatches`."""
        began = self._now()
        sizes = [RowSize(batch.num_tokens, batch.squares) for batch in microbatches]
        elapsed_s = self._times.step_s(sizes, devices=self._devices) / self._compression
        self._sleep(max(0.0, began + elapsed_s - self._now()))
        self.steps_taken += 1
        return StepMetrics(
            loss=0.0, grad_norm=0.0, elapsed_s=elapsed_s, work=Work(sum(size.tokens for size in sizes))
        )

    def named_tensors(self, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights after the last step, a few tensors, after the time of a publish."""
        self._sleep(self._times.publish_s / self._compression)
        generator = torch.Generator().manual_seed(self.steps_taken)
        for index in range(NUM_TENSORS):
            yield f"emulated.{index}.weight", torch.randn(SHAPE, generator=generator).to(dtype)

    def begin_save(self, folder: Path) -> None:
        """Write a checkpoint, which is the number of steps. Replaces an older `folder`."""
        partial = folder.with_name(f"{folder.name}.tmp")
        partial.mkdir(parents=True, exist_ok=True)
        complete_checkpoint(partial, folder, step=self.steps_taken, world_size=1, model=MODEL)

    def finish_save(self) -> str:
        """Return "": `begin_save` has written everything."""
        return ""

    def load(self, folder: Path) -> str:
        """Restore a checkpoint, and return "". Raises `ConfigError` if it is incomplete."""
        self.steps_taken = read_marker(folder).step
        return ""
