"""Settings of replicas, sampling and groups, and of consolidation in flight."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from laminar_py.config.engine import AnyEngineConfig, EngineConfig
from laminar_py.config.registry import Registry
from laminar_py.config.section import ConfigError, Count, Seconds, Section, Share
from laminar_py.records.engine import SamplingParams
from laminar_py.records.pieces import Recording


class Schedule(StrEnum):
    """Moments at which prompts are admitted, relative to learner steps."""

    ASYNC = "async"
    ONE_STEP = "one_step"
    SYNC = "sync"


class StalePolicy(StrEnum):
    """Means that enforce `max_staleness`."""

    WAIT = "wait"
    DROP = "drop"
    REWEIGHT = "reweight"


class StalenessConfig(Section):
    """How old a trajectory may be when the learner consumes it: learner steps since the oldest weights in it."""

    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Bound, in learner steps; at least `learner.publish_every` - 1. None leaves staleness inherent (whatever
    generation time makes it)."""
    policies: tuple[StalePolicy, ...] = (StalePolicy.WAIT, StalePolicy.DROP)
    """`wait` holds admission so that the bound is rarely met; what exceeds it when it is consumed is dropped
    (`drop`) or has its loss scaled by `(max_staleness + 1) / (staleness + 1)` (`reweight`)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {StalePolicy.DROP, StalePolicy.REWEIGHT} <= set(self.policies):
            raise ConfigError("staleness.policies has both drop and reweight; keep one of them")
        if self.max_staleness is not None and not self.policies:
            raise ConfigError(
                "staleness.policies is empty although staleness.max_staleness is set; name wait, drop or reweight"
            )
        return self

    def unbounded(self, schedule: Schedule) -> bool:
        """True where neither bound nor schedule limits how old a trajectory may be."""
        return schedule is Schedule.ASYNC and self.max_staleness is None

    @property
    def enforced(self) -> int | None:
        """The bound, where consumption drops or reweights what exceeds it."""
        return self.max_staleness if {StalePolicy.DROP, StalePolicy.REWEIGHT} & set(self.policies) else None


class BufferConfig(Section):
    """Trajectories between generation and learner."""

    capacity: Count | None = None
    """Live trajectories (running, being scored, ready, in the learner) above which no prompt is admitted;
    default 4 learner steps and one batch for each replica."""


def check_buffer(capacity: int, trajectories_per_step: int) -> None:
    """Refuse a depth that no learner step fits."""
    if capacity < trajectories_per_step:
        raise ConfigError(
            f"buffer.capacity={capacity} is below one learner step of {trajectories_per_step} trajectories"
            " (rollout.prompts_per_step * rollout.group_size); raise it"
        )


def check_schedule(schedule: Schedule, staleness: StalenessConfig, *, publish_every: int) -> None:
    """Refuse a bound that the schedule itself, or the learner between two versions, exceeds."""
    if schedule is Schedule.ONE_STEP and staleness.enforced == 0:
        raise ConfigError(
            "staleness.max_staleness=0 is what schedule=one_step exceeds at every other step; set it to 1 or"
            " choose schedule=sync"
        )
    least = publish_every - (schedule is not Schedule.ONE_STEP)
    if staleness.enforced is not None and staleness.enforced < least:
        raise ConfigError(
            f"staleness.max_staleness={staleness.enforced} is below the age of what schedule={schedule} begins"
            f" between two versions with learner.publish_every={publish_every}; set it to at least {least}"
        )


class OnNewWeights(StrEnum):
    """Ways of a replica with newer weights."""

    DRAIN = "drain"
    RESUME = "resume"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class WithoutSignal(StrEnum):
    """Fates of a group whose rewards are all equal."""

    TRAIN = "train"
    SKIP = "skip"
    REFILL = "refill"


class SamplingConfig(Section):
    """How responses are drawn in training; an evaluation set may differ in each."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most probable tokens; 0 keeps all. A cut vocabulary needs `sampling_mask` in `rollout.record`."""
    top_p: Share = 1.0
    """Keep the smallest set of tokens with this probability; 1 keeps all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep tokens at least this times as probable as the most probable one; 0 keeps all."""
    max_new_tokens: Count = 1024
    """Cap on response tokens of a trajectory; a response that reaches it is cut, with an event."""

    def params(self, *, stop_ids: tuple[int, ...] = ()) -> SamplingParams:
        """Parameters of a request to an engine."""
        return SamplingParams(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop_ids=stop_ids,
        )

    @property
    def cuts_vocabulary(self) -> bool:
        """True where tokens are drawn from a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


class RolloutConfig(Section):
    """The replicas and what they generate."""

    engine: AnyEngineConfig = EngineConfig()
    """What generates."""
    replicas: Count = 2
    """Inference engines, each with a process of its own."""
    max_batch: Count = 64
    """Trajectories one engine decodes at a time."""
    max_len: Count = 2048
    """Tokens of prompt and response that one trajectory may have in an engine."""
    kv_capacity: Count | None = None
    """KV cache of one engine, in tokens; default `max_batch * max_len`. A full cache retracts the youngest."""
    batch_per_replica: Count = 128
    """Trajectories a draining replica admits under one version before it takes newer weights."""
    on_new_weights: OnNewWeights = OnNewWeights.DRAIN
    """`drain`: finish what was admitted, then load, so a trajectory has one version. `resume`: abort, load,
    continue from the partial response; spans record the mix. `retract`: pause, load, recompute the KV cache, go
    on. `in_place`: pause, load, go on with the KV cache of the old weights; spans record that too."""
    record: tuple[Recording, ...] = ()
    """Beside tokens and log-probabilities: `sampling_mask` (the vocabulary each token was drawn from, where it is
    cut), `routed_experts` (of mixture models). The learner replays what is recorded."""
    prompts_per_step: Count = 32
    """Groups in a learner step."""
    group_size: Count = 8
    """Samples of one prompt (K)."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""
    max_seconds: Seconds | None = None
    """Cap on generation time of a trajectory, in seconds; it is cut there, with an event."""
    without_signal: WithoutSignal = WithoutSignal.SKIP
    """Groups whose rewards are all equal, and whose advantages so are 0: `train` on them, `skip` them (the same
    gradient for less work, but for the divergence from a reference and for `algorithm.overlong_tokens`), or
    `refill` until the step has enough with signal (dynamic sampling; the means of a step that has fewer in the end
    are over these). Where tokens have rewards these are what counts. `algorithm.advantage=batch_std` trains on
    all, whatever this says."""
    max_refill: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 4.0
    """With `refill`: groups that are generated for one step, over `prompts_per_step`, before it goes on with what
    there is, and an event says how many groups were solved or hopeless. With 4 a full step has one group in four
    with signal at least; below that other prompts help more than more groups. Where no group has signal others
    are generated; a run in which 1,000 in a row have none ends."""
    group_deadline_s: Seconds | None = None
    """Close a group this many seconds after its first member finished; stragglers are dropped with an event, as is
    a group of which fewer than two are left."""
    partial_interval_s: Seconds = 1.0
    """Seconds between two entries of what runs in its replica's journal; the death of a replica costs as much."""

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV cache in one engine."""
        return self.kv_capacity or self.max_batch * self.max_len


def check_rollout(rollout: RolloutConfig) -> None:
    """Refuse sampling that cannot be trained on, and what has no room for a group or a trajectory."""
    _check_vocabulary(rollout)
    _check_sampling(rollout)
    _check_groups(rollout)


def _check_vocabulary(rollout: RolloutConfig) -> None:
    sampling, recorded = rollout.sampling, Recording.SAMPLING_MASK in rollout.record
    if sampling.cuts_vocabulary and not recorded:
        raise ConfigError(
            f"rollout.sampling.top_k={sampling.top_k} top_p={sampling.top_p} min_p={sampling.min_p} cut the"
            " vocabulary, which the learner must know; add sampling_mask to rollout.record"
        )
    if recorded and not sampling.cuts_vocabulary:
        raise ConfigError(
            "rollout.record=sampling_mask would name the whole vocabulary for each token; leave it out, or set"
            " rollout.sampling.top_k, top_p or min_p"
        )


def _check_sampling(rollout: RolloutConfig) -> None:
    sampling, max_len = rollout.sampling, rollout.max_len
    if sampling.temperature == 0:
        raise ConfigError("rollout.sampling.temperature=0 gives equal samples and no signal; set it above 0")
    if sampling.max_new_tokens >= max_len:
        raise ConfigError(
            f"rollout.sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in"
            f" rollout.max_len={max_len}; raise max_len or lower max_new_tokens"
        )
    if rollout.kv_tokens < max_len:
        raise ConfigError(
            f"rollout.kv_capacity={rollout.kv_tokens} cannot hold one trajectory of rollout.max_len={max_len};"
            " raise it"
        )


def _check_groups(rollout: RolloutConfig) -> None:
    size = rollout.group_size
    if size < 2:
        raise ConfigError("rollout.group_size=1 has no advantage within the group; set at least 2")
    for name, value in (("batch_per_replica", rollout.batch_per_replica), ("max_batch", rollout.max_batch)):
        if value < size:
            raise ConfigError(
                f"rollout.{name}={value} is below rollout.group_size={size}, and a group goes to one replica;"
                " raise it"
            )


NO_PLANNER, DEFAULT_PLANNER = "none", "predictive"
PLANNERS: Registry[type] = Registry(  # classes of `repack.planner.Planner`, each made with a `PlanningContext`
    type,
    field="repack.planner",
    group="laminar_py.planners",
    built_in={
        "paper": "laminar_py.repack.paper:PaperPlanner",
        "predictive": "laminar_py.repack.predictive:PredictivePlanner",
    },
)


class RepackConfig(Section):
    """Consolidation of trajectories in flight: a replica's last ones move to others of its weight version, so that
    it takes new weights and prompts. Only under `rollout.on_new_weights=drain` and `schedule=async`."""

    planner: str | None = None
    """`paper`: Best-Fit, a source goes whole to one destination. `predictive`: what waits is shared; the emptiest
    are emptied, and what they have is spread evenly over the others, by predicted remaining tokens and the cost of
    computing KV caches anew, and only where that gains. Or what an installed package announces as
    `laminar_py.planners`. `none`: nothing moves. Default: `predictive`, where anything can move."""
    interval_s: Seconds = 5.0
    """Seconds between two rounds; there is one after every publish too."""
    max_stall_s: Seconds = 5.0
    """Longest time that one round of `predictive` may cost a destination, for the prefill of what it receives; a
    source that cannot be emptied within it stays."""
    roofline_batch: Count | None = None
    """Decode batch below which a larger one costs an engine no time: `paper` keeps destinations below it. Default:
    measured, like all that planners know of an engine's speed, on an idle one before the first run, and cached."""


def can_repack(schedule: Schedule, rollout: RolloutConfig) -> bool:
    """True where a replica that becomes free gets prompts: under other schedules it waits for the whole batch."""
    drains = rollout.on_new_weights is OnNewWeights.DRAIN and schedule is Schedule.ASYNC
    return drains and rollout.replicas > 1


def check_planner(repack: RepackConfig, schedule: Schedule, rollout: RolloutConfig) -> None:
    """Refuse a planner that is none, or would have nothing to move."""
    if repack.planner in (None, NO_PLANNER):
        return
    PLANNERS.get(repack.planner)
    if not can_repack(schedule, rollout):
        raise ConfigError(
            f"repack.planner={repack.planner} moves nothing under schedule={schedule},"
            f" rollout.on_new_weights={rollout.on_new_weights}, rollout.replicas={rollout.replicas}; it needs"
            " async, drain and two replicas, or set it to none"
        )
