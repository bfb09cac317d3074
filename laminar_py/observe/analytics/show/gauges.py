"""Figures of a report as `/metrics` exports them for Prometheus. Called by the dashboard.

Invariants: names and labels are few and fixed, whatever the run does; ids of trajectories never become labels; and
counters do not fall when steps are undone.
`configs/grafana/laminar.json` draws exactly these.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from laminar_py.observe.analytics.measure.tails import COUNTED, NAMES, Distribution, Measure, distribution
from laminar_py.observe.analytics.read.columns import REASONS, STATUSES, Trajectories
from laminar_py.observe.analytics.read.history import History
from laminar_py.observe.analytics.read.samples import Samples
from laminar_py.observe.analytics.triage.report import RunReport
from laminar_py.records.events import (
    PartDied,
    Pulled,
    Relayed,
    Repacked,
    ReplicaLeft,
    Stepped,
    VersionLoaded,
    VersionPublished,
)
from laminar_py.records.trajectory import Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labelled = Mapping[str, float]


class RunCollector(Collector):
    """Figures of one report, as families of metrics."""

    def __init__(self, report: RunReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Every family."""
        report, snapshot = self._report, self._report.snapshot
        yield from _trajectories(report, snapshot.trajectories)
        yield from _tails(report)
        yield from _replicas(snapshot.history, snapshot.samples)
        yield from _learner(snapshot.history, snapshot.samples)
        yield from _weights(snapshot.history)
        yield from _run(report)


def expose(report: RunReport) -> bytes:
    """Text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(report))
    return generate_latest(registry)


def _trajectories(report: RunReport, train: Trajectories) -> Iterator[Metric]:
    tokens = report.tokens
    by_status = np.bincount(train.status, minlength=len(STATUSES)).tolist()
    yield _gauge("trajectories", "Training trajectories by status", _named(STATUSES, by_status), label="status")
    dropped = np.bincount(train.drop[train.drop >= 0], minlength=len(REASONS)).tolist()
    yield _counter("dropped", "Dropped trajectories by reason", _named(REASONS, dropped), label="reason")
    yield _counter("issued", "Training trajectories issued", tokens.issued_trajectories)
    yield _counter("tokens_generated", "Response tokens of training, stored so far", tokens.issued)
    yield _gauge("tokens_useful", "Of steps that stand, each weighed as its loss was", tokens.useful)
    yield _gauge("goodput_tokens_per_second", "Useful tokens over seconds of RL", tokens.goodput)
    scored = train.reward[~np.isnan(train.reward)]
    if len(scored):
        yield _gauge("reward", "Mean reward of the last thousand scored", float(scored[-1000:].mean()))


def _tails(report: RunReport) -> Iterator[Metric]:
    overall, train = report.tails.overall, report.snapshot.trajectories
    staleness = train.staleness[train.is_status(Status.CONSUMED)].astype(np.float64)
    yield _quantiles("response_length_tokens", "Response length", overall.get(Measure.LENGTH))
    if Measure.TURNS in overall:
        yield _quantiles("turns", "Turns of the model in a trajectory", overall[Measure.TURNS])
    yield _quantiles("staleness_steps", "Staleness of what was consumed", distribution(staleness))
    family = GaugeMetricFamily(
        "laminar_latency_seconds", "Seconds of the stages of a trajectory's way", labels=["stage", "quantile"]
    )
    for measure, found in overall.items():
        if measure not in COUNTED:
            for quantile, value in _labelled(found).items():
                family.add_metric([NAMES[measure], quantile], value)
    yield family
    ratios = {NAMES[measure]: found.tail for measure, found in overall.items() if found.tail is not None}
    yield _gauge("tail_ratio", "p95 over p50", ratios, label="of")


def _replicas(history: History, samples: Samples) -> Iterator[Metric]:
    served: dict[str, float] = {}
    for one in history.happened:
        if isinstance(one.event, VersionLoaded):
            served[str(one.event.replica)] = float(one.event.version)
        elif isinstance(one.event, ReplicaLeft):
            served.pop(str(one.event.replica), None)
    yield _gauge("replica_version", "Weight version that a replica serves", served, label="replica")
    if samples.fleet:
        last = samples.fleet[-1]
        for name, words, values in (
            ("replica_running", "Trajectories that it decodes", last.running),
            ("replica_waiting", "Trajectories that wait in its engine", last.waiting),
            ("replica_kv_share", "Share of its KV cache in use", last.kv_use),
        ):
            yield _gauge(name, words, _named(map(str, last.indices), values), label="replica")
    moved = Counter[str]()
    for _, event in history.of(Repacked):
        moved["running"] += event.num_running
        moved["waiting"] += event.num_waiting
    yield _counter("repacked", "Trajectories that repacking moved", moved, label="state")


def _learner(history: History, samples: Samples) -> Iterator[Metric]:
    steps = [step for _, step in history.of(Stepped)]  # undone ones too, so that nothing falls
    yield _gauge("learner_step", "The last step", steps[-1].step if steps else 0)
    yield _counter("tokens_trained", "Response tokens of steps", sum(step.num_tokens for step in steps))
    yield _counter("learner_busy_seconds", "In steps", sum(step.elapsed_s for step in steps))
    yield _counter("learner_waiting_seconds", "Without a batch", sum(step.waited_s for step in steps))
    yield _counter("reference_seconds", "In the reference model", sum(step.reference_s for step in steps))
    if steps:
        yield _gauge("loss", "Of the last step", steps[-1].loss)
        yield _gauge("gradient_norm", "Of the last step", steps[-1].grad_norm)
    if samples.steps:
        yield _gauge("entropy_nats", "Of the last step's tokens", samples.steps[-1].entropy)
    means = {one.set_name: one.figures.mean.value for one in history.evaluations}
    yield _gauge("evaluation_mean_reward", "Of the last evaluation; an accuracy of 0 and 1", means, label="set")


def _weights(history: History) -> Iterator[Metric]:
    published = [event for _, event in history.of(VersionPublished)]
    newest = published[-1].version if published else -1
    yield _gauge("version_published", "Newest weight version of the learner", newest)
    stalled = sum(event.stall_s for event in published)
    yield _counter("publish_stall_seconds", "That the learner stood still for publishing", stalled)
    seconds, sent, waited = (defaultdict[str, float](float) for _ in range(3))
    for _, event in history.of(Relayed):
        seconds[event.node] += event.elapsed_s
        sent[event.node] += event.wire_bytes
    for _, pull in history.of(Pulled):
        waited[pull.subscriber] += pull.waited_s
    yield _counter("relay_seconds", "From first request to verified, of all versions", seconds, label="node")
    yield _counter("relay_wire_bytes", "That came over the wire", sent, label="node")
    yield _counter("pull_waited_seconds", "That a subscriber waited for versions", waited, label="subscriber")


def _run(report: RunReport) -> Iterator[Metric]:
    snapshot, diagnosis = report.snapshot, report.diagnosis
    deaths = Counter(event.part for _, event in snapshot.history.of(PartDied))
    yield _counter("deaths", "Parts that were found dead, and restarted", deaths, label="part")
    live = float(snapshot.history.live)
    yield _gauge("live", "1 until the run has ended by its own word, so also after a kill", live)
    yield _gauge("last_event_timestamp_seconds", "Since 1970; long ago where a run was killed", snapshot.heard_s)
    yield _counter("rl_seconds", "Of the RL phase", report.rl_s)
    yield _counter("events", "In the ledger", snapshot.seq)
    found = {} if diagnosis is None else {str(diagnosis.binding.wall): 1.0}
    yield _gauge("wall_info", "What limits the run", found, label="wall")


def _quantiles(name: str, words: str, found: Distribution | None) -> Metric:
    return _gauge(name, words, {} if found is None else _labelled(found), label="quantile")


def _labelled(found: Distribution) -> Labelled:
    """Percentiles as Prometheus names them, e.g. `{"0.50": 12.0}`."""
    return {f"0.{name[1:]}": value for name, value in found.percentiles.items()}


def _named(names: Iterable[str], values: Iterable[float]) -> Labelled:
    return {str(name): float(value) for name, value in zip(names, values, strict=True)}


def _gauge(name: str, words: str, value: float | Labelled, *, label: str = "") -> Metric:
    return _fill(GaugeMetricFamily(f"laminar_{name}", words, labels=[label] if label else []), value)


def _counter(name: str, words: str, value: float | Labelled, *, label: str = "") -> Metric:
    return _fill(CounterMetricFamily(f"laminar_{name}", words, labels=[label] if label else []), value)


def _fill(family: GaugeMetricFamily | CounterMetricFamily, value: float | Labelled) -> Metric:
    if isinstance(value, Mapping):
        for label, one in value.items():
            family.add_metric([label], one)
    else:
        family.add_metric([], value)
    return family
