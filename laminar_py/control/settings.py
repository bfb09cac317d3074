"""Settings of the scheduler, made from a config: admission of new groups, bound on staleness. Pure.

A group is live from its issue until the step that consumes it is committed, or until it is dropped. At most
`limit` groups are live. A step consumes `batch` groups, so a group admitted as one of `(1 + n) * batch` live
groups is consumed about n steps later. `records.ages` defines staleness.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from laminar_py.config.algorithm import Truncated
from laminar_py.config.engine import Speculation
from laminar_py.config.replay import ReplayConfig
from laminar_py.config.rollout import OnNewWeights, Schedule, StalePolicy, WithoutSignal
from laminar_py.config.run import RunConfig
from laminar_py.learner.packing.buffer import Packing
from laminar_py.records.ages import WeightAges
from laminar_py.records.columns import Column
from laminar_py.records.engine import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Limits on issuing new groups: `batch` new groups make a learner step, at most `capacity` groups are live."""

    schedule: Schedule
    batch: int
    capacity: int
    max_staleness: int | None = None
    wait: bool = True  # `staleness.policies` has `wait`
    publish_every: int = 1  # steps; the newest version is up to publish_every - 1 steps old
    refills: bool = True  # groups without signal leave at once, so live groups may be fewer than were issued

    @property
    def limit(self) -> int:
        """Most live groups: the batches that the schedule and the staleness bound allow, at most `capacity`."""
        if self.schedule is Schedule.SYNC:
            return min(self.capacity, self.batch)
        if self.schedule is Schedule.ONE_STEP:
            return min(self.capacity, 2 * self.batch)
        if self.wait and self.max_staleness is not None:
            steps = max(1, 2 + self.max_staleness - self.publish_every)
            return min(self.capacity, steps * self.batch)
        return self.capacity

    @property
    def by_batch(self) -> bool:
        """Whether groups are issued for one step at a time; `async` issues independently of steps."""
        return self.schedule is not Schedule.ASYNC

    def oldest(self, newest: int, ages: WeightAges) -> int | None:
        """Return the oldest version that new groups may begin under, None for any.

        `sync` and `one_step` demand the learner's `newest` version (-1 before the first). `async` with `wait`
        demands an age within `max_staleness`, since a response only grows older until it is consumed.
        """
        if self.by_batch:
            return newest
        bounds = self.wait and newest >= 0  # before the first version only restored work runs
        return ages.oldest_within(self.max_staleness) if bounds and self.max_staleness is not None else None

    def share(self, replicas: int) -> int | None:
        """Return how many groups of a batch one of `replicas` gets at most; None under `async`."""
        return -(-self.batch // replicas) if self.by_batch else None

    def allowed(self, *, live: int, generating: int) -> int:
        """Return how many groups may be issued now, if `live` groups are live and `generating` of them not ready.

        `one_step` begins a batch when the previous batch is generated, e.g. for batch 32: `allowed(live=32,
        generating=0)` is 32 (the learner has the others), `allowed(live=32, generating=4)` is 0. A batch that was
        begun when some replicas were not up yet is completed: `allowed(live=40, generating=8)` is 24. With
        `refills` it is not completed, since `live` does not show how many groups of the batch were issued.
        """
        room = max(0, self.limit - live)
        if self.schedule is Schedule.ONE_STEP:
            missing = 0 if self.refills else -live % self.batch
            return min(room, missing if generating else self.batch)
        return room


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """Treatment of a trajectory that is older than `max_staleness` learner steps at its consumption."""

    max_staleness: int | None
    policies: tuple[StalePolicy, ...] = ()

    def weight(self, staleness: int) -> float | None:
        """Return the loss weight for a trajectory with this staleness in learner steps, None to drop it.

        With a bound of 3 and `reweight`, staleness 3 gives 1, 7 gives 0.5; with `drop`, 7 gives None.
        """
        if self.max_staleness is None or staleness <= self.max_staleness:
            return 1.0
        if StalePolicy.DROP in self.policies:
            return None
        if StalePolicy.REWEIGHT in self.policies:
            return (self.max_staleness + 1) / (staleness + 1)
        return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """Settings of the scheduler, with the meanings of `config.rollout.RolloutConfig`."""

    seed: int
    replicas: int
    batch_per_replica: int
    group_size: int
    sampling: SamplingParams
    sampling_by_set: Mapping[str, SamplingParams] = field(default_factory=dict)  # of evaluation sets, by name
    without_signal: WithoutSignal
    max_refill: float = 4.0
    masks_truncated: bool = False
    one_version: bool  # `drain`: a trajectory continues only under its own version
    admission: Admission
    bound: StalenessBound
    group_deadline_s: float | None = None
    min_group_survivors: int = 2
    max_seconds: float | None = None
    has_environment: bool = False  # an environment answers the turns of each trajectory
    versions_return: bool = False  # a resumed run publishes a lost version again, so its work is kept
    packing: Packing | None = None  # None: a step takes the oldest groups
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    replayed_groups: int = 0  # of a step, at most
    scored_columns: tuple[Column, ...] = ()  # that the loss needs of each response
    sends_earlier: bool = False  # replicas get references to earlier responses of a prompt, to draft from


def control_settings(config: RunConfig, *, stop_ids: tuple[int, ...]) -> ControlSettings:
    """Return the scheduler's settings from a run's config; `stop_ids` are the token ids that end a response."""
    rollout, staleness, engine = config.rollout, config.staleness, config.rollout.engine
    sampling = rollout.sampling.params(stop_ids=stop_ids)
    without_signal = WithoutSignal.TRAIN if config.algorithm.trains_on_all_groups else rollout.without_signal
    return ControlSettings(
        seed=config.seed,
        replicas=rollout.replicas,
        batch_per_replica=rollout.batch_per_replica,
        group_size=rollout.group_size,
        sampling=sampling,
        sampling_by_set={name: settings.sampling(sampling) for name, settings in config.eval.sets.items()},
        without_signal=without_signal,
        max_refill=rollout.max_refill,
        masks_truncated=config.algorithm.truncated is Truncated.MASK,
        one_version=rollout.on_new_weights is OnNewWeights.DRAIN,
        admission=Admission(
            schedule=config.schedule,
            batch=config.fresh_groups,
            capacity=max_groups(config),
            max_staleness=staleness.max_staleness,
            wait=staleness.waits,
            publish_every=config.learner.publish_every,
            refills=without_signal is WithoutSignal.REFILL,
        ),
        bound=StalenessBound(staleness.max_staleness, staleness.policies),
        group_deadline_s=rollout.group_deadline_s,
        min_group_survivors=min(2, rollout.group_size),
        max_seconds=rollout.max_seconds,
        has_environment=config.has_environment,
        packing=Packing(
            max_tokens=config.row_tokens,
            by_id=config.schedule is Schedule.SYNC,
            cuts=not config.algorithm.needs_whole_responses,
        ),
        replay=config.buffer.replay,
        replayed_groups=rollout.prompts_per_step - config.fresh_groups,
        scored_columns=config.algorithm.scored_columns,
        sends_earlier=engine.drafts_exactly and engine.speculation is Speculation.NGRAM,
    )


def max_groups(config: RunConfig) -> int:
    """Return the most live groups of a run: its capacity of trajectories, in groups."""
    return config.capacity // config.rollout.group_size
