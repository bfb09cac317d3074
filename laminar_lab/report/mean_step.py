"""The mean step of a run: seconds of its stages, use of engines and cores, costs of old data; and its prediction.

The diagnosis judges the mean step. `compose` is the one formula of a step's seconds; the planner uses it, too.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from laminar_lab.report.pipeline import Pipeline
from laminar_lab.report.snapshot import Samples
from laminar_lab.report.trajectories import Ints, Times, Trajectories
from laminar_py.config.algorithm import Objective
from laminar_py.config.rollout import Schedule
from laminar_py.config.run import RunConfig
from laminar_py.records.codec import BoolArray
from laminar_py.records.engine import DraftCounts, sum_drafts
from laminar_py.records.metrics import FleetRow, StepRow
from laminar_py.records.trajectory import DropReason

FRESH = "0"  # bucket of tokens sampled by the newest weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """Mean use over samples of the fleet, e.g. `Use(slots=0.31, kv=0.12, cpu=0.97, own_cpu=0.95, cores=2)`."""

    slots: float  # share of the engines' decode slots
    kv: float  # share of their KV caches
    cpu: float  # share of the cores that are available to the controller
    own_cpu: float  # share that the run's own processes use
    cores: int  # number of cores; 0: not on record


@dataclass(frozen=True, slots=True, kw_only=True)
class Age:
    """Costs of old data, e.g. `Age(lost=0.38, kl={"0": 1e-4, "3-4": 0.03})`.

    `lost` is 1 - all / fresh: effective sample sizes of the importance weights per token, over all trained tokens
    and over trained tokens at staleness 0. `oldest` is the highest staleness, in learner steps.
    """

    lost: float
    kl: dict[str, float]  # nats, behaviour to new policy, by staleness
    oldest: int = 0


def measure_use(fleet: Sequence[FleetRow], *, max_batch: int) -> Use | None:
    """Return the means of these samples; None without any."""
    if not fleet:
        return None
    slots = [min(running / max_batch, 1.0) for row in fleet for running in row.running]
    kv = [use for row in fleet for use in row.kv_use]
    known = [row.cpu_use for row in fleet if row.cpu_use is not None and row.cores]
    own = [row.own_cpu_use for row in fleet if row.own_cpu_use is not None and row.cores]
    return Use(
        slots=float(np.mean(slots)) if slots else 0.0,
        kv=float(np.mean(kv)) if kv else 0.0,
        cpu=float(np.mean(known)) if known else 0.0,
        own_cpu=float(np.mean(own)) if own else 0.0,
        cores=max(row.cores for row in fleet) if own else 0,
    )


def measure_age(steps: Sequence[StepRow], *, weighs: bool = True) -> Age:
    """Return the costs over these steps, without figures that are not finite.

    An objective that `weighs` no token by a ratio of policies loses nothing.
    """
    shares = defaultdict[str, list[tuple[float, int]]](list)
    divergences = defaultdict[str, list[tuple[float, int]]](list)
    for row in steps:
        for bucket, tokens in row.by_staleness.items():
            shares[bucket].append((tokens.effective_share, tokens.num_tokens))
            divergences[bucket].append((tokens.kl_behaviour_k3, tokens.num_tokens))
    effective = _mean([(row.effective_share, 1) for row in steps], default=1.0)
    fresh = _mean(shares[FRESH], default=1.0)
    lost = max(0.0, 1.0 - effective / fresh) if fresh and weighs else 0.0
    return Age(
        lost=lost,
        kl={bucket: _mean(found, default=0.0) for bucket, found in sorted(divergences.items())},
        oldest=max((row.staleness_max for row in steps if row.staleness_max is not None), default=0),
    )


def _mean(weighted: Sequence[tuple[float, int]], *, default: float) -> float:
    """Return the weighted mean of finite values, from pairs of value and weight."""
    known = [(value, weight) for value, weight in weighted if math.isfinite(value) and weight]
    total = sum(weight for _, weight in known)
    return sum(value * weight for value, weight in known) / total if total else default


class StepStage(StrEnum):
    """Stage of a step, in the order in which a trajectory passes them."""

    GENERATION = "generation"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    REFERENCE = "reference"
    LEARNER = "learner"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds that each stage works for one step, e.g. generation 32.3 s and the learner 12.1 s of a step of 34 s.

    A field is the time of all replicas, workers or ranks of the stage together: twice as many halve it.
    """

    generation_s: float  # in papers tau_R
    environment_s: float = 0.0  # slots of replicas are empty while environments work
    reward_s: float = 0.0  # in papers tau_V
    reference_s: float = 0.0  # as a stage of its own; 0 inside the learner
    learner_s: float = 0.0  # in papers tau_T
    weights_s: float = 0.0  # empty replicas wait for published weights, or load them
    tail_s: float = 0.0  # part of generation with so few trajectories that more replicas would not help
    stall_s: float = 0.0  # part of the learner's time that publishes

    def seconds_of(self, stage: StepStage) -> float:
        """Return the seconds of one stage."""
        seconds: float = getattr(self, f"{stage}_s")
        return seconds

    def faster(self, stage: StepStage, factor: float) -> "StageTimes":
        """Return the times with `factor` times as much of a stage, e.g. twice the replicas; the tail stays."""
        if stage is StepStage.GENERATION:
            full = self.generation_s - self.tail_s
            return replace(self, generation_s=full / factor + self.tail_s)
        return replace(self, **{f"{stage}_s": self.seconds_of(stage) / factor})

    def without(self, stage: StepStage) -> "StageTimes":
        """Return the times as if a stage cost nothing.

        Without generation its tail remains, since more replicas do not shorten the tail. Without weights the
        learner also saves its stall at a publish.
        """
        if stage is StepStage.GENERATION:
            return replace(self, generation_s=self.tail_s)
        if stage is StepStage.WEIGHTS:
            return replace(self, weights_s=0.0, learner_s=self.learner_s - self.stall_s, stall_s=0.0)
        return replace(self, **{f"{stage}_s": 0.0})

    def with_faster_tail(self, factor: float) -> "StageTimes":
        """Return the times as if replicas generated `factor` times as fast while they have few trajectories."""
        saved = self.tail_s - self.tail_s / factor
        return replace(self, generation_s=self.generation_s - saved, tail_s=self.tail_s - saved)

    def without_tail(self) -> "StageTimes":
        """Return the times as if replicas were full until they end: generation without its tail."""
        return replace(self, generation_s=self.generation_s - self.tail_s, tail_s=0.0)


def compose(schedule: Schedule, times: StageTimes) -> float:
    """Return the seconds of a step whose stages wait for each other as `schedule` says.

    Turns of the model and of its environment follow each other. Scoring and frozen models run beside them, so
    the longest of the three counts. Under `sync` the learner and the weights follow. Under `one_step` a batch is
    generated while the batch before trains, and weights move in between. Under `async` no stage waits, but a
    replica loads weights between its trajectories.
    """
    turns = times.generation_s + times.environment_s
    rollout = max(turns, times.reward_s, times.reference_s)
    match schedule:
        case Schedule.SYNC:
            return rollout + times.learner_s + times.weights_s
        case Schedule.ONE_STEP:
            return max(rollout, times.learner_s) + times.weights_s
        case Schedule.ASYNC:
            return max(turns + times.weights_s, rollout, times.learner_s)


def predict(schedule: Schedule, *, measured_s: float, now: StageTimes, then: StageTimes) -> float:
    """Return the seconds of a step if its stages took `then` instead of `now`; the slack of the step stays.

    Stages that overlapped more than the schedule says take more than the step, and keep this overlap.
    """
    composed, predicted = compose(schedule, now), compose(schedule, then)
    if composed > measured_s:
        return measured_s * predicted / composed
    return predicted + measured_s - composed


WARM_UP = 0.25  # share of the first steps, which do not count
FEW_STEPS = 8  # with fewer steps all count
CORES_FULL = 0.91  # share of busy cores above which more processes only share them
BACKGROUND = 0.3  # most cores that a run keeps busy beside its steps; 0.16 to 0.30 were measured


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanStep:
    """Times of a mean step in seconds, and shares over the run."""

    schedule: Schedule  # by which the stages wait for each other
    in_turns: bool = False  # learner and all replicas share devices, whatever the schedule of the run
    steps: int
    measured_s: float
    times: StageTimes
    reference_s: float  # wherever it runs
    reference_in_learner: bool
    waited_s: float  # the learner, for a batch
    held_s: float  # replicas, empty, since nothing may begin
    longest_s: float  # expected longest generation in a step's batch, on replicas with free slots
    stale_share: float  # of generated tokens: dropped as too old
    hopeless_share: float  # of groups: all members failed
    length_ratio: float  # p95 over p50 of response lengths
    crowded_share: float  # of the busy time: more trajectories than the engine decodes at a time
    away: float  # trajectories whose environments work at a time, of all replicas together
    turn_p95_s: float  # p95 of the mean time that an environment takes for a turn of its trajectory
    group_p90_s: float  # from the first member of a group that finished until the last, p90
    reward_p95_s: float
    transfer_s: float  # weights were on the way between relays
    load_s: float  # of one version, in a replica
    microbatches: float  # of a rank in a step, at least
    use: Use | None  # None: no sample of the fleet counts
    cpu_s: float  # work of a step on all cores, which more processes do not shorten; 0: unknown
    age: Age
    drafts: DraftCounts = field(default_factory=DraftCounts)  # of the counted steps
    speedups: dict[int, float] = field(default_factory=dict)  # by drafts, in the last step; as in `EngineStatus`

    @property
    def cores_full(self) -> bool:
        """Whether the cores are next to never idle."""
        return self.cpu_s >= CORES_FULL * self.measured_s > 0


def mean_step(
    config: RunConfig, trajectories: Trajectories, pipeline: Pipeline, samples: Samples
) -> MeanStep | None:
    """Return the mean of the steps after the warm-up; None before the first whole step."""
    if not len(pipeline):
        return None
    first = int(len(pipeline) * WARM_UP) if len(pipeline) >= FEW_STEPS else 0

    def mean(column: Times) -> float:
        return float(column[first:].mean())

    in_learner = config.algorithm.has_reference and not config.algorithm.stages
    since = float((pipeline.end_s - pipeline.measured_s)[first])
    tokens = _tokens_per_step(trajectories)
    trajectories = trajectories.where(trajectories.issued_s >= since - mean(pipeline.measured_s))
    finished = trajectories.where(trajectories.finish >= 0)
    samples = _samples_since(int(pipeline.step[first]), samples)
    use = measure_use(samples.fleet, max_batch=config.rollout.max_batch)
    times = _stage_times(pipeline, first, in_learner=in_learner)
    return MeanStep(
        schedule=Schedule.SYNC if config.all_shared else config.schedule,
        in_turns=config.all_shared,
        steps=len(pipeline) - first,
        measured_s=mean(pipeline.measured_s),
        times=times,
        reference_s=mean(pipeline.reference_s),
        reference_in_learner=in_learner,
        waited_s=mean(pipeline.waited_s),
        held_s=mean(pipeline.held_s),
        longest_s=_longest_s(finished, config.new_per_step),
        stale_share=_token_share(trajectories, trajectories.dropped_for(DropReason.STALE)),
        hopeless_share=_hopeless_share(trajectories),
        length_ratio=_length_ratio(finished),
        crowded_share=mean(pipeline.crowded_s) / max(mean(pipeline.generation_s), 1e-9),
        away=mean(pipeline.away),
        turn_p95_s=_turn_p95_s(finished),
        group_p90_s=_group_p90_s(finished),
        reward_p95_s=float(np.nanpercentile(finished.score_s, 95)) if np.isfinite(finished.score_s).any() else 0.0,
        transfer_s=mean(pipeline.transfer_s),
        load_s=mean(pipeline.load_s),
        microbatches=tokens / (config.packer.max_tokens * config.learner_ranks),
        use=use,
        cpu_s=_cpu_s(config, use, times, mean(pipeline.measured_s)),
        age=measure_age(samples.steps, weighs=config.algorithm.objective is not Objective.BALANCE),
        drafts=sum_drafts(row.drafts for row in samples.steps),
        speedups=samples.steps[-1].draft_speedups if samples.steps else {},
    )


def _stage_times(pipeline: Pipeline, first: int, *, in_learner: bool) -> StageTimes:
    """Return the mean times of the stages over the steps from `first` on."""

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


def _samples_since(step: int, samples: Samples) -> Samples:
    """Return the samples from this step on."""
    begin_s = max((row.rl_s for row in samples.steps if row.step < step), default=0.0)
    rows = tuple(row for row in samples.steps if row.step >= step)
    return Samples(rows, tuple(row for row in samples.fleet if row.rl_s > begin_s), samples.rl_s)


def _cpu_s(config: RunConfig, use: Use | None, times: StageTimes, measured_s: float) -> float:
    """Return the seconds for which a step's work fills all cores; 0 if the use of cores does not tell.

    It does not tell on a cluster, of which one machine is measured. Servers on GPUs keep cores busy while they
    wait, so on GPUs only full cores tell. A constant background load of the run's processes does not belong to the
    steps.
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
    """Return p95 over p50 of the lengths."""
    p50, p95 = np.percentile(finished.length, [50, 95]) if len(finished) else (0.0, 0.0)
    return float(p95 / p50) if p50 else 0.0


def _turn_p95_s(finished: Trajectories) -> float:
    """Return p95 of an environment's mean seconds per turn; 0 without environments."""
    known = finished.where(finished.turns > 0)
    return float(np.percentile(known.environment_s / known.turns, 95)) if len(known) else 0.0


def _longest_s(finished: Trajectories, count: int) -> float:
    """Return the expected seconds of the longest of `count` responses, at the speed of the fastest long responses.

    A moved trajectory has no known speed, since only the times on its last replica are recorded.
    """
    if not len(finished):
        return 0.0
    long = finished.where(finished.length >= max(1.0, float(np.quantile(finished.length, 0.9))))
    whole = long.where(long.epoch == 1)
    per_token = np.quantile((whole.generate_s - whole.queue_s) / whole.length, 0.1) if len(whole) else 0.0
    return expected_longest(finished.length, count) * float(per_token)


def expected_longest(lengths: Ints, count: int) -> float:
    """Return the expected longest of `count` lengths drawn from these [N] with replacement; 0 without lengths."""
    ordered = np.sort(lengths)
    if not len(ordered):
        return 0.0
    share = (np.arange(len(ordered) + 1) / len(ordered)) ** count
    return float(ordered @ np.diff(share))


def _group_p90_s(finished: Trajectories) -> float:
    """Return p90 over groups of the time between the first finished member and the last."""
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


def _token_share(trajectories: Trajectories, chosen: BoolArray) -> float:
    """Return the share of all tokens in the chosen trajectories [N]."""
    total = int(trajectories.length.sum(dtype=np.int64))
    return float(trajectories.length[chosen].sum(dtype=np.int64) / total) if total else 0.0


def _hopeless_share(trajectories: Trajectories) -> float:
    """Return the share of scored groups that failed throughout: all members got the lowest reward of the run.

    The controller drops such groups, since equal rewards teach nothing. If all rewards of the run are equal and
    above 0, every response succeeded, and the share is 0.
    """
    scored = trajectories.where(~np.isnan(trajectories.reward))
    if not len(scored):
        return 0.0
    worst = scored.reward.min()
    if worst == scored.reward.max() and worst > 0:
        return 0.0
    silent = scored.dropped_for(DropReason.NO_SIGNAL) & (scored.reward <= worst)
    return len(np.unique(scored.group[silent])) / len(np.unique(scored.group))
