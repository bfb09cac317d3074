"""Learners of baselines: the simulated one, but for when it takes data and when everybody gets its weights.

Made by `simulate.baselines.schedules`. Invariant: a version is handed over to all replicas at one moment.
"""

import asyncio

from laminar_lab.simulate.learner import LearnerParts, SimulatedLearner
from laminar_py.config import RunConfig
from laminar_py.config.emulation import LearnerTimes
from laminar_py.control import StepBatch
from laminar_py.records.metrics import StepMetrics, Work


class BarrierLearner(SimulatedLearner):
    """Staleness of one step: learner and replicas wait for each other, and then for the weights, after each batch.

    `sync_s` are seconds of the GPUs, in which neither side does anything else.
    """

    def __init__(self, config: RunConfig, times: LearnerTimes, parts: LearnerParts, *, sync_s: float) -> None:
        super().__init__(config, times, parts)
        self._sync_s = sync_s / self._emulation.compression

    async def _commit(self, batch: StepBatch, metrics: StepMetrics | None) -> None:
        # a batch is live until it is committed, and as long as it is no other begins
        await self._generated(self.step + 2)
        await asyncio.sleep(self._sync_s)
        await super()._commit(batch, metrics)

    async def _generated(self, batches: int) -> None:
        """Return when so many batches, since the run began, are complete."""
        book, wanted = self._scheduler.book, batches * self._config.rollout.prompts_per_step
        await self._scheduler.consumption.buffer.wait_until(
            lambda: book.next_prompt - book.num_generating >= wanted
        )


class StreamLearner(BarrierLearner):
    """Streamed generation: each batch is trained on in `updates` minibatches, as they become complete.

    Replicas wait at the end of a batch as under a barrier. The learner does not: weights that the next batch is to
    begin with are a copy, and it goes on meanwhile with what is ready.
    """

    def __init__(
        self, config: RunConfig, times: LearnerTimes, parts: LearnerParts, *, sync_s: float, updates: int
    ) -> None:
        fixed_s = times.optimizer_s / updates  # the same for a batch as where it is trained on at once
        super().__init__(config, times.model_copy(update={"optimizer_s": fixed_s}), parts, sync_s=sync_s)
        self._updates = updates
        self._groups_at_once = config.rollout.prompts_per_step // updates
        self._handing_over: asyncio.Task[None] | None = None

    async def _learn(self, batch: StepBatch) -> StepMetrics:
        done = [await super()._learn(batch)]
        for _ in range(self._updates - 1):
            more = await self._scheduler.next_batch(groups=self._groups_at_once, version=self.version)
            done.append(await super()._learn(more))
            batch.groups += more.groups
            batch.trajectories += more.trajectories
            batch.ages |= more.ages
        work = Work(sum(one.work.num_tokens for one in done))
        return StepMetrics(loss=0.0, grad_norm=0.0, elapsed_s=sum(one.elapsed_s for one in done), work=work)

    async def _commit(self, batch: StepBatch, metrics: StepMetrics | None) -> None:
        if self._handing_over is not None:
            await self._handing_over
        self._handing_over = asyncio.create_task(self._hand_over(batch, metrics), name="hand-over")
        if self.step + 1 == self._config.steps:
            await self._handing_over

    async def _hand_over(self, batch: StepBatch, metrics: StepMetrics | None) -> None:
        # the step before was committed after this batch was taken
        batch.ages = {version: self._scheduler.book.ages.age_of(version) for version in batch.ages}
        await super()._commit(batch, metrics)


class StalledLearner(SimulatedLearner):
    """Partial rollout: after a step the learner waits for `sync_s`, while all replicas take its weights."""

    def __init__(self, config: RunConfig, times: LearnerTimes, parts: LearnerParts, *, sync_s: float) -> None:
        super().__init__(config, times, parts)
        self._sync_s = sync_s / self._emulation.compression

    async def _commit(self, batch: StepBatch, metrics: StepMetrics | None) -> None:
        await super()._commit(batch, metrics)
        await asyncio.sleep(self._sync_s)
