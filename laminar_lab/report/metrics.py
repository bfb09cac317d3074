"""The text of `/metrics` for Prometheus: the last row of a run's steps, the load of its replicas, and counts.

All metrics are gauges, since a rollback lowers sums. Figures of the last step have the names of docs/metrics.md,
e.g. `laminar_run_loss` for `run/loss`. No label is a trajectory's id. `configs/grafana/laminar.json` draws
the metrics.
"""

import re
from collections.abc import Iterable, Iterator

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from laminar_lab.report.run_report import RunReport
from laminar_lab.report.trajectories import REASONS, STATUSES
from laminar_py.observe import flat_row
from laminar_py.records.events import VersionPublished

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _RunCollector(Collector):
    """The figures of a report, as metrics of Prometheus."""

    def __init__(self, report: RunReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Iterate over the metrics that have a value now."""
        report, snapshot = self._report, self._report.snapshot
        train, history, samples = snapshot.trajectories, snapshot.history, snapshot.samples
        yield _gauge("live", "1 until the run records its end", float(history.live))
        yield _gauge("last_event_timestamp_seconds", "since 1970; long ago after a kill", snapshot.heard_s)
        yield _gauge("goodput_tokens_per_second", "useful tokens over seconds of RL", report.tokens.goodput)
        for _, event in list(history.of_kind(VersionPublished))[-1:]:
            yield _gauge("published_version", "the last published version", event.version)
        by_status = np.bincount(train.status, minlength=len(STATUSES))
        yield _labelled("trajectories", "training trajectories", "status", zip(STATUSES, by_status, strict=True))
        by_reason = np.bincount(train.drop[train.drop >= 0], minlength=len(REASONS))
        yield _labelled("dropped", "dropped trajectories", "reason", zip(REASONS, by_reason, strict=True))
        if report.diagnosis is not None:
            yield _labelled(
                "bottleneck",
                "1 for what limits the run",
                "bottleneck",
                [(report.diagnosis.binding.bottleneck, 1.0)],
            )
        evaluated = {passed.set_name: passed.figures.mean.value for passed in history.evaluations}
        yield _labelled("evaluation_mean_reward", "of the last evaluation", "set", evaluated.items())
        for name, value in flat_row(samples.steps[-1]).items() if samples.steps else ():
            yield _gauge(re.sub(r"\W", "_", name), f"{name} of the last step", value)
        for row in samples.fleet[-1:]:
            loads: dict[str, list[int] | list[float]] = {
                "version": row.versions,
                "running": row.running,
                "waiting": row.waiting,
                "kv_use": row.kv_use,
            }
            for name, values in loads.items():
                by_replica = zip(row.indices, values, strict=True)
                yield _labelled(f"replica_{name}", "of each replica, in the last second", "replica", by_replica)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(f"laminar_{name}", words, value=value)


def _labelled(name: str, words: str, label: str, values: Iterable[tuple[object, float]]) -> Metric:
    """Return a metric with a value for each label."""
    family = GaugeMetricFamily(f"laminar_{name}", words, labels=[label])
    for key, value in values:
        family.add_metric([str(key)], float(value))
    return family


def metrics_text(report: RunReport) -> bytes:
    """Return the text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RunCollector(report))
    return generate_latest(registry)
