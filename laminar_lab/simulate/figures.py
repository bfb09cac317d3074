"""Figures of a simulated run, in emulated seconds, over the steps after the fleet has filled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from laminar_lab.emulation.settings import emulation_of
from laminar_py.config import RunConfig
from laminar_py.control import Holder
from laminar_py.records import StepRow
from laminar_py.records.events import Leased

WARM_SHARE = 0.25  # of the steps, at the start, which no figure counts


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSample:
    """State of the fleet at one moment of a run."""

    at_s: float  # of RL
    generated_tokens: int
    kv_use: float  # mean share of the KV caches
    engine_s: float  # emulated compute time of all engines so far
    away: int = 0  # trajectories that wait for their environment
    slots_held: int = 0  # engine slots of waiting trajectories
    recomputed_s: float = 0.0  # emulated compute time of all engines so far, for caches that a pause dropped


@dataclass(frozen=True, slots=True)
class HandOver:
    """Shared devices changed hands."""

    at_s: float  # of RL, at the end
    event: Leased


class EndedResponse(msgspec.Struct, frozen=True, gc=False):
    """The end of a training response."""

    at_s: float  # of RL
    latency_s: float  # from issue to end
    age: int  # versions that the learner had published after the oldest version of the response


@dataclass(frozen=True, slots=True)
class ControlTraffic:
    """Work of the control plane from the start to the end of a step."""

    events: int  # of a record
    reports: int  # from replicas


class SimulatedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run after its fleet has filled, in emulated seconds."""

    steps: int  # that the figures count
    step_s: float  # from one step to the next
    trained_tokens_per_s: float  # response tokens
    generated_tokens_per_s: float
    kv_use: float  # share of the replicas' KV caches, mean over time
    engine_s_per_token: float  # compute time of one replica
    learner_waiting_share: float
    staleness_mean: float
    staleness_max: int
    versions_alive_max: int
    latency_p50_s: float  # from a response's issue to its end
    latency_p95_s: float
    trajectories_per_s: float  # ended
    events_per_s: float
    reports_per_s: float
    failures: int  # of replicas
    away: float  # trajectories that wait for their environment, mean over time
    slots_held_waiting: int  # most engine slots of waiting trajectories
    turns: int = 0  # of the learner on shared devices
    handed_over_share: float = 0.0  # of the time, in hand-overs of shared devices, with loads and prefills in them
    recomputed_share: float = 0.0  # of the time, in which a replica fills caches that a pause dropped, the mean


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Outcome of a simulated run; a virtual second has `rollout.engine.compression` emulated seconds."""

    config: RunConfig
    rows: Sequence[StepRow]
    samples: Sequence[FleetSample]
    ended: Sequence[EndedResponse]
    traffic: Sequence[ControlTraffic]  # [steps]
    failed_s: Sequence[float]  # crashes of replicas, in seconds of RL
    handed_over: Sequence[HandOver] = ()

    @property
    def latencies_s(self) -> list[float]:
        """Emulated seconds from issue to end of each response in the counted steps."""
        first_s, last_s, fast = self.rows[self._warm - 1].rl_s, self.rows[-1].rl_s, self._compression
        return [fast * one.latency_s for one in self.ended if first_s <= one.at_s <= last_s]

    @property
    def figures(self) -> SimulatedFigures:
        """Figures of all steps after the first quarter; a run has two steps at least."""
        assert len(self.rows) > 1, "figures need two steps"
        first, counted = self.rows[self._warm - 1], self.rows[self._warm :]
        before, after = self.traffic[self._warm - 1], self.traffic[-1]
        last, fast = counted[-1], self._compression
        elapsed_s = fast * (last.rl_s - first.rl_s)
        samples = [sample for sample in self.samples if first.rl_s <= sample.at_s <= last.rl_s]
        latencies = self.latencies_s
        handed_over = [one.event for one in self.handed_over if first.rl_s <= one.at_s <= last.rl_s]
        return SimulatedFigures(
            steps=len(counted),
            step_s=elapsed_s / len(counted),
            trained_tokens_per_s=(last.trained_tokens - first.trained_tokens) / elapsed_s,
            generated_tokens_per_s=_rate(samples) / fast,
            kv_use=_mean(samples, lambda sample: sample.kv_use),
            engine_s_per_token=_engine_s_per_token(samples),
            learner_waiting_share=1.0 - fast * (last.learner_busy_s - first.learner_busy_s) / elapsed_s,
            staleness_mean=float(np.mean([row.staleness_mean for row in counted if row.trajectories] or [0.0])),
            staleness_max=max(row.staleness_max or 0 for row in counted),
            versions_alive_max=max(row.versions_alive for row in counted),
            latency_p50_s=float(np.percentile(latencies, 50)),
            latency_p95_s=float(np.percentile(latencies, 95)),
            trajectories_per_s=len(latencies) / elapsed_s,
            events_per_s=(after.events - before.events) / elapsed_s,
            reports_per_s=(after.reports - before.reports) / elapsed_s,
            failures=sum(first.rl_s <= at_s <= last.rl_s for at_s in self.failed_s),
            away=_mean(samples, lambda sample: sample.away),
            slots_held_waiting=max(sample.slots_held for sample in samples),
            turns=sum(event.holder == Holder.LEARNER for event in handed_over),
            handed_over_share=fast * sum(event.elapsed_s for event in handed_over) / elapsed_s,
            recomputed_share=_recomputed_s(samples) / self.config.rollout.replicas / elapsed_s,
        )

    @property
    def _warm(self) -> int:
        return max(1, round(WARM_SHARE * len(self.rows)))

    @property
    def _compression(self) -> float:
        return emulation_of(self.config).compression


def _rate(samples: Sequence[FleetSample]) -> float:
    """Return tokens per virtual second from the first sample to the last."""
    first, last = samples[0], samples[-1]
    return (last.generated_tokens - first.generated_tokens) / (last.at_s - first.at_s)


def _engine_s_per_token(samples: Sequence[FleetSample]) -> float:
    """Return compute seconds per token, from the first sample to the last."""
    first, last = samples[0], samples[-1]
    return (last.engine_s - first.engine_s) / (last.generated_tokens - first.generated_tokens)


def _recomputed_s(samples: Sequence[FleetSample]) -> float:
    """Return compute seconds for caches that a pause dropped, from the first sample to the last."""
    return samples[-1].recomputed_s - samples[0].recomputed_s


def _mean(samples: Sequence[FleetSample], value: Callable[[FleetSample], float]) -> float:
    """Return the mean over time; samples are not evenly spaced, since each learner step adds a sample."""
    at_s, values = np.array([(sample.at_s, value(sample)) for sample in samples]).T
    return float(np.trapezoid(values, at_s) / (at_s[-1] - at_s[0]))
