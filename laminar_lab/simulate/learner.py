"""The learner of a simulation: wait for a batch, take the time of a step, commit, publish.

Made by `simulate.run`. The production scheduler makes the batches, and the production packer packs them.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from laminar_lab.emulation.settings import LearnerTimes, emulation_of
from laminar_lab.simulate.record import INCARNATION, ObservedRecorder
from laminar_lab.simulate.weights import ModelledWeights, weights_digest
from laminar_lab.step_time import version_bytes
from laminar_py.config import ConfigError, RunConfig
from laminar_py.control import (
    DeviceLease,
    LiveSettings,
    RefillWatch,
    StepBatch,
    TrajectoryScheduler,
    leased_batch,
    pack_step,
    step_events,
)
from laminar_py.learner.packing import bundle_size
from laminar_py.observe import Stats, replay_figures
from laminar_py.records import StepRow
from laminar_py.records.events import VersionPublished
from laminar_py.records.metrics import StepMetrics, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerParts:
    """Parts of a simulation that the learner uses; `show` receives each step's row."""

    scheduler: TrajectoryScheduler
    recorder: ObservedRecorder
    weights: ModelledWeights
    stats: Stats
    lease: DeviceLease
    show: Callable[[StepRow], None]


class SimulatedLearner:
    """A learner that takes `config.steps` steps; `version` is the newest published version."""

    def __init__(self, config: RunConfig, times: LearnerTimes, parts: LearnerParts) -> None:
        self._config, self._emulation, self._times = config, emulation_of(config), times
        self._scheduler = parts.scheduler
        self._settings = LiveSettings(config, scheduler=parts.scheduler)
        self._recorder = parts.recorder
        self._weights = parts.weights
        self._stats, self._lease = parts.stats, parts.lease
        self._show = parts.show
        self._attention_share = times.attention_share
        self._stall_s = times.publish_s / self._emulation.compression
        # a baseline of `experiments/paper/baselines.py` takes a part of a step at once
        self._groups_at_once = config.fresh_groups
        self.step, self.version = 0, -1
        solved = self._emulation.simulation.solved
        self._refill = RefillWatch(
            max_refill=config.rollout.max_refill,
            record=self._recorder.append,
            end=self._raise_fault,
            remedy=f"set rollout.engine.simulation.solved={solved:g} nearer to one half",
        )

    def publish_version(self) -> None:
        """Publish the present weights; they travel to the hosts while the learner continues."""
        parent, self.version = self.version, self.version + 1
        self._scheduler.published(self.version)
        self._weights.publish_version(self.version)
        self._recorder.append(
            VersionPublished(
                version=self.version,
                step=self.step,
                incarnation=INCARNATION,
                parent=parent if parent >= 0 else None,
                digest=weights_digest(self.version),
                num_bytes=version_bytes(self._times.num_published),
                stall_s=self._stall_s,
            )
        )

    async def run(self, limit_s: float | None) -> None:
        """Take all steps, or the steps of `limit_s` seconds of RL. Raises `ConfigError`."""
        consumption = self._scheduler.consumption
        while self.step < self._config.steps:
            batch = await self._next_batch(limit_s)
            if batch is None:
                return
            self._refill.observe_batch(batch, consumption.refill_stopped(batch, self.step + 1))
            metrics = await self._learn(batch) if batch.trajectories else None
            if batch.groups:
                await self._commit(batch, metrics)

    async def _next_batch(self, limit_s: float | None) -> StepBatch | None:
        """Wait for the next batch; return None at the time limit."""
        left_s = None if limit_s is None else max(0.0, limit_s - self._stats.rl_s)
        groups = self._groups_at_once
        if left_s == 0.0:
            return None  # a timeout of 0 would still take a complete batch
        try:
            async with asyncio.timeout(left_s):
                return await leased_batch(
                    self._lease, self._scheduler, groups=groups, version=self.version, step=self.step
                )
        except TimeoutError:
            return None

    async def _commit(self, batch: StepBatch, metrics: StepMetrics | None) -> None:
        """Count a step: commit its batch, record its events, and publish a version where the config asks for it.

        `metrics` is None for a step that trained on nothing, which publishes nothing.
        """
        scheduler, publishes = self._scheduler, metrics is not None and self._is_due
        self.step += 1
        row = self._stats.step_row(
            step=self.step,
            version=batch.version,
            batch=batch.trajectories,
            staleness=batch.staleness[: batch.num_fresh],
            metrics=metrics,
            generated_tokens=scheduler.state.generated_tokens,
            versions_alive=scheduler.state.versions_alive(),
            stall_s=self._stall_s if publishes else 0.0,
        )
        row = msgspec.structs.replace(row, replay=replay_figures(batch.staleness[batch.num_fresh :]))
        with self._recorder.together():
            await scheduler.consumption.commit(batch, self.step)
            for event in step_events(row, batch, incarnation=INCARNATION, skipped=0):
                self._recorder.append(event)
            if publishes:
                self.publish_version()
        scheduler.consumption.checkpointed(self.step)
        self._settings.stepped(row, batch)
        self._show(row)

    def _raise_fault(self, fault: str) -> None:
        raise ConfigError(fault)

    @property
    def _is_due(self) -> bool:
        """Whether the present step publishes."""
        unpublished = 1 + self._scheduler.state.ages.age_of(self.version)  # steps, with this one
        publish_every = self._scheduler.state.settings.admission.publish_every
        return unpublished >= publish_every or self.step + 1 == self._config.steps

    async def _learn(self, batch: StepBatch) -> StepMetrics:
        shares = self._emulation.simulation.shares_prompts
        packed = pack_step(self._config, batch, attention_share=self._attention_share, shares=shares)
        sizes = [bundle_size(bundle, shares=shares) for rank in packed.bundles for bundle in rank]
        emulated_s = self._times.step_s(sizes, devices=self._emulation.learner_devices)
        elapsed_s = emulated_s / self._emulation.compression
        self._stats.begin_step()
        await asyncio.sleep(elapsed_s + (self._stall_s if self._is_due else 0.0))
        self._stats.end_step()
        return StepMetrics(
            loss=0.0, grad_norm=0.0, elapsed_s=elapsed_s, work=Work(sum(size.tokens for size in sizes))
        )
