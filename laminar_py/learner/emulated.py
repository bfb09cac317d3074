"""A learner that takes the time of GPUs and computes nothing: for measuring schedules with the real runtime.

Called by `workers.processes.learner` in the place of `step.Learner`. Its weights are a few small tensors,
drawn anew for each step, so that versions differ and relays have bytes to carry.
Invariant: its state is the number of steps taken; weights and checkpoints follow from that alone.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from laminar_py.config.emulated_profile import LearnerTimes
from laminar_py.learner.emulated_times import emulated_step_s
from laminar_py.learner.marker import Architecture, complete, read_marker
from laminar_py.records.metrics import StepMetrics, Work

NUM_TENSORS = 4
SHAPE = (64, 64)
MODEL = Architecture(model_type="emulated", num_parameters=0, fingerprint="")


class Measurable(Protocol):
    """A microbatch, as far as it matters here."""

    @property
    def lengths(self) -> list[int]:
        """[S] tokens of each sequence."""
        ...


class EmulatedLearner:
    """A process that stands for `devices` GPUs; `compression` emulated seconds pass in one of the clock's."""

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
        self.num_steps = 0

    def step(self, microbatches: Sequence[Measurable]) -> StepMetrics:
        """Take an optimizer step: stand still for as long as GPUs would take, reading `microbatches` included."""
        began = self._now()
        lengths = [batch.lengths for batch in microbatches]
        elapsed_s = emulated_step_s(self._times, lengths, devices=self._devices) / self._compression
        self._sleep(max(0.0, began + elapsed_s - self._now()))
        self.num_steps += 1
        return StepMetrics(loss=0.0, grad_norm=0.0, elapsed_s=elapsed_s, work=Work(sum(map(sum, lengths))))

    def named_tensors(self, *, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """Weights of this step, a few tensors."""
        generator = torch.Generator().manual_seed(self.num_steps)
        for index in range(NUM_TENSORS):
            yield f"emulated.{index}.weight", torch.randn(SHAPE, generator=generator).to(dtype)

    def save(self, folder: Path) -> None:
        """Write the number of steps; a later `load` goes on from there. Replaces an older `folder`."""
        partial = folder.with_name(f"{folder.name}.tmp")
        partial.mkdir(parents=True, exist_ok=True)
        complete(partial, folder, step=self.num_steps, world_size=1, model=MODEL)

    def begin_save(self, folder: Path) -> None:
        """Write the number of steps, which is complete at once."""
        self.save(folder)

    def finish_save(self) -> None:
        """Return at once: `begin_save` has written everything."""

    def load(self, folder: Path) -> None:
        """Restore a checkpoint. Raises `ConfigError` if it is torn."""
        self.num_steps = read_marker(folder).step
