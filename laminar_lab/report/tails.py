"""Distributions of times and lengths of trajectories, and of staleness, from the arrays alone.

`RunReport` calls it for every view. Everything is vectorised: a million trajectories take seconds.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from laminar_lab.report.trajectories import Ints, Times, Trajectories
from laminar_py.records.trajectory import Status

_LEAST_MEDIAN = 0.001  # seconds, tokens or turns
_PERCENTILES = (50, 90, 95, 99, 100)


class Measure(StrEnum):
    """A length in tokens, a number of turns, or a time in seconds between two events of a trajectory."""

    LENGTH = "length"  # of a finished response
    TURNS = "turns"  # of the model
    REPLICA_WAIT = "replica_wait"  # issued until a replica has it
    GENERATION = "generation"  # handed to a replica until finished, without environments; with queue and moves
    FIRST_TOKENS = "first_tokens"  # on the last replica until the engine delivered tokens
    ENVIRONMENT = "environment"  # its environment worked, or it waited for room there
    SCORER_WAIT = "scorer_wait"  # finished until scored, without the scoring itself
    REWARD = "reward"  # the scoring
    GROUP_WAIT = "group_wait"  # scored until the last member of its group was scored or dropped
    BUFFER = "buffer"  # ready until consumed
    END_TO_END = "end_to_end"  # issued until consumed


COUNTED = {Measure.LENGTH: "tokens", Measure.TURNS: "turns"}  # units of measures that are no times
OF_TURNS = (Measure.TURNS, Measure.ENVIRONMENT)  # only in runs with an environment
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
    """Mean and percentiles of `count` values; numpy interpolates a percentile between the two nearest values."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @property
    def tail(self) -> float | None:
        """p95 over p50; None for a median below a millisecond, whose ratio means nothing."""
        return self.p95 / self.p50 if self.p50 >= _LEAST_MEDIAN else None

    @property
    def percentiles(self) -> dict[str, float]:
        """Percentiles that the page and `/metrics` show, e.g. `{"p50": 12.0, "p95": 60.5, "p99": 100.0}`."""
        return {"p50": self.p50, "p95": self.p95, "p99": self.p99}


Distributions = dict[Measure, Distribution]


def measure_tails(trajectories: Trajectories) -> Distributions:
    """Return the distribution of each measure that some trajectory has."""
    values = measures(trajectories)
    return {name: found for name, column in values.items() if (found := distribution(column)) is not None}


def measures(t: Trajectories) -> dict[Measure, Times]:
    """Return each measure of each trajectory [N], NaN where unknown; measures of turns only if some are known."""
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
    """Return seconds [N] from a trajectory's score until the last of its group was scored, or dropped unscored.

    It is NaN for an unscored trajectory, and in a group with a member that is neither scored nor dropped.
    """
    done_s = np.where(np.isnan(t.scored_s), t.ended_s, t.scored_s)
    last = np.full(int(t.group.max(initial=-1)) + 1, -np.inf)
    np.maximum.at(last, t.group, np.where(np.isnan(done_s), np.inf, done_s))
    waited_s = last[t.group] - t.scored_s
    return np.where(np.isinf(waited_s), np.nan, waited_s)


def distribution(values: npt.NDArray[np.floating]) -> Distribution | None:
    """Return the distribution of the values that are not NaN; None without any."""
    known = values[~np.isnan(values)].astype(np.float64)
    if not len(known):
        return None
    p50, p90, p95, p99, most = np.percentile(known, _PERCENTILES).tolist()
    return Distribution(count=len(known), mean=float(known.mean()), p50=p50, p90=p90, p95=p95, p99=p99, max=most)


@dataclass(frozen=True, slots=True)
class Staleness:
    """Figures of consumed or replayed trajectories, e.g. `Staleness(0.75, 2, {0: 2, 1: 1, 2: 1})`."""

    mean: float
    max: int
    counts: dict[int, int]  # trajectories at each staleness, ascending


def consumed_staleness(trajectories: Trajectories) -> Ints:
    """Return [N] staleness of the consumed trajectories."""
    return trajectories.staleness[trajectories.is_status(Status.CONSUMED)]


def measure_staleness(staleness: Ints) -> Staleness | None:
    """Return the figures of [N] staleness; None without any."""
    if not len(staleness):
        return None
    counts = Counter(staleness.tolist())
    return Staleness(float(staleness.mean()), int(staleness.max()), dict(sorted(counts.items())))


def format_seconds(value: float) -> str:
    """Return seconds with at most three digits, in milliseconds or seconds."""
    if value < 0.0005:
        return "<1 ms"
    if value < 0.9995:
        return f"{value * 1000:.0f} ms"
    return f"{value:.3g} s" if value < 999.5 else f"{value:,.0f} s"


def format_duration(seconds: float) -> str:
    """Return a duration with two digits in the unit that people say, e.g. "45 s", "12 min" or "8.2 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
