"""A mean step of a run in a dozen numbers: the input of the diagnosis. Pure.

The warm-up of a run is left out where enough steps remain, so that a start does not pass for a wall.
"""

from dataclasses import dataclass

import numpy as np

from laminar_py.config.run import RunConfig
from laminar_py.config.staleness import Schedule
from laminar_py.observe.analytics.measure.pipeline import Pipeline
from laminar_py.observe.analytics.measure.use import Age, Use, measure_age, measure_use
from laminar_py.observe.analytics.read.columns import Ints, Times, Trajectories
from laminar_py.observe.analytics.read.samples import Samples
from laminar_py.observe.analytics.triage.goodput import StageTimes
from laminar_py.records.codec import BoolArray
from laminar_py.records.trajectory import DropReason

WARM_UP = 0.25  # of the steps
FEW_STEPS = 8  # with fewer, none is left out
CORES_FULL = 0.91  # share of the cores from which on more processes only share them
BACKGROUND = 0.3  # cores that a run's processes keep busy beside its steps, at most: 0.16 to 0.30 where steps wait


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStep:
    """Times of a mean step in seconds, and shares over the run; the input of `diagnose`."""

    schedule: Schedule
    steps: int
    measured_s: float
    times: StageTimes
    reference_s: float  # wherever it runs
    reference_in_learner: bool
    waited_s: float  # the learner, for a batch
    held_s: float  # replicas, empty, since nothing may begin
    longest_s: float  # expected longest generation of a batch of one step, on replicas that are not full
    stale_share: float  # of the generated tokens, dropped as too old
    hopeless_share: float  # of the groups, whose members all failed
    length_ratio: float  # p95 over p50 of response lengths
    crowded_share: float  # of the time in which replicas are busy, with more than their engine decodes at a time
    away: float  # trajectories whose environments work at a time, of all replicas together
    turn_p95_s: float  # p95 of the mean time that an environment takes for a turn of its trajectory
    group_p90_s: float  # from the first member of a group that finished until the last, p90
    reward_p95_s: float
    transfer_s: float  # weights were on the way between relays
    load_s: float  # of one version, in a replica
    microbatches: float  # of a rank in a step, at least
    use: Use | None  # None: no sample of the fleet counts
    cpu_s: float  # that all cores work for a step: no more processes make it shorter; 0 where that is not known
    age: Age

    @property
    def cores_full(self) -> bool:
        """True where the cores have next to no time left."""
        return self.cpu_s >= CORES_FULL * self.measured_s > 0


def mean_step(
    config: RunConfig, trajectories: Trajectories, pipeline: Pipeline, samples: Samples
) -> MeanStep | None:
    """Mean of the steps after the warm-up; None before the first whole step."""
    if not len(pipeline):
        return None
    first = int(len(pipeline) * WARM_UP) if len(pipeline) >= FEW_STEPS else 0

    def mean(column: Times) -> float:
        return float(column[first:].mean())

    in_learner = config.algorithm.refers and not config.algorithm.refers_in_stage
    since = float((pipeline.end_s - pipeline.measured_s)[first])
    tokens = _tokens_per_step(trajectories)
    trajectories = trajectories.where(trajectories.issued_s >= since - mean(pipeline.measured_s))
    finished = trajectories.where(trajectories.finish >= 0)
    samples = _since(int(pipeline.step[first]), samples)
    use = measure_use(samples.fleet, max_batch=config.rollout.max_batch)
    times = _stage_times(pipeline, first, in_learner=in_learner)
    return MeanStep(
        schedule=config.schedule,
        steps=len(pipeline) - first,
        measured_s=mean(pipeline.measured_s),
        times=times,
        reference_s=mean(pipeline.reference_s),
        reference_in_learner=in_learner,
        waited_s=mean(pipeline.waited_s),
        held_s=mean(pipeline.held_s),
        longest_s=_longest(finished, config.trajectories_per_step),
        stale_share=_share(trajectories, trajectories.dropped_for(DropReason.STALE)),
        hopeless_share=_hopeless(trajectories),
        length_ratio=_length_ratio(finished),
        crowded_share=mean(pipeline.crowded_s) / max(mean(pipeline.generation_s), 1e-9),
        away=mean(pipeline.away),
        turn_p95_s=_turn_p95(finished),
        group_p90_s=_group_spread(finished),
        reward_p95_s=float(np.nanpercentile(finished.score_s, 95)) if np.isfinite(finished.score_s).any() else 0.0,
        transfer_s=mean(pipeline.transfer_s),
        load_s=mean(pipeline.load_s),
        microbatches=tokens / (config.packer.max_tokens * config.learner.world_size),
        use=use,
        cpu_s=_cpu_s(config, use, times, mean(pipeline.measured_s)),
        age=measure_age(samples.steps),
    )


def _stage_times(pipeline: Pipeline, first: int, *, in_learner: bool) -> StageTimes:
    """Mean times of the stages over the steps from `first` on."""

    def mean(column: Times) -> float:
        return float(column[first:].mean())

    return StageTimes(
        generation_s=mean(pipeline.generation_s),
        environment_s=mean(pipeline.environment_s),
        reward_s=mean(pipeline.reward_s),
        reference_s=0.0 if in_learner else mean(pipeline.reference_s),
        learner_s=mean(pipeline.learner_s),
        weights_s=mean(pipeline.late_s),
        tail_s=mean(pipeline.tail_s),
        stall_s=mean(pipeline.stall_s),
    )


def _since(step: int, samples: Samples) -> Samples:
    """Samples from this step on."""
    begin_s = max((row.rl_s for row in samples.steps if row.step < step), default=0.0)
    rows = tuple(row for row in samples.steps if row.step >= step)
    return Samples(rows, tuple(row for row in samples.fleet if row.rl_s > begin_s), samples.rl_s)


def _cpu_s(config: RunConfig, use: Use | None, times: StageTimes, measured_s: float) -> float:
    """Seconds for which a step's work fills all cores; 0 where their use says nothing of the run's parts.

    Of a cluster's machines one is known. Servers on GPUs keep cores busy while they wait, so less than all cores
    says nothing there. A part of what the run's processes use goes on however long a step takes, and leaves the
    rest of the cores to the step.
    """
    if use is None or not use.cores or config.cluster.address is not None:
        return 0.0
    if config.rollout.engine.gpus:
        return use.cpu * measured_s if use.cpu >= CORES_FULL else 0.0
    ranks = use.cores if config.learner.offload else config.learner.world_size
    known_s = config.rollout.replicas * times.generation_s + ranks * times.learner_s + times.reference_s
    used_s = use.own_cpu * use.cores * measured_s
    background = min(max(0.0, used_s - known_s) / measured_s, BACKGROUND) if measured_s else 0.0
    return (used_s - background * measured_s) / (use.cores - background)


def _length_ratio(finished: Trajectories) -> float:
    """p95 over p50 of the lengths."""
    p50, p95 = np.percentile(finished.length, [50, 95]) if len(finished) else (0.0, 0.0)
    return float(p95 / p50) if p50 else 0.0


def _turn_p95(finished: Trajectories) -> float:
    """p95 of the mean seconds that an environment takes for a turn; 0 without environments."""
    known = finished.where(finished.turns > 0)
    return float(np.percentile(known.environment_s / known.turns, 95)) if len(known) else 0.0


def _longest(finished: Trajectories, count: int) -> float:
    """Expected longest response of `count`, at the speed that long ones have when they are least disturbed.

    A trajectory that moved tells no speed: the times of its last replica alone are known.
    """
    if not len(finished):
        return 0.0
    long = finished.where(finished.length >= max(1.0, float(np.quantile(finished.length, 0.9))))
    whole = long.where(long.epoch == 1)
    per_token = np.quantile((whole.generate_s - whole.queue_s) / whole.length, 0.1) if len(whole) else 0.0
    return expected_longest(finished.length, count) * float(per_token)


def expected_longest(lengths: Ints, count: int) -> float:
    """Expected longest of `count` that are drawn from these [N], with replacement; 0 without any."""
    ordered = np.sort(lengths)
    if not len(ordered):
        return 0.0
    share = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float(ordered @ np.diff(share))


def _group_spread(finished: Trajectories) -> float:
    """p90 over groups of the time between the first member that finished and the last."""
    order = np.argsort(finished.group, kind="stable")
    groups, times = finished.group[order], finished.finished_s[order]
    edges = np.flatnonzero(np.diff(groups, prepend=-1))
    if not len(edges):
        return 0.0
    spread = np.maximum.reduceat(times, edges) - np.minimum.reduceat(times, edges)
    return float(np.quantile(spread, 0.9))


def _tokens_per_step(trajectories: Trajectories) -> float:
    consumed = trajectories.where(trajectories.step >= 0)
    return float(consumed.length.sum(dtype=np.int64)) / max(len(np.unique(consumed.step)), 1)


def _share(trajectories: Trajectories, chosen: BoolArray) -> float:
    """Share of all tokens that the chosen have."""
    total = int(trajectories.length.sum(dtype=np.int64))
    return float(trajectories.length[chosen].sum(dtype=np.int64) / total) if total else 0.0


def _hopeless(trajectories: Trajectories) -> float:
    """Share of the scored groups that had no signal since no member did better than the worst of the run.

    Where all rewards are one and the same above 0, all have succeeded.
    """
    scored = trajectories.where(~np.isnan(trajectories.reward))
    if not len(scored):
        return 0.0
    worst = scored.reward.min()
    if worst == scored.reward.max() and worst > 0:
        return 0.0
    silent = scored.dropped_for(DropReason.NO_SIGNAL) & (scored.reward <= worst)
    return len(np.unique(scored.group[silent])) / len(np.unique(scored.group))
