"""Metrics: measurements of a learner step, the rows of `metrics.jsonl` and `fleet.jsonl`, progress of a learner.

The learner and the controller make these records, and `observe` reads them. docs/metrics.md explains every key.
"""

import math
from math import nan

import msgspec

from laminar_py.records.engine import DraftCounts
from laminar_py.records.proofs import StepProof


class TokenFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Means over trained tokens with their loss weights, e.g. `TokenFigures(entropy=1.2, ratio=1.01, ...)`.

    All are NaN without a trained token. A name that ends in `max` is a maximum. `kl_behaviour_k1` is KL(behaviour
    || new policy) in nats, by the estimator k1 on tokens of the behaviour policy. k1 may be negative, k3 never is.
    """

    entropy: float = nan
    ratio: float = nan  # of new to proximal probability
    ratio_deviation: float = nan  # |ratio - 1|
    ratio_max: float = nan
    clip_fraction: float = nan  # share of tokens whose ratio is outside the clip range
    importance_capped_fraction: float = nan  # share of tokens whose ratio is above the importance cap
    kl_behaviour_k1: float = nan  # from behaviour to new policy
    kl_behaviour_k3: float = nan
    kl_proximal_k1: float = nan  # from proximal to new policy
    kl_proximal_k3: float = nan
    kl_reference_k3: float = nan  # from new policy to reference model; 0 without a reference model
    effective_share: float = nan  # effective sample size of the weights new / behaviour, over the number of tokens
    advantage_mean: float = nan
    advantage_std: float = nan
    advantage_max: float = nan  # of |advantage|

    @property
    def figures(self) -> dict[str, float]:
        """Value by name, e.g. `{"entropy": 1.2, ...}`, without the fields of a subclass."""
        return {name: getattr(self, name) for name in TokenFigures.__struct_fields__}


class TokenMetrics(TokenFigures, frozen=True, kw_only=True):
    """Figures of a step's trained tokens or of one bucket of staleness, e.g. `TokenMetrics(num_tokens=80_000)`."""

    num_tokens: int = 0


class Mismatch(msgspec.Struct, frozen=True):
    """|new - behaviour| log-probability of tokens at staleness 0, in nats, e.g. `Mismatch(1e-6, 1e-5, 2e-4)`.

    The learner measures this before the step's first update, so it shows where engine and learner compute
    differently. If only some steps publish, the mismatch includes the policy's change since the last version. All
    are NaN without such tokens.
    """

    mean: float = nan
    p99: float = nan  # upper edge of the histogram bin, which is an eighth of a decade wide
    max: float = nan

    @property
    def figures(self) -> dict[str, float]:
        """Value by its name in `StepRow`, e.g. `{"mismatch_mean": 1e-6, ...}`."""
        return {f"mismatch_{name}": getattr(self, name) for name in self.__struct_fields__}


class Work(msgspec.Struct, frozen=True):
    """Computation of all ranks in a step, e.g. `Work(65536, 2.9e15, 7.9e15)`."""

    num_tokens: int = 0  # of prompts and responses, each counted once
    flops: float = 0.0  # model FLOPs, see `learner.metrics`
    peak_flops: float | None = None  # FLOPs per second of all ranks' devices; None: unknown


class CriticFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a critic in a step, over its trained tokens, e.g. `CriticFigures(value_loss=0.04, ...)`.

    A figure without anything to measure is NaN.
    """

    value_loss: float = nan  # mean over the updates that were not skipped
    value_mean: float = nan  # at the start of the step
    target_mean: float = nan
    explained_variance: float = nan  # 1 - variance of (target - value) over variance of the target, at the start
    clip_fraction: float = nan  # share of tokens whose value moved too far for a gradient, by loss weight
    grad_norm: float = nan  # before clipping; the largest of all updates
    learning_rate: float = nan  # of the last update that was not skipped
    skipped: int = 0  # updates with a loss or gradient that was not finite
    not_finite: int = 0  # tokens whose value is not finite
    elapsed_s: float = 0.0  # of the step: values and updates of the critic


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a learner step, e.g. `StepMetrics(loss=0.1, grad_norm=0.4, elapsed_s=2.5, updates=4)`.

    Loss, gradient norm and learning rate are NaN if the step trained no token: none had a weight, or every update
    was skipped.
    """

    loss: float
    grad_norm: float  # before clipping; the largest of all updates
    elapsed_s: float
    learning_rate: float = nan  # of the last update that was not skipped
    tokens: TokenMetrics = TokenMetrics()
    by_staleness: dict[str, TokenMetrics] = {}  # e.g. of tokens that are "3-4" steps old
    mismatch: Mismatch = Mismatch()
    updates: int = 1
    skipped: int = 0  # updates with a loss or gradient that was not finite; the other figures leave them out
    reference_s: float = 0.0  # part of `elapsed_s` that the reference model took
    work: Work = Work()
    critic: CriticFigures | None = None  # None: the algorithm has none
    proof: StepProof | None = None  # None of a learner that a backend brings

    @property
    def tokens_per_s(self) -> float:
        """Tokens of prompts and responses per second of the step; NaN for a step that took no time."""
        return self.work.num_tokens / self.elapsed_s if self.elapsed_s else nan

    @property
    def flops_per_s(self) -> float:
        """Model FLOPs per second of the step; NaN for a step that took no time."""
        return self.work.flops / self.elapsed_s if self.elapsed_s else nan

    @property
    def mfu(self) -> float | None:
        """Model FLOPs per second over the devices' peak; None if the peak is unknown."""
        peak = self.work.peak_flops
        return None if peak is None else self.flops_per_s / peak


class OrderFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of the problem order, e.g. `OrderFigures(open_levels=2, solved={"1": 0.9, "2": 0.2})`."""

    open_levels: int = 0  # order `curriculum`: number of open levels of all sources
    solved: dict[str, float] = {}  # order `curriculum`: level -> share of solved responses in its last groups
    resting: int = 0  # order `signal`: problems that come rarely, since their last group had no signal


class TurnFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Turns of trajectories, e.g. `TurnFigures(mean=2.4, environment_p50_s=0.1, environment_p95_s=0.8)`."""

    mean: float = 0.0  # turns of the model per trajectory; 0 without environments
    environment_p50_s: float = 0.0  # seconds that an environment worked for one trajectory
    environment_p95_s: float = 0.0


class ReplayFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Replayed trajectories of a step, e.g. `ReplayFigures(trajectories=9, staleness_mean=5.5)`."""

    trajectories: int = 0
    staleness_mean: float = 0.0  # learner steps since the oldest weights in each
    staleness_max: int = 0


class StepRow(TokenFigures, frozen=True, kw_only=True):
    """Line of `metrics.jsonl` for one step, e.g. `StepRow(step=9, version=9, rl_s=81.0, reward=0.4, ...)`.

    Rates are over the RL phase so far, and times are seconds of that phase. A figure without anything to measure
    is NaN: of a step that trained nothing, the inherited ones, `loss`, `grad_norm` and `learning_rate`. The
    inherited ones may also be NaN or infinite because the numbers are.
    """

    step: int
    version: int
    rl_s: float  # duration of the RL phase so far
    reward: float  # mean over trajectories scored since the last step; NaN without any
    reward_terms: dict[str, float] = {}  # mean of each term before its weight, of the same trajectories
    reward_std: float = nan  # standard deviation within a group, mean over groups closed since the last step
    frac_reward_zero_std: float = nan  # share of these groups whose rewards are all equal
    clipped_ratio: float = nan  # share of trajectories scored since the last step that a cap ended
    trajectories: int  # of this step, replayed ones included
    trained_tokens: int  # of responses, sum so far
    generated_tokens: int  # sum so far
    staleness_mean: float  # over the step's trajectories without replayed ones; NaN without any
    staleness_max: int | None = None  # None without any
    length_p50: int | None = None  # tokens of responses scored since the last step; None without any
    length_p95: int | None = None
    turns: TurnFigures = TurnFigures()  # of trajectories scored since the last step
    learner_s: float  # duration of the step in the learner
    learner_waiting_share: float  # share of time in which the learner had no batch
    learner_busy_s: float  # sum so far
    overlap_s: float  # part of `learner_busy_s` in which a replica was generating
    versions_alive: int  # weight versions of live trajectories
    kv_use: float = 0.0  # share of the replicas' KV caches in use, mean over the RL phase so far
    publish_stall_s: float = 0.0  # seconds that the learner waited for the publish of this step
    reference_busy_s: float = 0.0  # sum so far, of stages or (inside `learner_busy_s`) of the learner's own runs
    waited_s: float = 0.0  # until the learner had the batch of this step
    reference_s: float = 0.0  # part of `reference_busy_s` since the last step
    learner_tokens_per_s: float = nan  # of this step, prompts included
    learner_flops_per_s: float = nan  # model FLOPs of this step, per second
    mfu: float | None = None  # None: the devices' peak is unknown
    loss: float = nan
    grad_norm: float = nan
    learning_rate: float = nan
    mismatch_mean: float = nan
    mismatch_p99: float = nan
    mismatch_max: float = nan
    skipped: int = 0  # updates of this step with a loss or gradient that was not finite
    by_staleness: dict[str, TokenMetrics] = {}  # e.g. of tokens that are "3-4" steps old; empty: none was trained
    order: OrderFigures = OrderFigures()
    critic: CriticFigures | None = None  # None: the algorithm has none
    replay: ReplayFigures = ReplayFigures()
    drafts: DraftCounts = DraftCounts()  # since the last step
    draft_speedups: dict[int, float] = {}  # mean over replicas, by sequences as in `EngineStatus`

    @property
    def trained(self) -> bool:
        """Whether the step trained a token."""
        return not math.isnan(self.loss)

    @property
    def not_finite(self) -> list[str]:
        """Names of the learner's figures that are infinite or NaN although it trained tokens."""
        if not self.by_staleness:
            return []
        fresh = () if math.isnan(self.mismatch_mean) else Mismatch.__struct_fields__
        names = [*TokenFigures.__struct_fields__, *(f"mismatch_{name}" for name in fresh)]
        return [name for name in names if not math.isfinite(getattr(self, name))]


class FleetRow(msgspec.Struct, frozen=True, kw_only=True):
    """Line of `fleet.jsonl`, written at equal intervals: load of the replicas, e.g. of two:

    `FleetRow(rl_s=81.0, generated_tokens=640_000, kv_s=40.5, ranks=1, versions=[8, 9], running=[64, 60],
    waiting=[0, 3], ...)`. Sums are over the RL phase so far.
    """

    rl_s: float
    generated_tokens: int
    kv_s: float  # seconds times the mean share of KV caches in use
    ranks: int = 0  # of the learner; 0: as the config says
    replicas: list[int] = []  # [replicas] numbers of the replicas; empty: 0, 1, ...
    versions: list[int]  # [replicas]
    running: list[int]  # [replicas] trajectories
    waiting: list[int]  # [replicas] trajectories
    kv_use: list[float]  # [replicas] share of the KV cache in use
    cpu_use: float | None = None  # busy share of the cores that the controller may use, by all processes
    own_cpu_use: float | None = None  # share by the run's own processes
    cores: int = 0  # number of these cores; 0: unknown

    @property
    def indices(self) -> list[int]:
        """[replicas] numbers of the replicas."""
        return self.replicas or list(range(len(self.running)))


class LearnerStarted(msgspec.Struct, frozen=True, kw_only=True):
    """The learner is ready, e.g. `LearnerStarted(num_parameters=7_600_000_000, attention="sdpa",
    attention_share=1.3e-5)`."""

    num_parameters: int
    attention: str  # the attention kernel in use
    refused: tuple[str, ...] = ()  # attention kernels that failed their check, each with the reason
    attention_share: float  # FLOPs of two tokens in attention, over a token's other FLOPs
    steps_taken: int = 0  # by the checkpoint that was loaded
    fault: str = ""  # how a rank differs from that checkpoint; "" if none does
    gpus: str = ""  # of this rank, as CUDA_VISIBLE_DEVICES names them


class LearnerProgress(msgspec.Struct, frozen=True):
    """Progress of a starting learner, e.g. `LearnerProgress("warm start", 120, 500, 0.41)`."""

    phase: str
    done: int
    total: int
    loss: float


class RankPosition(msgspec.Struct, frozen=True):
    """Position of a learner's rank, e.g. `RankPosition("microbatch 3 of 8 of step 12", 600.0, 41, 1204)`."""

    activity: str
    limit_s: float  # seconds in this activity after which the rank counts as hung if other ranks wait for it
    num_activities: int  # begun so far, with this one
    collectives: int  # entered so far
