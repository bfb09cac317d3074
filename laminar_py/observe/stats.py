"""Counters behind the live view, `metrics.jsonl` and `summary.json`, fed by the controller.

No decision depends on them. Durations are by this host's monotonic clock. Distributions are counters over bounded
integers, so memory does not grow with the run.
"""

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from laminar_py.ledger.row_files import read_rows
from laminar_py.records.engine import DraftCounts
from laminar_py.records.host import Clock
from laminar_py.records.metrics import FleetRow, ReplayFigures, StepMetrics, StepRow, TurnFigures
from laminar_py.records.replica import ReplicaReport
from laminar_py.records.scoring import GroupRewards, TermValue
from laminar_py.records.spans import num_sampled
from laminar_py.records.trajectory import TrajectoryRef

log = logging.getLogger(__name__)

NOTHING_LEARNED = StepMetrics(loss=math.nan, grad_norm=math.nan, elapsed_s=0.0)


@dataclass(slots=True, kw_only=True)
class ReplicaActivity:
    """Load and version in the last report of a replica; version -1 before the first report."""

    version: int = -1
    running: int = 0
    waiting: int = 0
    kv_used: int = 0  # tokens in its KV cache
    kv_capacity: int = 1  # tokens
    drafts: DraftCounts = field(default_factory=DraftCounts)  # of its engine since it started
    speedups: dict[int, float] = field(default_factory=dict)  # as in `EngineStatus`
    seen_s: float = 0.0  # when the report came

    @property
    def kv_use(self) -> float:
        """Share of the replica's KV cache in use."""
        return self.kv_used / self.kv_capacity


class Intervals:
    """Measures the total time in which a state, e.g. the RL phase, is on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._total = 0.0
        self._since: float | None = None

    def set(self, on: bool) -> None:
        """Switch the state on or off now; without a change nothing happens."""
        now = self._clock.now()
        if on and self._since is None:
            self._since = now
        elif not on and self._since is not None:
            self._total += now - self._since
            self._since = None

    @property
    def on(self) -> bool:
        """Whether the state is on now."""
        return self._since is not None

    @property
    def total_s(self) -> float:
        """Seconds in which the state was on, the present interval included."""
        return self._total + (0.0 if self._since is None else self._clock.now() - self._since)


@dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over the RL phase; a resumed run starts with the sums of earlier controllers."""

    rl_s: float = 0.0
    trained_tokens: int = 0
    generated_tokens: int = 0
    learner_busy_s: float = 0.0
    overlap_s: float = 0.0
    reference_busy_s: float = 0.0
    kv_s: float = 0.0  # seconds of RL times the share of KV caches in use
    versions_alive_max: int = 0


class Stats:
    """The counters of one controller."""

    def __init__(self, clock: Clock, *, replicas: int, totals: Totals, ranks: int = 0) -> None:
        self.totals = totals
        self.ranks = ranks  # of the learner
        self._earlier_generated_tokens = totals.generated_tokens
        self.replicas = {index: ReplicaActivity() for index in range(replicas)}  # also starting ones
        self.peak_memory_bytes = 0
        self.next_report = asyncio.Event()
        self._clock = clock
        self._rl = Intervals(clock)
        self._generating = Intervals(clock)
        self._rewards: list[float] = []
        self._terms: dict[str, list[float]] = {}  # values by term
        self._deviations: list[float] = []  # standard deviations of groups since the last step
        self._cuts: list[bool] = []  # whether a cap ended it, of each response scored since the last step
        self._not_finite = set[str]()  # metrics with a logged warning
        self._lengths = Counter[int]()  # response lengths since the last step
        self._drafts = DraftCounts()  # since the last step
        self._turns: list[tuple[int, float]] = []  # (turns, seconds of environment) since the last step
        self._step_began: tuple[float, float] | None = None
        self._learner_free_rl_s = totals.rl_s  # RL time when the previous step was committed
        self._batch_rl_s: float | None = None  # RL time when the learner got its batch; None before
        self._reference_s = totals.reference_busy_s  # the total when the previous step was committed

    # ---- fed by the controller

    def set_rl_phase(self, on: bool) -> None:
        """Start or stop the clock of the RL phase, which excludes evaluations before and after RL."""
        self._rl.set(on)

    def set_generating(self, on: bool) -> None:
        """Note whether any replica has work."""
        self._generating.set(on)

    def add_replica(self, replica: int) -> None:
        """Add a replica whose process starts; keep the figures of a known replica."""
        self.replicas.setdefault(replica, ReplicaActivity(seen_s=self._clock.now()))

    def remove_replica(self, replica: int) -> None:
        """Remove a replica that left the fleet."""
        self.replicas.pop(replica, None)

    def on_report(self, report: ReplicaReport) -> None:
        """Take load and version from a replica's report, add to the KV time, and set `next_report`."""
        activity, status, now = self.replicas[report.replica], report.status, self._clock.now()
        if self._rl.on:
            self.totals.kv_s += activity.kv_use * (now - activity.seen_s) / len(self.replicas)
        activity.seen_s = now
        activity.version, activity.running, activity.waiting = status.version, status.running, status.waiting
        activity.kv_used, activity.kv_capacity = status.kv_used, status.kv_capacity
        self._drafts = self._drafts.plus(status.drafts.since(activity.drafts))
        activity.drafts, activity.speedups = status.drafts, status.speedups
        self.next_report.set()

    def add_score(self, reward: float, terms: Sequence[TermValue], length: int, *, cut: bool) -> None:
        """Note reward, terms and length in tokens of a training response, and whether a cap `cut` it."""
        self._rewards.append(reward)
        self._cuts.append(cut)
        for term in terms:
            self._terms.setdefault(term.name, []).append(term.value)
        self._lengths[length] += 1

    def add_group(self, group: GroupRewards) -> None:
        """Note the rewards of a training group that closed, for the next row."""
        self._deviations.append(_deviation(group.rewards))

    def add_turns(self, turns: int, environment_s: float) -> None:
        """Note how many turns a scored training trajectory had, and its seconds in the environment."""
        self._turns.append((turns, environment_s))

    def add_reference_time(self, busy_s: float) -> None:
        """Add busy seconds of the reference model or the teacher."""
        self.totals.reference_busy_s += busy_s

    def begin_step(self) -> None:
        """Note that the learner got its batch."""
        self._step_began = self._clock.now(), self._generating.total_s
        self._batch_rl_s = self.rl_s

    def end_step(self) -> None:
        """Note that the learner finished its step, or crashed."""
        assert self._step_began is not None, "the step did not begin"
        began, generating = self._step_began
        self.totals.learner_busy_s += self._clock.now() - began
        self.totals.overlap_s += self._generating.total_s - generating
        self._step_began = None

    def step_row(
        self,
        *,
        step: int,
        version: int,
        batch: list[TrajectoryRef],
        staleness: list[int],
        metrics: StepMetrics | None,
        generated_tokens: int,
        versions_alive: int,
        stall_s: float,
    ) -> StepRow:
        """Return the row of a committed step, and begin the figures of the next step."""
        learned, totals, now = metrics or NOTHING_LEARNED, self.totals, self.rl_s
        closed = self._close_step(now, batch, learned)
        row = StepRow(
            step=step,
            version=version,
            rl_s=now,
            trajectories=len(batch),
            trained_tokens=totals.trained_tokens,
            generated_tokens=self._earlier_generated_tokens + generated_tokens,
            staleness_mean=sum(staleness) / len(staleness) if staleness else math.nan,
            staleness_max=max(staleness, default=None),
            length_p50=quantile(self._lengths, 0.50) if self._lengths else None,
            length_p95=quantile(self._lengths, 0.95) if self._lengths else None,
            turns=turn_figures(self._turns),
            learner_s=learned.elapsed_s,
            learner_waiting_share=self.learner_waiting_share,
            learner_busy_s=totals.learner_busy_s,
            overlap_s=totals.overlap_s,
            versions_alive=versions_alive,
            kv_use=self.kv_use,
            publish_stall_s=stall_s,
            reference_busy_s=totals.reference_busy_s,
            learner_tokens_per_s=learned.tokens_per_s,
            learner_flops_per_s=learned.flops_per_s,
            mfu=learned.mfu,
            loss=learned.loss,
            grad_norm=learned.grad_norm,
            learning_rate=learned.learning_rate,
            skipped=learned.skipped,
            by_staleness=learned.by_staleness,
            critic=learned.critic,
            drafts=self._drafts,
            draft_speedups=self.draft_speedups,
            **(closed | self._reward_figures() | learned.mismatch.figures | learned.tokens.figures),
        )
        return self._record_row(row)

    def _record_row(self, row: StepRow) -> StepRow:
        """Update the totals from a row and return the row; log the first time that a metric is not finite."""
        self._rewards, self._terms, self._cuts, self._deviations, self._turns = [], {}, [], [], []
        self._lengths.clear()
        self._drafts = DraftCounts()
        self.totals.generated_tokens = row.generated_tokens
        self.totals.versions_alive_max = max(self.totals.versions_alive_max, row.versions_alive)
        if names := [name for name in row.not_finite if name not in self._not_finite]:
            self._not_finite.update(names)
            log.warning("step %d: not finite, so null in metrics.jsonl: %s", row.step, ", ".join(names))
        return row

    def _close_step(self, now: float, batch: Sequence[TrajectoryRef], learned: StepMetrics) -> dict[str, float]:
        """End the step's figures at RL time `now`, with its `batch`; return its seconds of wait and reference."""
        self.totals.trained_tokens += sum(num_sampled(trajectory.spans) for trajectory in batch)
        self.totals.reference_busy_s += learned.reference_s
        began = self._batch_rl_s
        waited_s = (now if began is None else began) - self._learner_free_rl_s
        reference_s = self.totals.reference_busy_s - self._reference_s
        self._learner_free_rl_s, self._batch_rl_s, self._reference_s = now, None, self.totals.reference_busy_s
        return {"waited_s": waited_s, "reference_s": reference_s}

    def _reward_figures(self) -> dict[str, Any]:
        """Return the figures of rewards since the previous step, NaN without any."""
        return {
            "reward": _mean(self._rewards),
            "reward_std": _mean(self._deviations),
            "frac_reward_zero_std": _mean([deviation == 0.0 for deviation in self._deviations]),
            "clipped_ratio": _mean(self._cuts),
            "reward_terms": {name: _mean(values) for name, values in self._terms.items()},
        }

    def fleet_row(
        self, generated_tokens: int, *, cpu_use: float | None, own_cpu_use: float | None, cores: int
    ) -> FleetRow:
        """Return the present row of `fleet.jsonl`.

        `cpu_use` and the run's `own_cpu_use` are shares of this host's `cores`, None if unknown.
        """
        indices, replicas = list(self.replicas), self.replicas.values()
        return FleetRow(
            rl_s=round(self.rl_s, 3),
            generated_tokens=self._earlier_generated_tokens + generated_tokens,
            kv_s=round(self.totals.kv_s, 4),
            ranks=self.ranks,
            replicas=indices,
            versions=[replica.version for replica in replicas],
            running=[replica.running for replica in replicas],
            waiting=[replica.waiting for replica in replicas],
            kv_use=[round(replica.kv_use, 4) for replica in replicas],
            cpu_use=None if cpu_use is None else round(cpu_use, 4),
            own_cpu_use=None if own_cpu_use is None else round(own_cpu_use, 4),
            cores=cores,
        )

    # ---- derived

    @property
    def rl_s(self) -> float:
        """Seconds of the RL phase so far, under this and earlier controllers."""
        return self.totals.rl_s + self._rl.total_s

    @property
    def in_rl(self) -> bool:
        """Whether the RL phase is on."""
        return self._rl.on

    @property
    def learner_idle_s(self) -> float | None:
        """Seconds of RL since the learner finished its last batch; None while it has a batch."""
        return None if self._step_began is not None else self.rl_s - self._learner_free_rl_s

    def generated_in_step(self, generated_tokens: int) -> int:
        """Return the tokens since the last step's commit, of this controller's `generated_tokens`."""
        return self._earlier_generated_tokens + generated_tokens - self.totals.generated_tokens

    @property
    def since_step_s(self) -> float:
        """Seconds of RL since the last step's commit."""
        return self.rl_s - self._learner_free_rl_s

    @property
    def learner_step_s(self) -> float | None:
        """Seconds since the learner got its present batch; None without one."""
        return None if self._step_began is None else self._clock.now() - self._step_began[0]

    @property
    def kv_use(self) -> float:
        """Mean share of the replicas' KV caches in use over the RL phase."""
        return self.totals.kv_s / self.rl_s if self.rl_s else 0.0

    @property
    def draft_speedups(self) -> dict[int, float]:
        """Mean over replicas of the speed-up by drafts, by the sequences of a step as in `EngineStatus`."""
        found = [replica.speedups for replica in self.replicas.values()]
        sizes = sorted(set[int]().union(*found))
        return {size: round(_mean([one[size] for one in found if size in one]), 3) for size in sizes}

    @property
    def learner_waiting_share(self) -> float:
        """Share of the RL phase in which the learner waited for a batch."""
        return max(0.0, 1.0 - self.totals.learner_busy_s / self.rl_s) if self.rl_s else 0.0

    @property
    def overlap_share(self) -> float:
        """Share of the learner's busy time in which some replica generated."""
        busy = self.totals.learner_busy_s
        return self.totals.overlap_s / busy if busy else 0.0


def read_totals(metrics: Path, step: int) -> Totals:
    """Return the sums of a run that resumes from `step`, from the rows of the file `metrics`."""
    totals = Totals()
    for row in read_rows(metrics, StepRow):
        totals.rl_s, totals.generated_tokens = row.rl_s, row.generated_tokens
        totals.learner_busy_s, totals.overlap_s = row.learner_busy_s, row.overlap_s
        totals.reference_busy_s = row.reference_busy_s
        totals.kv_s = row.kv_use * row.rl_s
        totals.versions_alive_max = max(totals.versions_alive_max, row.versions_alive)
        if row.step <= step:
            totals.trained_tokens = row.trained_tokens
    return totals


def turn_figures(found: Sequence[tuple[int, float]]) -> TurnFigures:
    """Return mean turns and environment times from (turns, seconds of environment) of each trajectory."""
    if not found:
        return TurnFigures()
    seconds = sorted(environment_s for _, environment_s in found)
    p50, p95 = (seconds[math.ceil(q * len(seconds)) - 1] for q in (0.50, 0.95))
    mean = sum(turns for turns, _ in found) / len(found)
    return TurnFigures(mean=mean, environment_p50_s=p50, environment_p95_s=p95)


def replay_figures(staleness: Sequence[int]) -> ReplayFigures:
    """Return the figures of replayed trajectories with these ages in learner steps."""
    if not staleness:
        return ReplayFigures()
    return ReplayFigures(
        trajectories=len(staleness), staleness_mean=_mean(staleness), staleness_max=max(staleness)
    )


def _mean(values: Sequence[float]) -> float:
    """Return the mean, exact in any order of arrival; NaN without values."""
    return math.fsum(values) / len(values) if values else math.nan


def _deviation(values: Sequence[float]) -> float:
    """Return the sample standard deviation; exactly 0 for equal values, and for one alone."""
    if len(values) < 2 or min(values) == max(values):
        return 0.0
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def quantile(counts: Counter[int], q: float) -> int:
    """Return the smallest value with a share of at least q of the counts at or below it; 0 without counts."""
    target, seen = q * counts.total(), 0
    for value in sorted(counts):
        seen += counts[value]
        if seen >= target:
            return value
    return 0
