"""What a learner step measured, and how far a starting learner is."""

import msgspec


class TokenMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What a step did to trained tokens: means with their loss weights, but for the counts named so.

    KL in nats, from the policy named first, on tokens of the behaviour policy, by estimators k1 (may be negative)
    and k3 (never is).
    """

    num_tokens: int = 0
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


class Mismatch(msgspec.Struct, frozen=True):
    """|new - behaviour| log-probability of tokens at staleness 0 before the step's first update, in nats.

    It is what engine and learner compute differently; where not every step publishes, also what the policy has
    moved since it did.
    """

    mean: float = 0.0
    p99: float = 0.0  # upper edge of its bin, an eighth of a decade
    max: float = 0.0


class Work(msgspec.Struct, frozen=True):
    """What all ranks computed in a step, e.g. `Work(65536, 2.9e15, 7.9e15)`."""

    num_tokens: int = 0  # of prompts and responses, each counted once
    flops: float = 0.0  # model FLOPs, see `learner.flops`
    peak_flops: float | None = None  # per second, of their devices together; None where that is not known


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one learner step measured."""

    loss: float
    grad_norm: float
    elapsed_s: float
    tokens: TokenMetrics = TokenMetrics()
    by_staleness: dict[str, TokenMetrics] = {}  # e.g. of tokens that are "3-4" versions old
    mismatch: Mismatch = Mismatch()
    updates: int = 1
    skipped: int = 0  # of the updates, whose gradient was not finite; losses, norms and tokens are of the others
    reference_s: float = 0.0  # of `elapsed_s`, in the reference model
    work: Work = Work()

    @property
    def tokens_per_s(self) -> float:
        """All tokens of the step, prompts too, over its seconds."""
        return self.work.num_tokens / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def flops_per_s(self) -> float:
        """Model FLOPs over its seconds."""
        return self.work.flops / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def mfu(self) -> float | None:
        """Share of what the devices could compute; None where that is not known."""
        peak = self.work.peak_flops
        return None if peak is None else self.flops_per_s / peak


class LearnerProgress(msgspec.Struct, frozen=True):
    """What a starting learner is doing, e.g. `LearnerProgress("warm start", 120, 500, 0.41)`."""

    phase: str
    done: int
    total: int
    loss: float
