"""Metrics: what a learner step measured, the rows of `metrics.jsonl` and `fleet.jsonl`, a learner's progress.

Made by the learner and by telemetry, read by telemetry and analytics; docs/metrics.md explains every key.
"""

import math

import msgspec


class TokenFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Means over trained tokens with their loss weights, and maxima where the name says so.

    KL in nats, from the policy named first, on tokens of the behaviour policy, by estimators k1 (may be negative)
    and k3 (never is).
    """

    entropy: float = 0.0
    ratio: float = 1.0  # of new to proximal probability
    ratio_deviation: float = 0.0  # |ratio - 1|
    ratio_max: float = 0.0  # the largest of any token
    clip_fraction: float = 0.0  # whose ratio is outside the clip range
    truncated_fraction: float = 0.0  # whose ratio is above the importance cap
    kl_behaviour_k1: float = 0.0  # behaviour to new policy
    kl_behaviour_k3: float = 0.0
    kl_proximal_k1: float = 0.0  # proximal to new policy
    kl_proximal_k3: float = 0.0
    kl_reference_k3: float = 0.0  # new policy to reference model; 0 without one
    effective_share: float = 1.0  # effective sample size of the weights new / behaviour, of the tokens
    advantage_mean: float = 0.0
    advantage_std: float = 0.0
    advantage_max: float = 0.0  # the largest |advantage| of any token

    @property
    def figures(self) -> dict[str, float]:
        """Each figure under its name, e.g. `{"entropy": 1.2, ...}`, without what a subclass adds."""
        return {name: getattr(self, name) for name in TokenFigures.__struct_fields__}


class TokenMetrics(TokenFigures, frozen=True, kw_only=True):
    """Figures of a step's trained tokens, or of those of a bucket of staleness."""

    num_tokens: int = 0


class Mismatch(msgspec.Struct, frozen=True):
    """|new - behaviour| log-probability of tokens at staleness 0 before the step's first update, in nats.

    Shows what engine and learner compute differently; where not every step publishes, also what the policy has
    moved since the last published one.
    """

    mean: float = 0.0
    p99: float = 0.0  # upper edge of its bin, an eighth of a decade
    max: float = 0.0

    @property
    def figures(self) -> dict[str, float]:
        """Each figure under its name in a step's row, e.g. `{"mismatch_mean": 1e-6, ...}`."""
        return {f"mismatch_{name}": getattr(self, name) for name in self.__struct_fields__}


class Work(msgspec.Struct, frozen=True):
    """Computation of all ranks in a step, e.g. `Work(65536, 2.9e15, 7.9e15)`."""

    num_tokens: int = 0  # of prompts and responses, each counted once
    flops: float = 0.0  # model FLOPs, see `learner.metrics`
    peak_flops: float | None = None  # per second, of their devices together; None where that is not known


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a learner step."""

    loss: float
    grad_norm: float
    elapsed_s: float
    tokens: TokenMetrics = TokenMetrics()
    by_staleness: dict[str, TokenMetrics] = {}  # e.g. of tokens that are "3-4" steps old
    mismatch: Mismatch = Mismatch()
    updates: int = 1
    skipped: int = 0  # of the updates, whose loss or gradient was not finite; all else is of the others
    reference_s: float = 0.0  # of `elapsed_s`, in the reference model
    work: Work = Work()

    @property
    def tokens_per_s(self) -> float:
        """Tokens of the step, prompts too, over its seconds."""
        return self.work.num_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def flops_per_s(self) -> float:
        """Model FLOPs over its seconds."""
        return self.work.flops / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def mfu(self) -> float | None:
        """Share of the peak of its devices; None where that is not known."""
        peak = self.work.peak_flops
        return None if peak is None else self.flops_per_s / peak


class OrderFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of the order of problems, e.g. `OrderFigures(open_levels=2, solved={"1": 0.9, "2": 0.2})`."""

    open_levels: int = 0  # under `curriculum`, of all sources together
    solved: dict[str, float] = {}  # share of solved responses by level, in its last groups
    resting: int = 0  # problems whose last group had no signal, which come rarely; under `signal`


class TurnFigures(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Turns of trajectories, and seconds that the environment of each worked; nothing without environments.

    E.g. `TurnFigures(mean=2.4, environment_p50_s=0.1, environment_p95_s=0.8)`.
    """

    mean: float = 0.0  # turns of the model
    environment_p50_s: float = 0.0
    environment_p95_s: float = 0.0


class StepRow(TokenFigures, frozen=True, kw_only=True):
    """Line of `metrics.jsonl`. Rates are over the whole RL phase so far, times in seconds of it.

    Figures of tokens may be NaN or infinite; `loss` and `grad_norm` never are.
    """

    step: int
    version: int
    rl_s: float
    reward: float  # mean over all trajectories scored since the last step; as before, if there were none
    reward_terms: dict[str, float] = {}  # mean of each before its weight, where there are several
    trajectories: int
    trained_tokens: int  # of responses, sum so far
    generated_tokens: int  # sum so far
    staleness_mean: float
    staleness_max: int
    length_p50: int  # tokens of the responses that were scored since the step before
    length_p95: int
    turns: TurnFigures = TurnFigures()  # of the trajectories that were scored since the step before
    learner_s: float
    learner_waiting_share: float
    learner_busy_s: float  # sum so far
    overlap_s: float  # of `learner_busy_s`, while some replica was generating
    versions_alive: int
    kv_use: float = 0.0  # share of the replicas' KV caches, mean over the RL phase so far
    publish_stall_s: float = 0.0
    reference_busy_s: float = 0.0  # sum so far, of a stage or, inside `learner_busy_s`, of the learner's own pass
    waited_s: float = 0.0  # of this step: until the learner had its batch
    reference_s: float = 0.0  # of `reference_busy_s`, since the step before
    learner_tokens_per_s: float = 0.0  # of this step, prompts too
    learner_flops_per_s: float = 0.0
    mfu: float | None = None
    loss: float = 0.0
    grad_norm: float = 0.0
    mismatch_mean: float = 0.0
    mismatch_p99: float = 0.0
    mismatch_max: float = 0.0
    skipped: int = 0
    by_staleness: dict[str, TokenMetrics] = {}  # e.g. of tokens that are "3-4" steps old
    order: OrderFigures = OrderFigures()

    @property
    def not_finite(self) -> list[str]:
        """Names of the numbers that are infinite or NaN."""
        values = msgspec.structs.asdict(self).items()
        return [name for name, value in values if isinstance(value, float) and not math.isfinite(value)]


class FleetRow(msgspec.Struct, frozen=True, kw_only=True):
    """Line of `fleet.jsonl`, one a second: what the replicas do. Sums are over the RL phase so far."""

    rl_s: float
    generated_tokens: int
    kv_s: float  # seconds times the mean share of KV caches in use
    replicas: list[int] = []  # [replicas] those that are there, in the order of what follows; empty: 0, 1, ...
    versions: list[int]  # [replicas], as all that follow
    running: list[int]
    waiting: list[int]
    kv_use: list[float]
    cpu_use: float | None = None  # share of the cores that the controller may use, whoever keeps them busy
    own_cpu_use: float | None = None  # of that the run's own processes
    cores: int = 0  # number of these; 0: not on record

    @property
    def indices(self) -> list[int]:
        """Numbers of the replicas [replicas]."""
        return self.replicas or list(range(len(self.running)))


class LearnerProgress(msgspec.Struct, frozen=True):
    """Progress of a starting learner, e.g. `LearnerProgress("warm start", 120, 500, 0.41)`."""

    phase: str
    done: int
    total: int
    loss: float
