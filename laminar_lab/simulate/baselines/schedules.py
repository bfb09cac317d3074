"""Schedules that other systems run, in the simulator: only the schedule differs from a run of this project.

Called by `experiments/paper`. Scheduler, replicas, engines, packing and the times of a step are those of any
simulated run. `sync` is the production schedule, on GPUs that both sides share in turn. `one_step` and `stream`
are the production schedule `one_step` with weights that are synchronised globally, `partial` is `async` under
`rollout.on_new_weights=resume` with a bound, likewise.
"""

from collections.abc import Callable
from enum import StrEnum
from functools import partial

from laminar_lab.simulate.baselines.learners import BarrierLearner, StalledLearner, StreamLearner
from laminar_lab.simulate.figures import SimulatedRun
from laminar_lab.simulate.learner import SimulatedLearner
from laminar_lab.simulate.run import LearnerMaker, simulate
from laminar_py.config import ConfigError, EmulationProfile, RunConfig
from laminar_py.config.rollout import NO_PLANNER, OnNewWeights, Schedule, StalenessConfig
from laminar_py.records import StepRow


class Baseline(StrEnum):
    """Schedules of others."""

    SYNC = "sync"  # verl, colocated: all GPUs generate a batch, then all train on it, then it is refreshed
    ONE_STEP = "one_step"  # a batch is generated while the one before trains, then weights go to everybody
    STREAM = "stream"  # the same, but the learner takes minibatches of a batch while it is being generated
    PARTIAL = "partial"  # AReaL: new weights interrupt all responses, which go on under them; bounded staleness


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
    show: Callable[[StepRow], None] = lambda row: None,
) -> SimulatedRun:
    """Lead a run under a schedule of others, on the fleet of `config`. Raises `ConfigError`.

    `sync_s` are seconds of the GPUs from a step to its weights in all engines: of `sync` the refresh in place.
    `stream` trains on each batch in `updates` parts. `partial` keeps to `max_staleness`.
    """
    if config.rollout.prompts_per_step % updates:
        raise ConfigError(
            f"updates={updates}: does not divide rollout.prompts_per_step={config.rollout.prompts_per_step};"
            " choose a divisor"
        )
    changed = _settings(config, baseline, sync_s=sync_s, max_staleness=max_staleness)
    # `partial` loads while replicas stand still; for the others the load is over when a version is handed over
    load_s = sync_s if baseline is Baseline.PARTIAL else 0.0
    engine = profile.engine.model_copy(update={"load_s": load_s})
    return simulate(
        changed,
        show=show,
        profile=profile.model_copy(update={"engine": engine}),
        learner=_learner(baseline, sync_s=sync_s, updates=updates),
    )


def _settings(config: RunConfig, baseline: Baseline, *, sync_s: float, max_staleness: int | None) -> RunConfig:
    """The config with the schedule of a baseline, on the same fleet and data."""
    assert config.emulation is not None, "a baseline has emulated engines"
    is_partial = baseline is Baseline.PARTIAL
    publish_s = sync_s / config.emulation.compression if baseline is Baseline.SYNC else 0.0
    policy = OnNewWeights.RESUME if is_partial else OnNewWeights.DRAIN
    return config.model_copy(
        update={
            "schedule": SCHEDULES[baseline],
            "rollout": config.rollout.model_copy(update={"on_new_weights": policy}),
            "repack": config.repack.model_copy(update={"planner": NO_PLANNER}),
            "staleness": StalenessConfig(max_staleness=max_staleness if is_partial else None),
            "emulation": config.emulation.model_copy(update={"start_spread_s": 0.0}),
            "simulation": config.simulation.model_copy(update={"publish_s": publish_s, "link_gbit_per_s": None}),
        }
    )


def _learner(baseline: Baseline, *, sync_s: float, updates: int) -> LearnerMaker:
    match baseline:
        case Baseline.SYNC:
            return SimulatedLearner
        case Baseline.ONE_STEP:
            return partial(BarrierLearner, sync_s=sync_s)
        case Baseline.STREAM:
            return partial(StreamLearner, sync_s=sync_s, updates=updates)
        case Baseline.PARTIAL:
            return partial(StalledLearner, sync_s=sync_s)
