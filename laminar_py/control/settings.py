"""Settings of the scheduler: admission of new groups, the bound on staleness, and all of them from a config. Pure.

A group is live from its issue until the learner step that consumes it is committed (or it is dropped). At
most `limit` groups are live; since a step consumes `batch` groups, a group that is admitted as one of
`(1 + n) * batch` live ones is consumed about n steps later. `records.ages` says what staleness is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from laminar_py.config.algorithm import Truncated
from laminar_py.config.rollout import OnNewWeights, WithoutSignal
from laminar_py.config.run import RunConfig
from laminar_py.config.staleness import Schedule, StalePolicy
from laminar_py.learner.packing.stage import Packing
from laminar_py.records.ages import WeightAges
from laminar_py.records.engine import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """Limits on issuing new groups. `batch` groups make a learner step, `capacity` groups may be live."""

    schedule: Schedule
    batch: int
    capacity: int
    max_staleness: int | None = None
    wait: bool = True
    publish_every: int = 1  # steps; the newest version is up to one less behind the learner
    drops_silent: bool = True  # groups without signal are live no more, so live ones do not tell what was issued

    @property
    def limit(self) -> int:
        """Most live groups."""
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
        """True where groups are issued for one step at a time; `async` goes on whatever becomes of a step."""
        return self.schedule is not Schedule.ASYNC

    def oldest(self, newest: int, ages: WeightAges) -> int | None:
        """The oldest version that new groups may begin under: the newest, but for `async`; None: any.

        Under `async` and `wait`, data that is as old as the bound when it begins would exceed it when it ends.
        """
        if self.by_batch:
            return newest
        bounds = self.wait and newest >= 0  # before the first version everything is as a dead controller left it
        return ages.oldest_within(self.max_staleness) if bounds and self.max_staleness is not None else None

    def share(self, replicas: int) -> int | None:
        """Groups of a batch that one of the replicas takes at most; None where no batch is waited for."""
        return -(-self.batch // replicas) if self.by_batch else None

    def allowed(self, *, live: int, generating: int) -> int:
        """Groups that may be issued now, with `live` groups of which `generating` are not ready yet.

        `one_step` opens a batch only when the one before is generated, e.g. batch 32: `allowed(live=32,
        generating=0)` is 32 (the others are in the learner), `allowed(live=32, generating=4)` is 0. One that some
        replicas came too late for is completed meanwhile, where live groups tell how much of it was issued:
        `allowed(live=40, generating=8)` is 24.
        """
        room = max(0, self.limit - live)
        if self.schedule is Schedule.ONE_STEP:
            rest = 0 if self.drops_silent else -live % self.batch
            return min(room, rest if generating else self.batch)
        return room


@dataclass(frozen=True, slots=True)
class StalenessBound:
    """Treatment of a trajectory that is older than `max_staleness` learner steps when it is to be consumed."""

    max_staleness: int | None
    policies: tuple[StalePolicy, ...] = ()

    def weight(self, staleness: int) -> float | None:
        """Factor on its loss, or None if it must be dropped.

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
    """Settings that decide a trajectory's way; meanings as in `config.rollout.RolloutConfig`."""

    seed: int
    replicas: int
    batch_per_replica: int
    group_size: int
    sampling: SamplingParams
    of_sets: Mapping[str, SamplingParams] = field(default_factory=dict)  # of evaluation sets, by name
    without_signal: WithoutSignal
    max_refill: float = 4.0
    masks_truncated: bool = False
    one_version: bool  # drain: a trajectory continues only under its own version
    admission: Admission
    bound: StalenessBound
    group_deadline_s: float | None = None
    min_group_survivors: int = 2
    max_seconds: float | None = None
    has_environment: bool = False  # which answers the turns of each trajectory
    versions_return: bool = False  # a lost one is published again by whoever resumes, so its work is kept


def control_settings(config: RunConfig, *, stop_ids: tuple[int, ...]) -> ControlSettings:
    """Settings of the scheduler."""
    rollout, staleness = config.rollout, config.staleness
    sampling = rollout.sampling.params(stop_ids=stop_ids)
    return ControlSettings(
        seed=config.seed,
        replicas=rollout.replicas,
        batch_per_replica=rollout.batch_per_replica,
        group_size=rollout.group_size,
        sampling=sampling,
        of_sets={name: settings.sampling(sampling) for name, settings in config.eval.sets.items()},
        without_signal=WithoutSignal.TRAIN if config.algorithm.normalises_step else rollout.without_signal,
        max_refill=rollout.max_refill,
        masks_truncated=config.algorithm.truncated is Truncated.MASK,
        one_version=rollout.on_new_weights is OnNewWeights.DRAIN,
        admission=Admission(
            schedule=config.schedule,
            batch=rollout.prompts_per_step,
            capacity=max_groups(config),
            max_staleness=staleness.max_staleness,
            wait=StalePolicy.WAIT in staleness.policies,
            publish_every=config.learner.publish_every,
            drops_silent=rollout.without_signal is WithoutSignal.REFILL,
        ),
        bound=StalenessBound(staleness.max_staleness, staleness.policies),
        group_deadline_s=rollout.group_deadline_s,
        max_seconds=rollout.max_seconds,
        has_environment=config.has_environment,
    )


def packing(config: RunConfig) -> Packing:
    """How the batches of steps are packed."""
    packer = config.packer
    return Packing(
        groups=config.rollout.prompts_per_step,
        max_tokens=packer.max_tokens,
        ranks=config.learner.world_size,
        look_ahead=packer.look_ahead,
        by_id=config.schedule is Schedule.SYNC,
    )


def max_groups(config: RunConfig) -> int:
    """Live groups at most."""
    return config.capacity // config.rollout.group_size
