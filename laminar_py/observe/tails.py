"""Times and lengths of trajectories, and how long the longest take. Computed from the arrays alone.

`measures` says what is measured; the distributions of each are taken over all, and for each replica, version and
task. Everything is vectorised: a million trajectories take seconds.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from laminar_py.observe.trajectories import Ints, Times, Trajectories
from laminar_py.records.metrics import FleetRow
from laminar_py.records.trajectory import Status

MOST_ROWS = 12  # of a table by version

_LEAST_MEDIAN = 0.001
_PERCENTILES = (50, 90, 95, 99, 100)


class Measure(StrEnum):
    """A length in tokens, a number of turns, or a time in seconds between two events of a trajectory."""

    LENGTH = "length"  # of a finished response
    TURNS = "turns"  # of the model
    REPLICA_WAIT = "replica_wait"  # issued until a replica has it
    GENERATION = (
        "generation"  # handed to a replica until finished, but for environments: queue, prefill, moves too
    )
    FIRST_TOKENS = "first_tokens"  # on the last replica until the engine delivered a piece
    ENVIRONMENT = "environment"  # its environment worked, or had it wait for room
    SCORER_WAIT = "scorer_wait"  # finished until scored, without the scoring itself
    REWARD = "reward"  # the scoring
    GROUP_WAIT = "group_wait"  # scored until the last member of its group was scored or dropped
    BUFFER = "buffer"  # ready until consumed
    END_TO_END = "end_to_end"  # issued until consumed


COUNTED = {Measure.LENGTH: "tokens", Measure.TURNS: "turns"}  # units of what is no time
OF_TURNS = (Measure.TURNS, Measure.ENVIRONMENT)  # are of runs with an environment alone
NAMES = {  # for every view
    Measure.LENGTH: "response tokens",
    Measure.TURNS: "turns of the model",
    Measure.REPLICA_WAIT: "wait for a replica",
    Measure.GENERATION: "generation",
    Measure.FIRST_TOKENS: "to the first tokens",
    Measure.ENVIRONMENT: "environment",
    Measure.SCORER_WAIT: "wait for a scorer",
    Measure.REWARD: "scoring",
    Measure.GROUP_WAIT: "wait for the group",
    Measure.BUFFER: "in the buffer",
    Measure.END_TO_END: "issued to consumed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Figures of `count` values; percentiles are numpy's, between the two nearest values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @property
    def tail(self) -> float | None:
        """p95 over p50; None where the median is below a millisecond (no token), so next to nothing."""
        return self.p95 / self.p50 if self.p50 >= _LEAST_MEDIAN else None

    @property
    def percentiles(self) -> dict[str, float]:
        """Percentiles that page and gauges show, e.g. `{"p50": 12.0, "p95": 60.5, "p99": 100.0}`."""
        return {"p50": self.p50, "p95": self.p95, "p99": self.p99}


Distributions = dict[Measure, Distribution]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tails:
    """Distributions over all, and by what tells trajectories apart; empty where that is one for all."""

    overall: Distributions
    longest_over_mean: Distribution | None  # time on replicas, of groups with two finished members or more
    by_replica: dict[str, Distributions]  # the last that had it
    by_version: dict[str, Distributions]  # that it began under, e.g. "0-3"
    by_task: dict[str, Distributions]


def measure_tails(trajectories: Trajectories) -> Tails:
    """Distributions of all measures."""
    values = measures(trajectories)
    versions, label = _version_bins(trajectories.oldest_version)
    tasks = trajectories.tasks
    return Tails(
        overall={name: found for name, column in values.items() if (found := distribution(column)) is not None},
        longest_over_mean=distribution(
            longest_over_mean(trajectories, trajectories.finished_s - trajectories.started_s)
        ),
        by_replica=_by(trajectories.replica, values, str),
        by_version=_by(versions, values, label),
        by_task=_by(trajectories.task, values, lambda task: tasks[task] or "(no name)"),
    )


def measures(t: Trajectories) -> dict[Measure, Times]:
    """Each measure of each trajectory, [N]; NaN where it has not come so far. Of turns where there are some."""
    length = np.where(t.finish >= 0, t.length, np.nan)
    consumed = t.is_status(Status.CONSUMED)
    environment_s = t.environment_s.astype(np.float64)
    on_replicas_s = t.finished_s - t.started_s
    found = {
        Measure.LENGTH: length,
        Measure.TURNS: np.where(t.turns >= 0, t.turns, np.nan),
        Measure.REPLICA_WAIT: t.started_s - t.issued_s,
        Measure.GENERATION: np.maximum(on_replicas_s - np.nan_to_num(environment_s), 0.0),
        Measure.FIRST_TOKENS: t.queue_s.astype(np.float64),
        Measure.ENVIRONMENT: environment_s,
        Measure.SCORER_WAIT: np.maximum(t.scored_s - t.finished_s - t.score_s, 0.0),
        Measure.REWARD: t.score_s.astype(np.float64),
        Measure.GROUP_WAIT: group_wait(t),
        Measure.BUFFER: np.where(consumed, t.ended_s - t.ready_s, np.nan),
        Measure.END_TO_END: np.where(consumed, t.ended_s - t.issued_s, np.nan),
    }
    return {name: column for name, column in found.items() if t.has_turns or name not in OF_TURNS}


def group_wait(t: Trajectories) -> Times:
    """Seconds [N] from its own score until the last member of its group was scored, or dropped unscored.

    NaN for what was never scored, and in groups with a member that is neither yet.
    """
    settled_s = np.where(np.isnan(t.scored_s), t.ended_s, t.scored_s)
    last = np.full(_num_groups(t), -np.inf)
    np.maximum.at(last, t.group, np.where(np.isnan(settled_s), np.inf, settled_s))
    waited_s = last[t.group] - t.scored_s
    return np.where(np.isinf(waited_s), np.nan, waited_s)


def longest_over_mean(t: Trajectories, spent: Times) -> Times:
    """The longest of a group over its mean, of times [N]: [groups with two finished members or more]."""
    finished = ~np.isnan(spent)
    groups, seconds = t.group[finished], spent[finished]
    count = np.bincount(groups, minlength=_num_groups(t))
    total = np.bincount(groups, seconds, minlength=len(count))
    longest = np.zeros(len(count))
    np.maximum.at(longest, groups, seconds)
    several = (count >= 2) & (total > 0)
    ratio: Times = longest[several] * count[several] / total[several]
    return ratio


def distribution(values: npt.NDArray[np.floating]) -> Distribution | None:
    """Distribution of the values that are not NaN; None if there are none."""
    known = values[~np.isnan(values)].astype(np.float64)
    if not len(known):
        return None
    p50, p90, p95, p99, most = np.percentile(known, _PERCENTILES).tolist()
    return Distribution(count=len(known), mean=float(known.mean()), p50=p50, p90=p90, p95=p95, p99=p99, max=most)


def _by(keys: Ints, values: dict[Measure, Times], label: Callable[[int], str]) -> dict[str, Distributions]:
    """For each key, where there are several; -1 is none."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    starts = np.flatnonzero(np.diff(ordered, prepend=-2))
    bounds = [*starts.tolist(), len(ordered)]
    slices = [(int(ordered[start]), start, end) for start, end in pairwise(bounds) if ordered[start] >= 0]
    if len(slices) < 2:
        return {}
    out: dict[str, Distributions] = {label(key): {} for key, _, _ in slices}
    for name, column in values.items():
        column = column[order]
        for key, start, end in slices:
            found = distribution(column[start:end])
            if found is not None:
                out[label(key)][name] = found
    return out


def _version_bins(versions: Ints) -> tuple[Ints, Callable[[int], str]]:
    """The bin of each, and what a bin is called: at most `MOST_ROWS` of equal width."""
    newest = int(versions.max(initial=-1))
    width = -(-(newest + 1) // MOST_ROWS) or 1
    bins = np.where(versions < 0, -1, versions // width).astype(np.int32)

    def label(bin: int) -> str:
        last = min((bin + 1) * width - 1, newest)
        return str(last) if width == 1 else f"{bin * width}-{last}"

    return bins, label


def _num_groups(t: Trajectories) -> int:
    return int(t.group.max(initial=-1)) + 1


_USUAL_PERCENTILE = 90
_RAMP_DOWN = 0.25
_LONGEST_S = 5.0  # a sample speaks for no longer: the controller was down


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Shares as the module says; None without anything to take a share of."""

    group_wait: float | None
    slots: float | None
    kv: float | None


def measure_stragglers(t: Trajectories, fleet: Sequence[FleetRow]) -> Stragglers:
    """Shares of all three totals; a replica has the samples in which it was there."""
    now = max(_last(column) for column in (t.issued_s, t.finished_s, t.scored_s, t.ended_s))
    live_s = float(np.nansum(np.where(np.isnan(t.ended_s), now, t.ended_s) - t.issued_s))
    waited_s = float(np.nansum(group_wait(t)))
    at = np.array([row.rl_s for row in fleet], np.float64)
    known = sorted({replica for row in fleet for replica in row.indices})
    column = {replica: place for place, replica in enumerate(known)}
    seconds, running, kv_use = np.zeros((3, len(fleet), len(column)))
    for sample, (row, elapsed_s) in enumerate(zip(fleet, np.diff(at, prepend=0.0), strict=True)):
        there = [column[replica] for replica in row.indices]
        seconds[sample, there] = np.clip(elapsed_s, 0.0, _LONGEST_S)
        running[sample, there], kv_use[sample, there] = row.running, row.kv_use
    return Stragglers(
        waited_s / live_s if live_s > 0 else None,
        _idle_share(seconds, running, running),
        _idle_share(seconds, running, kv_use),
    )


def _idle_share(seconds: Times, running: Times, used: Times) -> float | None:
    """Share of what is usually used, in ramp-down; all [S, R], 0 where a replica was not there."""
    ramp_down = (running > 0) & (running < _RAMP_DOWN * _usual(running, running))
    usual = _usual(running, used)
    total = float(np.sum(seconds * usual))
    idle = float(np.sum(np.where(ramp_down, seconds * np.maximum(usual - used, 0.0), 0.0)))
    return idle / total if total > 0 else None


def _usual(running: Times, used: Times) -> Times:
    """[R]"""
    columns = [used[running[:, replica] > 0, replica] for replica in range(used.shape[1])]
    return np.array([np.percentile(column, _USUAL_PERCENTILE) if len(column) else 0.0 for column in columns])


def _last(times: Times) -> float:
    known = times[~np.isnan(times)]
    return float(known.max()) if len(known) else 0.0


@dataclass(frozen=True, slots=True)
class Staleness:
    """Figures of consumed trajectories, e.g. `Staleness(0.75, 2, {0: 2, 1: 1, 2: 1})`."""

    mean: float
    max: int
    counts: dict[int, int]  # trajectories at each staleness, ascending


def measure_staleness(trajectories: Trajectories) -> Staleness | None:
    """Staleness so far; None before anything was consumed."""
    staleness = trajectories.staleness[trajectories.is_status(Status.CONSUMED)]
    if not len(staleness):
        return None
    counts = Counter(staleness.tolist())
    return Staleness(float(staleness.mean()), int(staleness.max()), dict(sorted(counts.items())))


def tell_seconds(value: float) -> str:
    """Three digits at most, in the unit that suits."""
    if value < 0.0005:
        return "<1 ms"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"
