"""What the live view, `metrics.jsonl` and `summary.json` show. Fed by the controller; decides nothing.

All durations are this host's monotonic clock. Distributions are counters over bounded integers, so memory does
not grow with the run.
"""

import asyncio
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from laminar_py.records.metrics import StepMetrics
from laminar_py.records.protocols import Clock
from laminar_py.records.replica import ReplicaReport
from laminar_py.records.trajectory import Trajectory


@dataclass(slots=True, kw_only=True)
class ReplicaActivity:
    """The last that was heard of a replica."""

    version: int = -1
    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_capacity: int = 1
    seen_s: float = 0.0

    @property
    def kv_use(self) -> float:
        """Share of its KV cache."""
        return self.kv_used / self.kv_capacity


@dataclass(slots=True, kw_only=True)
class StepRow:
    """One line of `metrics.jsonl`. Rates are over the whole RL phase so far, times in seconds of it."""

    step: int
    version: int
    rl_s: float
    reward: float  # mean over all trajectories scored since the last step; as before, if there were none
    trajectories: int
    trained_tokens: int
    generated_tokens: int
    staleness_mean: float
    staleness_max: int
    length_p50: int
    length_p95: int
    learner_s: float
    learner_waiting_share: float
    learner_busy_s: float  # sum so far
    overlap_s: float  # of it, while some replica was generating
    versions_alive: int
    kv_use: float = 0.0  # share of the replicas' KV caches, mean over the RL phase so far
    publish_stall_s: float = 0.0
    reference_busy_s: float = 0.0  # sum so far, of a stage or, inside `learner_busy_s`, of the learner's own pass
    waited_s: float = 0.0  # of this step: until the learner had its batch
    reference_s: float = 0.0  # of `reference_busy_s`, since the step before
    learner_tokens_per_s: float = 0.0  # of this step, prompts too
    learner_flops_per_s: float = 0.0
    mfu: float | None = None
    loss: float = 0.0  # this and what follows: as in `types.StepMetrics` and `types.TokenMetrics`
    grad_norm: float = 0.0
    entropy: float = 0.0
    ratio: float = 1.0
    ratio_deviation: float = 0.0
    ratio_max: float = 0.0
    clip_fraction: float = 0.0
    truncated_fraction: float = 0.0
    kl_behaviour_k1: float = 0.0
    kl_behaviour_k3: float = 0.0
    kl_proximal_k1: float = 0.0
    kl_proximal_k3: float = 0.0
    kl_reference_k3: float = 0.0
    effective_share: float = 1.0
    advantage_mean: float = 0.0
    advantage_std: float = 0.0
    advantage_max: float = 0.0
    mismatch_mean: float = 0.0
    mismatch_p99: float = 0.0
    mismatch_max: float = 0.0
    skipped: int = 0
    by_staleness: dict[str, dict[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRow:
    """One line of `fleet.jsonl`, one a second: what the replicas do. Sums are over the RL phase so far."""

    rl_s: float
    generated_tokens: int
    kv_s: float  # seconds times the mean share of KV caches in use
    versions: list[int]  # [replicas], as all that follow
    running: list[int]
    waiting: list[int]
    kv_use: list[float]


class Intervals:
    """Total time in which something was going on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._total = 0.0
        self._since: float | None = None

    def set(self, on: bool) -> None:
        """It goes on from now, or no longer."""
        now = self._clock.now()
        if on and self._since is None:
            self._since = now
        elif not on and self._since is not None:
            self._total += now - self._since
            self._since = None

    @property
    def on(self) -> bool:
        """Whether it goes on."""
        return self._since is not None

    @property
    def total_s(self) -> float:
        """Seconds so far."""
        return self._total + (0.0 if self._since is None else self._clock.now() - self._since)


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the RL phase; a resumed run starts from those of the step it goes on from."""

    rl_s: float = 0.0
    trained_tokens: int = 0
    generated_tokens: int = 0
    learner_busy_s: float = 0.0
    overlap_s: float = 0.0
    reference_busy_s: float = 0.0
    kv_s: float = 0.0  # seconds of RL times the share of KV caches in use
    staleness: Counter[int] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    versions_alive_max: int = 0


class Stats:
    """Counters of one incarnation."""

    def __init__(self, clock: Clock, *, replicas: int, totals: Totals) -> None:
        self.totals = totals
        self._generated_before = totals.generated_tokens
        self.replicas = [ReplicaActivity() for _ in range(replicas)]
        self.peak_memory_bytes = 0
        self.next_report = asyncio.Event()
        self._clock = clock
        self._rl = Intervals(clock)
        self._generating = Intervals(clock)
        self._rewards: list[float] = []
        self._reward = 0.0  # mean of those before the last step
        self._step_began: tuple[float, float] | None = None
        self._free_rl_s = totals.rl_s  # when the learner was done with the step before
        self._got_rl_s: float | None = None  # when it got a batch for this one
        self._referred_s = totals.reference_busy_s  # up to the step before

    # ---- fed by the controller

    def rl_phase(self, on: bool) -> None:
        """The RL phase goes on, or pauses for an evaluation off its clock."""
        self._rl.set(on)

    def generating(self, on: bool) -> None:
        """Whether any replica has work."""
        self._generating.set(on)

    def on_report(self, report: ReplicaReport) -> None:
        """A replica's state."""
        activity, status, now = self.replicas[report.replica], report.status, self._clock.now()
        if self._rl.on:
            self.totals.kv_s += activity.kv_use * (now - activity.seen_s) / len(self.replicas)
        activity.seen_s = now
        activity.version, activity.running, activity.waiting = status.version, status.running, status.waiting
        activity.kv_used, activity.kv_capacity = status.kv_used, status.kv_capacity
        self.next_report.set()

    def scored(self, reward: float, length: int) -> None:
        """A training trajectory has its reward."""
        self._rewards.append(reward)
        self.totals.lengths[length] += 1

    def referred(self, busy_s: float) -> None:
        """The reference model was busy for so long."""
        self.totals.reference_busy_s += busy_s

    def step_begins(self) -> None:
        """The learner has its batch."""
        self._step_began = self._clock.now(), self._generating.total_s
        self._got_rl_s = self.rl_s

    def step_ends(self) -> None:
        """The learner is done with it, or died."""
        assert self._step_began is not None, "a step ends that did not begin"
        began, generating = self._step_began
        self.totals.learner_busy_s += self._clock.now() - began
        self.totals.overlap_s += self._generating.total_s - generating
        self._step_began = None

    def row(
        self,
        *,
        step: int,
        version: int,
        batch: list[Trajectory],
        metrics: StepMetrics | None,
        generated_tokens: int,
        versions_alive: int,
        stall_s: float,
    ) -> StepRow:
        """The line of a committed step."""
        totals = self.totals
        staleness = [trajectory.staleness(version) for trajectory in batch]
        totals.staleness.update(staleness)
        totals.trained_tokens += sum(len(trajectory.response_ids) for trajectory in batch)
        totals.generated_tokens = self._generated_before + generated_tokens
        totals.versions_alive_max = max(totals.versions_alive_max, versions_alive)
        totals.reference_busy_s += metrics.reference_s if metrics else 0.0
        got, now = self._got_rl_s, self.rl_s
        waited_s = (now if got is None else got) - self._free_rl_s
        reference_s = totals.reference_busy_s - self._referred_s
        self._free_rl_s, self._got_rl_s, self._referred_s = now, None, totals.reference_busy_s
        rewards, self._rewards = self._rewards, []
        if rewards:
            self._reward = math.fsum(rewards) / len(rewards)  # whatever came first
        row = StepRow(
            step=step,
            version=version,
            rl_s=now,
            reward=self._reward,
            trajectories=len(batch),
            trained_tokens=totals.trained_tokens,
            generated_tokens=totals.generated_tokens,
            staleness_mean=sum(staleness) / len(staleness) if staleness else 0.0,
            staleness_max=max(staleness, default=0),
            length_p50=quantile(totals.lengths, 0.50),
            length_p95=quantile(totals.lengths, 0.95),
            learner_s=metrics.elapsed_s if metrics else 0.0,
            learner_waiting_share=self.learner_waiting_share,
            learner_busy_s=totals.learner_busy_s,
            overlap_s=totals.overlap_s,
            versions_alive=versions_alive,
            kv_use=self.kv_use,
            publish_stall_s=stall_s,
            reference_busy_s=totals.reference_busy_s,
            waited_s=waited_s,
            reference_s=reference_s,
        )
        if metrics is not None:
            row.loss, row.grad_norm = metrics.loss, metrics.grad_norm
            row.skipped, mismatch = metrics.skipped, metrics.mismatch
            row.learner_tokens_per_s, row.learner_flops_per_s = metrics.tokens_per_s, metrics.flops_per_s
            row.mfu = metrics.mfu
            row.mismatch_mean, row.mismatch_p99, row.mismatch_max = mismatch.mean, mismatch.p99, mismatch.max
            row.by_staleness = {name: msgspec.structs.asdict(one) for name, one in metrics.by_staleness.items()}
            for name, value in msgspec.structs.asdict(metrics.tokens).items():
                if name != "num_tokens":  # `trained_tokens` counts
                    setattr(row, name, value)
        return row

    def fleet(self, generated_tokens: int) -> FleetRow:
        """What the replicas do now."""
        replicas = self.replicas
        return FleetRow(
            rl_s=round(self.rl_s, 3),
            generated_tokens=self._generated_before + generated_tokens,
            kv_s=round(self.totals.kv_s, 4),
            versions=[replica.version for replica in replicas],
            running=[replica.running for replica in replicas],
            waiting=[replica.waiting for replica in replicas],
            kv_use=[round(replica.kv_use, 4) for replica in replicas],
        )

    # ---- derived

    @property
    def rl_s(self) -> float:
        """Seconds of RL, earlier incarnations included."""
        return self.totals.rl_s + self._rl.total_s

    @property
    def in_rl(self) -> bool:
        """Whether the RL phase goes on."""
        return self._rl.on

    @property
    def kv_use(self) -> float:
        """Mean share of the replicas' KV caches that was in use in the RL phase."""
        return self.totals.kv_s / self.rl_s if self.rl_s else 0.0

    @property
    def learner_waiting_share(self) -> float:
        """Share of the RL phase in which the learner had no batch."""
        return max(0.0, 1.0 - self.totals.learner_busy_s / self.rl_s) if self.rl_s else 0.0

    @property
    def overlap_share(self) -> float:
        """Share of the learner's busy time in which some replica was generating."""
        busy = self.totals.learner_busy_s
        return self.totals.overlap_s / busy if busy else 0.0


def read_totals(metrics: Path, step: int) -> Totals:
    """Sums of a run that goes on from `step`. What was trained after it is undone; the time has passed."""
    totals = Totals()
    for line in metrics.read_text().splitlines() if metrics.is_file() else []:
        row = msgspec.json.decode(line, type=StepRow)
        totals.rl_s, totals.generated_tokens = row.rl_s, row.generated_tokens
        totals.learner_busy_s, totals.overlap_s = row.learner_busy_s, row.overlap_s
        totals.reference_busy_s = row.reference_busy_s
        totals.kv_s = row.kv_use * row.rl_s
        totals.versions_alive_max = max(totals.versions_alive_max, row.versions_alive)
        if row.step <= step:
            totals.trained_tokens = row.trained_tokens
    return totals


def quantile(counts: Counter[int], q: float) -> int:
    """The smallest value with at least a share q of the counts at or below it; 0 without counts."""
    target, seen = q * counts.total(), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= target:
            return value
    return 0
