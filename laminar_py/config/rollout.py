"""Settings of replicas, sampling, groups and repacking, and of schedule, staleness and buffer."""

from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from laminar_py.config.engine import AnyEngineConfig, EngineConfig
from laminar_py.config.registry import Registry
from laminar_py.config.replay import ReplayConfig
from laminar_py.config.section import ConfigError, Count, Seconds, Section, Share
from laminar_py.config.steering import StalenessControl
from laminar_py.records.engine import SamplingParams
from laminar_py.records.pieces import Recording


class Schedule(StrEnum):
    """When prompts are admitted, relative to learner steps; see `RunConfig.schedule`."""

    ASYNC = "async"
    ONE_STEP = "one_step"
    SYNC = "sync"


class StalePolicy(StrEnum):
    """How `max_staleness` is enforced; see `StalenessConfig.policies`."""

    WAIT = "wait"
    DROP = "drop"
    REWEIGHT = "reweight"


class StalenessConfig(Section):
    """Bound on the age of a trajectory when the learner consumes it: learner steps since the oldest weights in
    it."""

    max_staleness: Annotated[int, Field(ge=0)] | None = 4
    """Bound in learner steps; at least `learner.publish_every` - 1. None: no bound, so generation time decides."""
    policies: tuple[StalePolicy, ...] = (StalePolicy.WAIT, StalePolicy.REWEIGHT)
    """`wait`: delay admission so that trajectories rarely reach the bound. `drop`: drop trajectories above the
    bound at consumption. `reweight`: scale their loss by `(max_staleness + 1) / (staleness + 1)`."""
    control: StalenessControl | None = None
    """Move the bound during the run, within limits; none: it stays."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if {StalePolicy.DROP, StalePolicy.REWEIGHT} <= set(self.policies):
            raise ConfigError("staleness.policies=drop,reweight: only one of the two can apply; keep one")
        if self.max_staleness is not None and not self.policies:
            raise ConfigError(
                "staleness.policies=[]: does not enforce staleness.max_staleness; name wait, drop or reweight"
            )
        control, bound = self.control, self.max_staleness
        if control is not None and (bound is None or not control.min <= bound <= control.max):
            raise ConfigError(
                f"staleness.max_staleness={'null' if bound is None else bound}: staleness.control moves it from"
                f" {control.min} to {control.max}; set it to a number between them, or change these limits"
            )
        return self

    def unbounded(self, schedule: Schedule) -> bool:
        """True if neither `max_staleness` nor the schedule limits the age of a trajectory."""
        return schedule is Schedule.ASYNC and self.max_staleness is None

    @property
    def waits(self) -> bool:
        """True if the bound delays admission."""
        return StalePolicy.WAIT in self.policies

    @property
    def enforced(self) -> int | None:
        """Bound that consumption enforces by `drop` or `reweight`; None if it enforces no bound."""
        return self.max_staleness if {StalePolicy.DROP, StalePolicy.REWEIGHT} & set(self.policies) else None


class BufferConfig(Section):
    """Trajectories between generation and learner."""

    capacity: Count | None = None
    """Most live trajectories (running, being scored, ready, in the learner); at this number no prompt is admitted.
    Default: 4 learner steps without replayed ones, and one batch for each replica."""
    replay: ReplayConfig = ReplayConfig()
    """Replay: steps train on earlier groups again."""


def check_buffer(capacity: int, new_per_step: int) -> None:
    """Raise `ConfigError` if the buffer cannot hold the new trajectories of one learner step."""
    if capacity < new_per_step:
        raise ConfigError(
            f"buffer.capacity={capacity} is below one learner step of {new_per_step} new trajectories"
            " (rollout.prompts_per_step * rollout.group_size, without replayed ones); raise buffer.capacity"
        )


def check_schedule(schedule: Schedule, staleness: StalenessConfig, *, publish_every: int) -> None:
    """Raise `ConfigError` if trajectories always exceed the enforced bound, by `schedule` or `publish_every`."""
    if schedule is Schedule.ONE_STEP and staleness.enforced == 0:
        raise ConfigError(
            "staleness.max_staleness=0: schedule=one_step exceeds it at every other step; set it to 1, or"
            " choose schedule=sync"
        )
    least = publish_every - (schedule is not Schedule.ONE_STEP)
    if staleness.enforced is not None and staleness.enforced < least:
        raise ConfigError(
            f"staleness.max_staleness={staleness.enforced}: with schedule={schedule} and"
            f" learner.publish_every={publish_every} trajectories between two versions are older; set it to at"
            f" least {least}"
        )
    if staleness.control is not None and (schedule is not Schedule.ASYNC or not staleness.waits):
        raise ConfigError(
            f"staleness.control: schedule={schedule} and staleness.policies={','.join(staleness.policies)} admit"
            " as much at any bound; set schedule to async and name wait, or leave staleness.control out"
        )


class OnNewWeights(StrEnum):
    """Reaction of a replica to newer weights; see `RolloutConfig.on_new_weights`."""

    DRAIN = "drain"
    RESUME = "resume"
    RETRACT = "retract"
    IN_PLACE = "in_place"


class WithoutSignal(StrEnum):
    """Use of a group whose rewards are all equal; see `RolloutConfig.without_signal`."""

    TRAIN = "train"
    SKIP = "skip"
    REFILL = "refill"


class SamplingConfig(Section):
    """How responses are sampled in training; an evaluation set may override all but `min_p`."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Divides the logits; 0 is greedy."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Keep the k most probable tokens; 0 keeps all. A cut vocabulary needs `sampling_mask` in `rollout.record`."""
    top_p: Share = 1.0
    """Keep the smallest set of tokens with this probability; 1 keeps all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Keep tokens with at least this share of the highest probability; 0 keeps all."""
    max_new_tokens: Count = 1024
    """Cap on the response tokens of a trajectory; a response that reaches it is cut, with an event."""

    def params(self, *, stop_ids: tuple[int, ...] = ()) -> SamplingParams:
        """Return the sampling parameters of a request to an engine, which ends a response at any of `stop_ids`."""
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
        """True where tokens are sampled from a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _usual_batch(rollout: dict[str, Any]) -> int:
    """Return the default of `batch_per_replica` by the fields before it, without replay."""
    return usual_batch(rollout["prompts_per_step"], rollout["replicas"], rollout["group_size"])


def usual_batch(groups: int, replicas: int, group_size: int) -> int:
    """Return the trajectories that each replica admits by default, if a step takes so many new groups."""
    return group_size * min(groups, -(-2 * groups // replicas))


class RolloutConfig(Section):
    """Replicas and generation."""

    engine: AnyEngineConfig = EngineConfig()
    """Inference engine of each replica."""
    replicas: Count = 2
    """Number of replicas: inference engines, each in a process of its own."""
    max_batch: Count = 64
    """Most trajectories that one engine decodes at a time."""
    max_len: Count = 2048
    """Most tokens of prompt and response of one trajectory in an engine."""
    kv_capacity: Count | None = None
    """KV cache of one engine, in tokens; default `max_batch * max_len`. A full cache retracts the youngest
    request."""
    on_new_weights: OnNewWeights = OnNewWeights.DRAIN
    """`drain`: finish admitted trajectories, then load, so that a trajectory has one version. `resume`: abort,
    load, continue from partial responses; spans record the mixed versions. `retract`: pause, load, recompute the
    KV cache, continue. `in_place`: pause, load, continue with the KV cache of the old weights; spans record that
    too."""
    record: tuple[Recording, ...] = ()
    """Recordings beside tokens and log-probabilities, which the learner replays: `sampling_mask` (the vocabulary
    that each token was sampled from, if that is cut) and `routed_experts` (of mixture models)."""
    prompts_per_step: Count = 32
    """Groups in a learner step."""
    group_size: Count = 8
    """Samples of one prompt (K). 1 needs an `algorithm.advantage` without a group: `gae` or `batch_std`."""
    batch_per_replica: Count = Field(default_factory=_usual_batch)
    """Trajectories that a draining replica admits under one version before it loads newer weights. Default: twice
    a replica's share of a step's new groups, at most all of them, in whole groups."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are sampled."""
    max_seconds: Seconds | None = None
    """Cap on the seconds since a trajectory's first token, with waits for environments and weights. At the cap
    it is cut, with an event."""
    without_signal: WithoutSignal = WithoutSignal.SKIP
    """Use of groups whose rewards are all equal, so that their advantages are 0. `train` on them. `skip`
    them: the same gradient for less work, except for the divergence from a reference (also the one in
    `objective: balance`) and for `algorithm.overlong_tokens`. `refill`: generate more groups until the step has
    enough with signal (dynamic sampling). With process rewards the rewards of tokens count. With
    `algorithm.advantage` of `batch_std` or `gae`, and with a teacher, all groups train."""
    max_refill: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 4.0
    """`refill`: most groups that are generated for one step, as a multiple of its new groups. Then the step
    runs with the groups that have signal, and an event says how many groups were solved or hopeless. Below one
    group in four with signal, other prompts help more than more groups. A step without any such group generates
    more; 1,000 groups in a row without signal end the run."""
    group_deadline_s: Seconds | None = None
    """Close a group this many seconds after its first member finished. Stragglers are dropped with an event, and
    so is a group with fewer than two members left. The learner's turns on shared devices count."""
    partial_interval_s: Seconds = 1.0
    """Seconds between two writes of partial responses to a replica's journal. A crash of a replica loses the
    tokens since the last write."""

    @property
    def kv_tokens(self) -> int:
        """KV cache of one engine, in tokens."""
        return self.kv_capacity or self.max_batch * self.max_len

    @property
    def shares_prompts(self) -> bool:
        """True if samples share their prompt in the learner: where experts are recorded, prompts may part."""
        return Recording.ROUTED_EXPERTS not in self.record


def check_rollout(rollout: RolloutConfig, *, least_group: int) -> None:
    """Raise `ConfigError` for sampling that cannot be trained on, and for engines without room for a group.

    A group has at least `least_group` members.
    """
    _check_vocabulary(rollout)
    _check_sampling(rollout)
    _check_groups(rollout, least_group)


def _check_vocabulary(rollout: RolloutConfig) -> None:
    """Raise `ConfigError` for a cut vocabulary without recorded masks, or masks without a cut vocabulary."""
    sampling, recorded = rollout.sampling, Recording.SAMPLING_MASK in rollout.record
    if sampling.cuts_vocabulary and not recorded:
        raise ConfigError(
            f"rollout.sampling.top_k={sampling.top_k} top_p={sampling.top_p} min_p={sampling.min_p} cut the"
            " vocabulary, and the learner must know the remaining ids; add sampling_mask to rollout.record"
        )
    if recorded and not sampling.cuts_vocabulary:
        raise ConfigError(
            "rollout.record=sampling_mask: would record the whole vocabulary for each token; leave it out, or set"
            " rollout.sampling.top_k, top_p or min_p"
        )


def _check_sampling(rollout: RolloutConfig) -> None:
    """Raise `ConfigError` if samples cannot differ, or a trajectory of full length has no room."""
    sampling, max_len = rollout.sampling, rollout.max_len
    if sampling.temperature == 0:
        raise ConfigError(
            "rollout.sampling.temperature=0: all samples of a group are equal, without signal; set it above 0"
        )
    if sampling.max_new_tokens >= max_len:
        raise ConfigError(
            f"rollout.sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in"
            f" rollout.max_len={max_len}; raise max_len or lower max_new_tokens"
        )
    if rollout.kv_tokens < max_len:
        raise ConfigError(
            f"rollout.kv_capacity={rollout.kv_tokens} cannot hold one trajectory of rollout.max_len={max_len};"
            " raise kv_capacity"
        )


def _check_groups(rollout: RolloutConfig, least: int) -> None:
    """Raise `ConfigError` if a group has fewer than `least` members, or does not fit on one replica."""
    size = rollout.group_size
    if size < least:
        raise ConfigError(
            f"rollout.group_size={size}: a group of one has no advantages; set at least {least}, or set"
            " algorithm.name to ppo or reinforce_pp, which need no group"
        )
    for name, value in (("batch_per_replica", rollout.batch_per_replica), ("max_batch", rollout.max_batch)):
        if value < size:
            raise ConfigError(
                f"rollout.{name}={value} is below rollout.group_size={size}, and a group goes to one replica;"
                f" raise {name}"
            )


NO_PLANNER, DEFAULT_PLANNER = "none", "predictive"
PLANNERS: Registry[type] = Registry(  # classes of `repack.planner.Planner`, each made with a `PlanningContext`
    type,
    field="repack.planner",
    group="laminar_py.planners",
    built_in={
        "predictive": "laminar_py.repack.predictive:PredictivePlanner",
    },
)


class RepackConfig(Section):
    """Repacking of trajectories in flight: the last ones of a replica move to other replicas of its weight
    version, so that it can load new weights and start new prompts. Only with `rollout.on_new_weights=drain` and
    `schedule=async`."""

    planner: str | None = None
    """`paper`: Best-Fit; all trajectories of a source go to one destination. `predictive`: spread waiting
    trajectories, and empty the emptiest replicas: their trajectories go evenly to the others, by predicted
    remaining tokens and the cost of recomputing KV caches, and only if that saves time. Or a planner of an
    installed package. `none`: no moves. Default: `predictive` where moves are possible."""
    interval_s: Seconds = 5.0
    """Seconds between two rounds; another round follows every publish."""
    max_stall_s: Seconds = 5.0
    """`predictive`: longest prefill that one round may cost a destination, seconds. A source that cannot be
    emptied within it keeps its trajectories."""


def can_repack(schedule: Schedule, rollout: RolloutConfig) -> bool:
    """True for several draining replicas under `async`: only there a freed replica gets new prompts at once."""
    drains = rollout.on_new_weights is OnNewWeights.DRAIN and schedule is Schedule.ASYNC
    return drains and rollout.replicas > 1


def check_planner(repack: RepackConfig, schedule: Schedule, rollout: RolloutConfig) -> None:
    """Raise `ConfigError` for an unknown planner, or a planner that could never move a trajectory."""
    if repack.planner in (None, NO_PLANNER):
        return
    PLANNERS.get(repack.planner)
    if not can_repack(schedule, rollout):
        raise ConfigError(
            f"repack.planner={repack.planner} moves nothing under schedule={schedule},"
            f" rollout.on_new_weights={rollout.on_new_weights}, rollout.replicas={rollout.replicas}; it needs"
            " async, drain and two replicas, or set it to none"
        )
