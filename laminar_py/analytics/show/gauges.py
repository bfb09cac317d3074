"""What `/metrics` exports, as Prometheus reads it: figures of a snapshot. Called by the dashboard.

Invariants: names and labels are few and fixed, whatever the run does; ids of trajectories never become labels; and
counters do not fall when steps are undone.
`configs/grafana/laminar.json` draws exactly these.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from laminar_py.analytics.read.columns import REASONS, STATUSES
from laminar_py.analytics.show.figures import latencies, lengths, percentiles
from laminar_py.analytics.show.panels import WallPanel
from laminar_py.analytics.show.snapshot import Snapshot
from laminar_py.records.events import PartDied, Pulled, Relayed, Repacked, Stepped, VersionLoaded, VersionPublished
from laminar_py.records.trajectory import Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labelled = Mapping[str, float]


class RunCollector(Collector):
    """Figures of one snapshot, and what limits the run."""

    def __init__(self, snapshot: Snapshot, wall: WallPanel | None) -> None:
        self._snapshot = snapshot
        self._wall = wall

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield from _trajectories(self._snapshot)
        yield from _tails(self._snapshot)
        yield from _replicas(self._snapshot)
        yield from _learner(self._snapshot)
        yield from _weights(self._snapshot)
        yield from _run(self._snapshot, self._wall)


def expose(snapshot: Snapshot, wall: WallPanel | None = None) -> bytes:
    """The text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RunCollector(snapshot, wall))
    return generate_latest(registry)


def _trajectories(snapshot: Snapshot) -> Iterator[Metric]:
    train = snapshot.trajectories
    by_status = np.bincount(train.status, minlength=len(STATUSES)).tolist()
    yield _gauge("trajectories", "Training trajectories by status", _named(STATUSES, by_status), label="status")
    dropped = np.bincount(train.drop[train.drop >= 0], minlength=len(REASONS)).tolist()
    yield _counter("dropped", "Dropped trajectories by reason", _named(REASONS, dropped), label="reason")
    yield _counter("issued", "Training trajectories issued", len(train))
    generated = int(train.length.sum(dtype=np.int64))
    yield _counter("tokens_generated", "Response tokens of training, stored so far", generated)
    useful = snapshot.useful_tokens
    yield _gauge("tokens_useful", "Of steps that stand, each weighed as its loss was", useful)
    yield _gauge("goodput_tokens_per_second", "Useful tokens over seconds of RL", snapshot.goodput)
    scored = train.reward[~np.isnan(train.reward)]
    if len(scored):
        yield _gauge("reward", "Mean reward of the last thousand scored", float(scored[-1000:].mean()))


def _tails(snapshot: Snapshot) -> Iterator[Metric]:
    train = snapshot.trajectories
    consumed = train.is_status(Status.CONSUMED)
    yield _quantiles("response_length_tokens", "Response length", lengths(train))
    yield _quantiles("staleness_versions", "Staleness of what was consumed", train.staleness[consumed])
    family = GaugeMetricFamily(
        "laminar_latency_seconds", "Seconds of the stages of a trajectory's way", labels=["stage", "quantile"]
    )
    ratio = GaugeMetricFamily("laminar_tail_ratio", "p95 over p50", labels=["of"])
    values = percentiles(lengths(train))
    if values.get("p50"):
        ratio.add_metric(["length"], values["p95"] / values["p50"])
    for stage, seconds in latencies(train).items():
        values = percentiles(seconds)
        for name, value in values.items():
            family.add_metric([stage, _quantile(name)], value)
        if values.get("p50"):
            ratio.add_metric([stage], values["p95"] / values["p50"])
    yield family
    yield ratio


def _replicas(snapshot: Snapshot) -> Iterator[Metric]:
    served = {str(event.replica): float(event.version) for _, event in snapshot.history.of(VersionLoaded)}
    yield _gauge("replica_version", "Weight version that a replica serves", served, label="replica")
    if snapshot.fleet:
        last = snapshot.fleet[-1]
        for name, words, values in (
            ("replica_running", "Trajectories that it decodes", last.running),
            ("replica_waiting", "Trajectories that wait in its engine", last.waiting),
            ("replica_kv_share", "Share of its KV cache in use", last.kv_use),
        ):
            yield _gauge(name, words, _named(map(str, range(len(values))), values), label="replica")
    moved = Counter[str]()
    for _, event in snapshot.history.of(Repacked):
        moved["running"] += event.num_running
        moved["waiting"] += event.num_waiting
    yield _counter("repacked", "Trajectories that repacking moved", moved, label="state")


def _learner(snapshot: Snapshot) -> Iterator[Metric]:
    steps = [step for _, step in snapshot.history.of(Stepped)]  # undone ones too, so that nothing falls
    yield _gauge("learner_step", "The last step", steps[-1].step if steps else 0)
    yield _counter("tokens_trained", "Response tokens of steps", sum(step.num_tokens for step in steps))
    yield _counter("learner_busy_seconds", "In steps", sum(step.elapsed_s for step in steps))
    yield _counter("learner_waiting_seconds", "Without a batch", sum(step.waited_s for step in steps))
    yield _counter("reference_seconds", "In the reference model", sum(step.reference_s for step in steps))
    if steps:
        yield _gauge("loss", "Of the last step", steps[-1].loss)
        yield _gauge("gradient_norm", "Of the last step", steps[-1].grad_norm)
    if snapshot.metrics:
        yield _gauge("entropy_nats", "Of the last step's tokens", snapshot.metrics[-1].entropy)
    if snapshot.accuracy is not None:
        yield _gauge("heldout_accuracy", "Of the last evaluation", snapshot.accuracy)


def _weights(snapshot: Snapshot) -> Iterator[Metric]:
    published = [event for _, event in snapshot.history.of(VersionPublished)]
    newest = published[-1].version if published else -1
    yield _gauge("version_published", "Newest weight version of the learner", newest)
    stalled = sum(event.stall_s for event in published)
    yield _counter("publish_stall_seconds", "That the learner stood still for publishing", stalled)
    seconds, sent, waited = (defaultdict[str, float](float) for _ in range(3))
    for _, event in snapshot.history.of(Relayed):
        seconds[event.node] += event.elapsed_s
        sent[event.node] += event.wire_bytes
    for _, pull in snapshot.history.of(Pulled):
        waited[pull.subscriber] += pull.waited_s
    yield _counter("relay_seconds", "From first request to verified, of all versions", seconds, label="node")
    yield _counter("relay_wire_bytes", "That came over the wire", sent, label="node")
    yield _counter("pull_waited_seconds", "That a subscriber waited for versions", waited, label="subscriber")


def _run(snapshot: Snapshot, wall: WallPanel | None) -> Iterator[Metric]:
    deaths = Counter(event.part for _, event in snapshot.history.of(PartDied))
    yield _counter("deaths", "Parts that were found dead, and restarted", deaths, label="part")
    yield _gauge("live", "1 until the run has ended by its own word, so also after a kill", float(snapshot.live))
    yield _gauge("last_event_timestamp_seconds", "Since 1970; long ago where a run was killed", snapshot.heard_s)
    yield _counter("rl_seconds", "Of the RL phase", snapshot.rl_s)
    yield _counter("events", "In the ledger", snapshot.seq)
    found = {wall.name: 1.0} if wall is not None else {}
    yield _gauge("wall_info", "What limits the run", found, label="wall")


def _quantiles(name: str, words: str, values: npt.NDArray[np.integer]) -> Metric:
    found = {_quantile(key): value for key, value in percentiles(values).items()}
    return _gauge(name, words, found, label="quantile")


def _quantile(name: str) -> str:
    return f"0.{name[1:]}"


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
