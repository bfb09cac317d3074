"""The table of a run's figures: the headline of terminal and page, `/metrics`, and the comparison of runs.

Names and labels of `/metrics` are few and fixed, and no label is a trajectory's id. Counters do not fall when
steps are undone (`tests/report/test_dashboard.py::test_counters_do_not_fall_when_steps_are_undone`).
`configs/grafana/laminar.json` draws the metrics.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from laminar_lab.report.kit import Card
from laminar_lab.report.run_report import RunReport
from laminar_lab.report.tails import COUNTED, NAMES, Distribution, Measure, distribution, format_seconds
from laminar_lab.report.trajectories import REASONS, STATUSES
from laminar_py.records.events import (
    AnyEvent,
    PartCrashed,
    Pulled,
    Relayed,
    Repacked,
    ReplicaLeft,
    Stepped,
    VersionLoaded,
    VersionPublished,
)
from laminar_py.records.metrics import FleetRow
from laminar_py.records.trajectory import Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labelled = Mapping[str, float] | Mapping[tuple[str, ...], float]
Value = float | Labelled | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a run, e.g. goodput: a card of the headline, a metric, a row of a comparison."""

    name: str  # title of the card; help text of a metric
    value: Callable[[RunReport], Value]  # by label if it has labels; None: no value now
    format: Callable[[float], str] = "{:,.0f}".format
    metric: str = ""  # name in `/metrics` after `laminar_`; "": not exported
    labels: tuple[str, ...] = ()
    is_counter: bool = False
    compared: str = ""  # name in a comparison; "": not compared
    note: Callable[[RunReport], str] | None = None  # text of the card; None: no card

    def number(self, report: RunReport) -> float | None:
        """Return the value of a figure without labels."""
        value = self.value(report)
        assert not isinstance(value, Mapping), f"{self.name} has labels"
        return value


def gauge(metric: str, name: str, value: Callable[[RunReport], Value], *labels: str) -> Figure:
    """Return a figure that is only exported, as a gauge."""
    return Figure(name=name, value=value, metric=metric, labels=labels)


def counter(metric: str, name: str, value: Callable[[RunReport], Value], *labels: str) -> Figure:
    """Return a figure that is only exported, as a counter."""
    return Figure(name=name, value=value, metric=metric, labels=labels, is_counter=True)


# ---- values


def _by_name(names: Iterable[object], values: Iterable[float]) -> dict[str, float]:
    return {str(name): float(value) for name, value in zip(names, values, strict=True)}


def _quantiles(found: Distribution | None) -> dict[str, float]:
    """Return percentiles with the names of Prometheus, e.g. `{"0.50": 12.0}`."""
    return {} if found is None else {f"0.{name[1:]}": value for name, value in found.percentiles.items()}


def _turns_of(report: RunReport) -> Distribution | None:
    return report.tails.get(Measure.TURNS)


def _lengths(report: RunReport) -> Labelled:
    return _quantiles(report.tails.get(Measure.LENGTH))


def _turns(report: RunReport) -> Labelled | None:
    return None if (found := _turns_of(report)) is None else _quantiles(found)


def _entropy(report: RunReport) -> float | None:
    steps = report.snapshot.samples.steps
    return steps[-1].entropy if steps else None


def _evaluated(report: RunReport) -> Labelled:
    return {one.set_name: one.figures.mean.value for one in report.snapshot.history.evaluations}


def _bottleneck(report: RunReport) -> Labelled:
    return {} if report.diagnosis is None else {str(report.diagnosis.binding.bottleneck): 1.0}


def _latencies(report: RunReport) -> dict[tuple[str, ...], float]:
    times = {NAMES[measure]: found for measure, found in report.tails.items() if measure not in COUNTED}
    return {
        (stage, quantile): value for stage, found in times.items() for quantile, value in _quantiles(found).items()
    }


def _tail_ratios(report: RunReport) -> dict[str, float]:
    tails = {NAMES[measure]: found.tail for measure, found in report.tails.items()}
    return {name: tail for name, tail in tails.items() if tail is not None}


def _staleness(report: RunReport) -> dict[str, float]:
    train = report.snapshot.trajectories
    return _quantiles(distribution(train.staleness[train.is_status(Status.CONSUMED)].astype(np.float64)))


def _by_status(report: RunReport) -> dict[str, float]:
    return _by_name(STATUSES, np.bincount(report.snapshot.trajectories.status, minlength=len(STATUSES)).tolist())


def _by_reason(report: RunReport) -> dict[str, float]:
    drop = report.snapshot.trajectories.drop
    return _by_name(REASONS, np.bincount(drop[drop >= 0], minlength=len(REASONS)).tolist())


def _recent_reward(report: RunReport) -> float | None:
    reward = report.snapshot.trajectories.reward
    scored = reward[~np.isnan(reward)]
    return float(scored[-1000:].mean()) if len(scored) else None


def _loaded_versions(report: RunReport) -> dict[str, float]:
    loaded: dict[str, float] = {}
    for one in report.snapshot.history.happened:
        if isinstance(one.event, VersionLoaded):
            loaded[str(one.event.replica)] = float(one.event.version)
        elif isinstance(one.event, ReplicaLeft):
            loaded.pop(str(one.event.replica), None)
    return loaded


def _last_fleet(values: Callable[[FleetRow], Iterable[float]]) -> Callable[[RunReport], Value]:
    """Return a value of each replica, by its number, in the last row of the fleet."""

    def value_of(report: RunReport) -> Value:
        fleet = report.snapshot.samples.fleet
        return _by_name(fleet[-1].indices, values(fleet[-1])) if fleet else None

    return value_of


def _sum_of(kind: type[AnyEvent], field: str) -> Callable[[RunReport], Value]:
    """Return the sum of a field over all events of a type, with undone steps, so that it never falls."""
    return lambda report: sum(getattr(event, field) for _, event in report.snapshot.history.of_kind(kind))


def _sum_by_label(kind: type[AnyEvent], label: str, field: str = "") -> Callable[[RunReport], Value]:
    """Return by label the sum of a field over all events of a type; without a field, the number of events."""

    def by_label(report: RunReport) -> Value:
        found = defaultdict[str, float](float)
        for _, event in report.snapshot.history.of_kind(kind):
            found[getattr(event, label)] += getattr(event, field) if field else 1
        return found

    return by_label


def _last_value(kind: type[AnyEvent], field: str, default: float | None = None) -> Callable[[RunReport], Value]:
    """Return a field of the last event of a type, else `default`."""

    def value_of(report: RunReport) -> Value:
        events = [event for _, event in report.snapshot.history.of_kind(kind)]
        return float(getattr(events[-1], field)) if events else default

    return value_of


def _repacked(report: RunReport) -> dict[str, float]:
    moved = Counter[str]()
    for _, event in report.snapshot.history.of_kind(Repacked):
        moved["running"] += event.num_running
        moved["waiting"] += event.num_waiting
    return {name: float(count) for name, count in moved.items()}


def _note_steps(report: RunReport) -> str:
    account, ended = report.tokens, "has not ended" if report.snapshot.history.live else "has ended"
    if not report.steps or not account.useful_trajectories:
        return f"the run {ended}"
    size, length = account.useful_trajectories / report.steps, account.useful / account.useful_trajectories
    step_s = format_seconds(report.rl_s / report.steps)
    return f"{step_s} each: {size:,.0f} trajectories x {length:,.1f} useful tokens; the run {ended}"


def _note_trajectories(report: RunReport) -> str:
    train = report.snapshot.trajectories
    used, dropped = (int(train.is_status(status).sum()) for status in (Status.CONSUMED, Status.DROPPED))
    return f"{used:,} consumed + {dropped:,} dropped + {len(train) - used - dropped:,} live"


def _note_turns(report: RunReport) -> str:
    train, turns = report.snapshot.trajectories, _turns_of(report)
    known = ~np.isnan(train.environment_s)
    spent_s = float(np.sum(train.finished_s[known] - train.started_s[known]))
    share = float(train.environment_s[known].sum()) / spent_s if spent_s > 0 else 0.0
    most = 0.0 if turns is None else turns.max
    return f"of the model, the mean; {most:.0f} at most; environments take {share:.0%} of the time on replicas"


FIGURES = (
    Figure(
        name="goodput",
        value=lambda r: r.tokens.goodput,
        metric="goodput_tokens_per_second",
        compared="goodput, useful tokens/s",
        note=lambda r: f"tokens/s, {r.tokens.useful:,} useful in {r.rl_s:,.1f} s of RL",
    ),
    Figure(
        name="trained",
        value=lambda r: r.trained_tokens_per_s,
        compared="trained tokens/s",
        note=lambda r: "tokens/s, whatever their weight",
    ),
    Figure(
        name="", value=lambda r: r.tokens.useful_share, format="{:.1%}".format, compared="useful of the issued"
    ),
    Figure(
        name="learner steps",
        value=lambda r: len(r.snapshot.history.steps),
        compared="steps",
        note=_note_steps,
    ),
    Figure(
        name="of the RL phase",
        value=lambda r: r.rl_s,
        format=format_seconds,
        metric="rl_seconds",
        is_counter=True,
        compared="RL",
    ),
    Figure(
        name="trajectories",
        value=lambda r: r.tokens.issued_trajectories,
        metric="issued",
        is_counter=True,
        note=_note_trajectories,
    ),
    Figure(
        name="turns",
        value=lambda r: None if (found := _turns_of(r)) is None else found.mean,
        format="{:.2f}".format,
        note=_note_turns,
    ),
    Figure(
        name="staleness",
        value=lambda r: None if r.staleness is None else r.staleness.mean,
        format="{:.2f}".format,
        note=lambda r: "" if r.staleness is None else f"learner steps, the mean; {r.staleness.max} at most",
    ),
    gauge("trajectories", "training trajectories by status", _by_status, "status"),
    counter("dropped", "dropped trajectories by reason", _by_reason, "reason"),
    counter("tokens_generated", "response tokens of training, stored so far", lambda r: r.tokens.issued),
    gauge(
        "tokens_useful",
        "of steps that were not undone, times the weights of their losses",
        lambda r: r.tokens.useful,
    ),
    gauge("reward", "mean reward of the last thousand scored", _recent_reward),
    gauge("response_length_tokens", "response length", _lengths, "quantile"),
    gauge("turns", "turns of the model in a trajectory", _turns, "quantile"),
    gauge("staleness_steps", "staleness of consumed trajectories", _staleness, "quantile"),
    gauge("latency_seconds", "seconds of each stage of a trajectory", _latencies, "stage", "quantile"),
    gauge("tail_ratio", "p95 over p50", _tail_ratios, "of"),
    gauge("replica_version", "weight version that a replica serves", _loaded_versions, "replica"),
    gauge("replica_running", "trajectories that it decodes", _last_fleet(lambda row: row.running), "replica"),
    gauge(
        "replica_waiting", "trajectories that wait in its engine", _last_fleet(lambda row: row.waiting), "replica"
    ),
    gauge("replica_kv_share", "share of its KV cache in use", _last_fleet(lambda row: row.kv_use), "replica"),
    counter("repacked", "trajectories that repacking moved", _repacked, "state"),
    gauge("learner_step", "the last step", _last_value(Stepped, "step", 0)),
    counter("tokens_trained", "response tokens of steps", _sum_of(Stepped, "num_tokens")),
    counter("learner_busy_seconds", "in steps", _sum_of(Stepped, "elapsed_s")),
    counter("learner_waiting_seconds", "without a batch", _sum_of(Stepped, "waited_s")),
    counter("reference_seconds", "in the reference model", _sum_of(Stepped, "reference_s")),
    gauge("loss", "of the last step", _last_value(Stepped, "loss")),
    gauge("gradient_norm", "of the last step", _last_value(Stepped, "grad_norm")),
    gauge("entropy_nats", "of the last step's tokens", _entropy),
    gauge("evaluation_mean_reward", "of the last evaluation", _evaluated, "set"),
    gauge(
        "version_published", "newest weight version of the learner", _last_value(VersionPublished, "version", -1)
    ),
    counter("publish_stall_seconds", "the learner stood still to publish", _sum_of(VersionPublished, "stall_s")),
    counter(
        "relay_seconds", "from first request to verified", _sum_by_label(Relayed, "node", "elapsed_s"), "node"
    ),
    counter("relay_wire_bytes", "that came over the wire", _sum_by_label(Relayed, "node", "wire_bytes"), "node"),
    counter(
        "pull_waited_seconds",
        "waits for versions",
        _sum_by_label(Pulled, "subscriber", "waited_s"),
        "subscriber",
    ),
    counter("crashes", "parts that crashed and were restarted", _sum_by_label(PartCrashed, "part"), "part"),
    gauge(
        "live",
        "1 until the run says that it ended",
        lambda r: float(r.snapshot.history.live),
    ),
    gauge("last_event_timestamp_seconds", "since 1970; long ago after a kill", lambda r: r.snapshot.heard_s),
    counter("events", "in the ledger", lambda r: r.snapshot.seq),
    gauge("wall_info", "what limits the run", _bottleneck, "wall"),
)


def headline(report: RunReport) -> list[Card]:
    """Return the cards of terminal and page: bottleneck, figures with a note, and evaluations of each set."""
    cards = [Card("simulated", "no real run", report.simulation)] if report.simulation else []
    if report.diagnosis is not None:
        cards.append(Card("limited by", str(report.diagnosis.binding.bottleneck), "the evidence is below"))
    for figure in FIGURES:
        value = figure.number(report) if figure.note is not None else None
        if figure.note is not None and value is not None:
            cards.append(Card(figure.name, figure.format(value), figure.note(report)))
    for name, passes in report.snapshot.history.evaluations_by_set.items():
        last = passes[-1].figures
        words = f"{passes[0].figures.mean.value:.3f} at the first evaluation; the last: {last.describe()}"
        cards.append(Card(f"{name}: {last.name}", f"{last.mean.value:.3f}", words))
    return cards


class _RunCollector(Collector):
    """The figures of a report, as metrics of Prometheus."""

    def __init__(self, report: RunReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        """Iterate over the metrics that have a value now."""
        for figure in FIGURES:
            value = figure.value(self._report) if figure.metric else None
            if value is None:
                continue
            make = CounterMetricFamily if figure.is_counter else GaugeMetricFamily
            family = make(f"laminar_{figure.metric}", figure.name.capitalize(), labels=figure.labels)
            by_label = value if isinstance(value, Mapping) else {(): value}
            for label, one in by_label.items():
                family.add_metric([label] if isinstance(label, str) else list(label), one)
            yield family


def metrics_text(report: RunReport) -> bytes:
    """Return the text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_RunCollector(report))
    return generate_latest(registry)
