"""Schedules of other systems in the simulator. Only the schedule differs from a simulated run of this project.

Called by this experiment and by `experiments/multi_turn_tails`. `sync` is the production schedule on GPUs that
both sides share in turn. `one_step` and `stream` are the production schedule `one_step` with weights that all
replicas get at one moment. `partial` is `async` under `rollout.on_new_weights=resume` with a bound, and the same
weights.
"""

import asyncio
from enum import StrEnum
from functools import partial

from laminar_lab.emulation.settings import EmulationProfile, LearnerTimes, emulation_of
from laminar_lab.simulate.figures import SimulatedRun
from laminar_lab.simulate.learner import LearnerParts, SimulatedLearner
from laminar_lab.simulate.run import LearnerMaker, simulate
from laminar_py.config import ConfigError, RunConfig
from laminar_py.config.rollout import NO_PLANNER, OnNewWeights, Schedule, StalenessConfig, StalePolicy
from laminar_py.control import StepBatch
from laminar_py.records.metrics import StepMetrics, Work


class BarrierLearner(SimulatedLearner):
    """Staleness of one step: after each batch learner and replicas wait for each other and for the weights.

    Both sides wait for `sync_s` emulated seconds.
    """

    def __init__(self, config: RunConfig, times: LearnerTimes, parts: LearnerParts, *, sync_s: float) -> None:
        super().__init__(config, times, parts)
        self._sync_s = sync_s / self._emulation.compression

    async def _commit(self, batch: StepBatch, metrics: StepMetrics | None) -> None:
        # a batch is live until its commit, and no new batch starts before
        await self._wait_generated(self.step + 2)
        await asyncio.sleep(self._sync_s)
        await super()._commit(batch, metrics)

    async def _wait_generated(self, batches: int) -> None:
        """Wait until the run has completed so many batches."""
        state, wanted = self._scheduler.state, batches * self._config.rollout.prompts_per_step
        await self._scheduler.consumption.buffer.wait_until(
            lambda: state.next_prompt - state.num_generating >= wanted
        )


class StreamLearner(BarrierLearner):
    """Streamed generation: the learner trains on each batch in `updates` minibatches, when each is complete.

    Replicas wait at the end of a batch, as under a barrier. The learner does not wait: it copies the weights for
    the next batch, and continues with the next complete minibatch.
    """

    def __init__(
        self, config: RunConfig, times: LearnerTimes, parts: LearnerParts, *, sync_s: float, updates: int
    ) -> None:
        # a batch then costs the same as in one step
        fixed = {name: getattr(times, name) / updates for name in ("optimizer_s", "publish_s")}
        super().__init__(config, times.model_copy(update=fixed), parts, sync_s=sync_s)
        self._updates = updates
        self._groups_at_once = config.rollout.prompts_per_step // updates
        self._handing_over: asyncio.Task[None] | None = None

    async def _learn(self, batch: StepBatch) -> StepMetrics:
        """Train on a batch, then on more minibatches as they are generated; add the minibatches to `batch`.

        Returns the metrics of all updates together.
        """
        done = [await super()._learn(batch)]
        for _ in range(self._updates - 1):
            more = await self._scheduler.next_batch(groups=self._groups_at_once, version=self.version)
            done.append(await super()._learn(more))
            batch.groups += more.groups
            batch.trajectories += more.trajectories
            batch.ages |= more.ages
        work = Work(sum(metrics.work.num_tokens for metrics in done))
        return StepMetrics(
            loss=0.0, grad_norm=0.0, elapsed_s=sum(metrics.elapsed_s for metrics in done), work=work
        )

    async def _commit(self, batch: StepBatch, metrics: StepMetrics | None) -> None:
        if self._handing_over is not None:
            await self._handing_over
        self._handing_over = asyncio.create_task(self._hand_over(batch, metrics), name="hand-over")
        if self.step + 1 == self._config.steps:
            await self._handing_over

    async def _hand_over(self, batch: StepBatch, metrics: StepMetrics | None) -> None:
        # the step before was committed after this batch was formed
        batch.ages = {version: self._scheduler.state.ages.age_of(version) for version in batch.ages}
        await super()._commit(batch, metrics)


class StalledLearner(SimulatedLearner):
    """Partial rollout: after a step the learner waits for `sync_s`, while all replicas load its weights."""

    def __init__(self, config: RunConfig, times: LearnerTimes, parts: LearnerParts, *, sync_s: float) -> None:
        super().__init__(config, times, parts)
        self._sync_s = sync_s / self._emulation.compression

    async def _commit(self, batch: StepBatch, metrics: StepMetrics | None) -> None:
        await super()._commit(batch, metrics)
        await asyncio.sleep(self._sync_s)


class Baseline(StrEnum):
    """A schedule of another system, as the Laminar paper compares them.

    - `sync` (verl, colocated): all GPUs generate a batch, train on the batch, and load the new weights.
    - `one_step`: replicas generate a batch while the learner trains on the previous batch; then all load weights.
    - `stream`: as `one_step`, but the learner trains on minibatches of a batch while replicas still generate it.
    - `partial` (AReaL): responses continue under new weights, and staleness is bounded.
    """

    SYNC = "sync"
    ONE_STEP = "one_step"
    STREAM = "stream"
    PARTIAL = "partial"


SCHEDULES = {
    Baseline.SYNC: Schedule.SYNC,
    Baseline.ONE_STEP: Schedule.ONE_STEP,
    Baseline.STREAM: Schedule.ONE_STEP,
    Baseline.PARTIAL: Schedule.ASYNC,
}


def simulate_baseline(
    config: RunConfig,
    baseline: Baseline,
    *,
    profile: EmulationProfile,
    sync_s: float,
    updates: int = 1,
    max_staleness: int | None = None,
) -> SimulatedRun:
    """Simulate a run under a schedule of another system, on the fleet of `config`.

    `sync_s` is the emulated time from the end of a step until all engines have its weights; under `sync` it is the
    reload in place. `stream` trains on each batch in `updates` parts. `partial` bounds staleness by
    `max_staleness`. Raises `ConfigError` if `updates` does not divide the prompts of a step.
    """
    if config.rollout.prompts_per_step % updates:
        raise ConfigError(
            f"updates={updates}: does not divide rollout.prompts_per_step={config.rollout.prompts_per_step};"
            " choose a divisor"
        )
    changed = _baseline_config(config, baseline, sync_s=sync_s, max_staleness=max_staleness)
    # under `partial` replicas wait during the load; under the others the load is part of `sync_s`
    load_s = sync_s if baseline is Baseline.PARTIAL else 0.0
    engine = profile.engine.model_copy(update={"load_s": load_s})
    return simulate(
        changed,
        profile=profile.model_copy(update={"engine": engine}),
        learner=_make_learner(baseline, sync_s=sync_s, updates=updates),
    )


def _baseline_config(
    config: RunConfig, baseline: Baseline, *, sync_s: float, max_staleness: int | None
) -> RunConfig:
    """Return the config with the schedule of a baseline, on the same fleet and data."""
    emulation, is_partial = emulation_of(config), baseline is Baseline.PARTIAL
    publish_s = sync_s / emulation.compression if baseline is Baseline.SYNC else 0.0
    policy = OnNewWeights.RESUME if is_partial else OnNewWeights.DRAIN
    simulation = emulation.simulation.model_copy(update={"publish_s": publish_s, "link_gbit_per_s": None})
    engine = emulation.model_copy(update={"start_spread_s": 0.0, "simulation": simulation})
    return config.model_copy(
        update={
            "schedule": SCHEDULES[baseline],
            "rollout": config.rollout.model_copy(update={"on_new_weights": policy, "engine": engine}),
            "repack": config.repack.model_copy(update={"planner": NO_PLANNER}),
            "staleness": StalenessConfig(
                max_staleness=max_staleness if is_partial else None, policies=(StalePolicy.WAIT, StalePolicy.DROP)
            ),
        }
    )


def _make_learner(baseline: Baseline, *, sync_s: float, updates: int) -> LearnerMaker:
    """Return the maker of the simulated learner that publishes and waits as the baseline does."""
    match baseline:
        case Baseline.SYNC:
            return SimulatedLearner
        case Baseline.ONE_STEP:
            return partial(BarrierLearner, sync_s=sync_s)
        case Baseline.STREAM:
            return partial(StreamLearner, sync_s=sync_s, updates=updates)
        case Baseline.PARTIAL:
            return partial(StalledLearner, sync_s=sync_s)
