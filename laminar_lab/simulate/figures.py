"""Figures of a simulated run, in seconds of the GPUs: of its steps after a first part, while the fleet fills."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from laminar_py.config import RunConfig
from laminar_py.records import StepRow

WARM_SHARE = 0.25  # of the steps


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSample:
    """State of all replicas at a moment of the run."""

    at_s: float  # of RL
    generated_tokens: int
    kv_use: float  # mean share of the KV caches
    engine_s: float  # of the GPUs, of prefills and steps so far, of all engines
    away: int = 0  # trajectories whose environment works on a turn
    slots_held: int = 0  # of engines, by those


class EndedResponse(msgspec.Struct, frozen=True, gc=False):
    """End of a training response, of which a simulation keeps a million."""

    at_s: float  # of RL
    latency_s: float  # since it was issued
    age: int  # versions that the learner had published by then, after the oldest in it


@dataclass(frozen=True, slots=True)
class ControlTraffic:
    """Work of the control plane from the start to the end of a step."""

    events: int  # on record, were there one
    reports: int  # of replicas


class SimulatedFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a run once its fleet is full."""

    steps: int  # that count
    step_s: float  # from one step to the next
    trained_tokens_per_s: float  # response tokens
    generated_tokens_per_s: float
    kv_use: float  # mean share of the replicas' KV caches over time
    engine_s_per_token: float  # of the GPUs that one replica has
    learner_waiting_share: float
    staleness_mean: float
    staleness_max: int
    versions_alive_max: int
    latency_p50_s: float  # from a response's issue to its end
    latency_p95_s: float
    trajectories_per_s: float  # that ended
    events_per_s: float
    reports_per_s: float
    failures: int  # of replicas
    away: float  # trajectories whose environment works on a turn, mean over time
    slots_held_waiting: int  # of engines by those, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """Outcome of a simulated run, in seconds of its clock, of which `emulation.compression` are one."""

    config: RunConfig
    rows: Sequence[StepRow]
    samples: Sequence[FleetSample]
    ended: Sequence[EndedResponse]
    traffic: Sequence[ControlTraffic]  # [steps]

    @property
    def latencies_s(self) -> list[float]:
        """Seconds of the GPUs from issue to end of each response that ended in the steps that count."""
        first_s, last_s, fast = self.rows[self._warm - 1].rl_s, self.rows[-1].rl_s, self._compression
        return [fast * one.latency_s for one in self.ended if first_s <= one.at_s <= last_s]

    failed_s: Sequence[float]  # when replicas failed, in seconds of RL

    @property
    def figures(self) -> SimulatedFigures:
        """Figures of all steps after the first quarter, of which there is one at least."""
        assert len(self.rows) > 1, "figures are of the time between two steps"
        first, counted = self.rows[self._warm - 1], self.rows[self._warm :]
        before, after = self.traffic[self._warm - 1], self.traffic[-1]
        last, fast = counted[-1], self._compression
        elapsed_s = fast * (last.rl_s - first.rl_s)
        samples = [sample for sample in self.samples if first.rl_s <= sample.at_s <= last.rl_s]
        latencies = self.latencies_s
        return SimulatedFigures(
            steps=len(counted),
            step_s=elapsed_s / len(counted),
            trained_tokens_per_s=(last.trained_tokens - first.trained_tokens) / elapsed_s,
            generated_tokens_per_s=_rate(samples) / fast,
            kv_use=_mean(samples, lambda sample: sample.kv_use),
            engine_s_per_token=_engine_s_per_token(samples),
            learner_waiting_share=1.0 - fast * (last.learner_busy_s - first.learner_busy_s) / elapsed_s,
            staleness_mean=float(np.mean([row.staleness_mean for row in counted])),
            staleness_max=max(row.staleness_max for row in counted),
            versions_alive_max=max(row.versions_alive for row in counted),
            latency_p50_s=float(np.percentile(latencies, 50)),
            latency_p95_s=float(np.percentile(latencies, 95)),
            trajectories_per_s=len(latencies) / elapsed_s,
            events_per_s=(after.events - before.events) / elapsed_s,
            reports_per_s=(after.reports - before.reports) / elapsed_s,
            failures=sum(first.rl_s <= at_s <= last.rl_s for at_s in self.failed_s),
            away=_mean(samples, lambda sample: sample.away),
            slots_held_waiting=max(sample.slots_held for sample in samples),
        )

    @property
    def _warm(self) -> int:
        return max(1, round(WARM_SHARE * len(self.rows)))

    @property
    def _compression(self) -> float:
        assert self.config.emulation is not None, "what was simulated has engines that are emulated"
        return self.config.emulation.compression


def _rate(samples: Sequence[FleetSample]) -> float:
    """Tokens a second of the run's clock from the first sample to the last; each step has one."""
    first, last = samples[0], samples[-1]
    return (last.generated_tokens - first.generated_tokens) / (last.at_s - first.at_s)


def _engine_s_per_token(samples: Sequence[FleetSample]) -> float:
    """Seconds that engines compute for a token, from the first sample to the last."""
    first, last = samples[0], samples[-1]
    return (last.engine_s - first.engine_s) / (last.generated_tokens - first.generated_tokens)


def _mean(samples: Sequence[FleetSample], value: Callable[[FleetSample], float]) -> float:
    """Mean over time: samples come in even steps and at the end of each step of the learner besides."""
    at_s, values = np.array([(sample.at_s, value(sample)) for sample in samples]).T
    return float(np.trapezoid(values, at_s) / (at_s[-1] - at_s[0]))
