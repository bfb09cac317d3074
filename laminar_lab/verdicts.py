"""Which config is better at which budget, and whether its seeds can tell.

`laminar compare` prints a verdict for each pair of configs and budget. A budget is in seconds of RL, trained
tokens or device-hours, and both configs have had it. Between two evaluations a value lies on the line through
them, since runs are hardly ever evaluated at the same second.

**The interval of a difference.** A bootstrap over three seeds finds a difference between equal configs in a
quarter of all comparisons, since three signs agree that often. So the spread over seeds counts by Student's t,
over pairs of runs with the same seed where at least three seeds (or all) have run both configs, else over two
samples by Welch. A bootstrap over problems adds how far the difference depends on the held-out problems, with the
same draws for all runs. The two half-widths add as independent errors do (`tests/launcher/test_verdicts.py`
simulates it).
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import fmean, stdev

import numpy as np

from laminar_lab.curves import Point, half_width, t_quantile
from laminar_py.config.loading import flatten
from laminar_py.config.run import RunConfig
from laminar_py.records.evaluations import RESAMPLES, SEED, TAILS
from laminar_py.records.host import counted

LEAST_PAIRS = 3  # runs of equal seeds that are compared as pairs
STAGES = (0.5, 1.0)  # budgets, as shares of the cost that every run has had
CONFOUNDED = "CONFOUNDED"  # begins a line that names confounders
_BLOCK = 100  # resamples at a time, which bounds the memory
# beginnings of settings that change costs, learning or the measure, by topic; a setting has the first that fits
CONFOUNDERS = {
    "evaluation": ("eval.",),
    "devices": (
        *("rollout.replicas", "rollout.engine.", "learner.world_size", "learner.context_parallel"),
        *("cluster.", "reward.servers", "reward.workers"),
    ),
    "task": ("data.", "environment", "reward."),
    "model": ("model.", "warm_start", "learner.lora"),
    "sampling": ("rollout.sampling.", "rollout.max_len"),
    "batch": ("rollout.group_size", "rollout.prompts_per_step"),
    "length": ("steps", "max_rl_seconds"),
    "algorithm": ("algorithm.",),
    "staleness and replay": ("staleness.", "buffer.", "learner.publish_every"),
    "schedule": (
        *("schedule", "repack.", "rollout.on_new_weights"),
        *("rollout.without_signal", "rollout.max_refill", "rollout.group_deadline_s"),
    ),
    "optimizer": ("learner.", "packer."),
}
OWN = ("name", "runs", "tracking.", "warm_start.cache")  # settings that say nothing about how a run learns


@dataclass(frozen=True, slots=True)
class Axis:
    """A cost of a run."""

    name: str  # on a chart
    cost: Callable[[Point], float]
    format: Callable[[float], str]  # a budget in words, e.g. "60 s"


AXES = (
    Axis("seconds of RL", lambda point: point.rl_s, "{:.3g} s".format),
    Axis("trained tokens", lambda point: float(point.tokens), "{:,.0f} tokens".format),
    Axis("device-hours", lambda point: point.device_hours, "{:.3g} device-hours".format),
)
DEVICE_HOURS = AXES[2]


@dataclass(frozen=True, slots=True)
class SeedCurve:
    """The curve of one seed, and for each evaluation in it the mean reward of each problem, by id of the pass."""

    points: Sequence[Point]  # in the order of time
    answers: Mapping[str, Mapping[int, float]]  # {} for rewards in training


Seeds = Mapping[int, SeedCurve]  # of one config


@dataclass(frozen=True, slots=True)
class Result:
    """A run at a budget, e.g. `Result(0.75, {0: 1.0, 1: 0.5})`."""

    value: float
    problems: Mapping[int, float]  # mean rewards; {} where unknown


def value_at(points: Sequence[Point], axis: Axis, budget: float) -> float | None:
    """Return the value at a budget, on the line through the evaluations around it; None before the first.

    After the last evaluation it is the last value.
    """
    found = _around(points, axis, budget)
    return None if found is None else _between(found[0].value, found[1].value, found[2])


def result_at(curve: SeedCurve, axis: Axis, budget: float) -> Result | None:
    """Return a run's result at a budget, as `value_at` does."""
    found = _around(curve.points, axis, budget)
    if found is None:
        return None
    before, after, share = found
    first, last = (curve.answers.get(point.pass_id, {}) for point in (before, after))
    problems = {it: _between(first[it], last[it], share) for it in first if it in last}
    return Result(_between(before.value, after.value, share), problems)


def _around(points: Sequence[Point], axis: Axis, budget: float) -> tuple[Point, Point, float] | None:
    """Return the points before and after a budget, and its place between them, from 0 to 1; None before all."""
    inside = sum(axis.cost(point) <= budget * (1 + 1e-9) for point in points)
    if not inside:
        return None
    before, after = points[inside - 1], points[min(inside, len(points) - 1)]
    span = axis.cost(after) - axis.cost(before)
    return before, after, max(0.0, budget - axis.cost(before)) / span if span else 0.0


def _between(first: float, last: float, share: float) -> float:
    return first + share * (last - first)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanDifference:
    """A mean over seeds minus another, with its 95 % interval, e.g. 0.02 from -0.01 to 0.05 over 3 pairs."""

    value: float
    low: float
    high: float
    pairs: int  # of runs with the same seed; 0: the seeds were not paired


def difference(first: Mapping[int, Result], second: Mapping[int, Result]) -> MeanDifference | None:
    """Return the difference of two configs' results, which are by seed; None if one has fewer than two seeds."""
    common = sorted(first.keys() & second.keys())
    is_paired = len(common) >= LEAST_PAIRS or (len(common) >= 2 and first.keys() == second.keys())
    ours, theirs = ([results[seed] for seed in (common if is_paired else results)] for results in (first, second))
    if min(len(ours), len(theirs)) < 2:
        return None
    means = [fmean(result.value for result in results) for results in (ours, theirs)]
    if is_paired:
        half = half_width([one.value - other.value for one, other in zip(ours, theirs, strict=True)]) or 0.0
    else:
        half = _welch_half([one.value for one in ours], [other.value for other in theirs])
    value = means[0] - means[1]
    low, high = _problem_errors(ours, theirs)
    return MeanDifference(
        value=value,
        low=value - math.hypot(half, low),
        high=value + math.hypot(half, high),
        pairs=len(common) if is_paired else 0,
    )


def _welch_half(first: Sequence[float], second: Sequence[float]) -> float:
    """Return half of the 95 % interval of the difference between two means, by Welch's t."""
    errors = [stdev(values) ** 2 / len(values) for values in (first, second)]
    if not sum(errors):
        return 0.0
    parts = [error**2 / (len(values) - 1) for error, values in zip(errors, (first, second), strict=True)]
    return t_quantile(sum(errors) ** 2 / sum(parts)) * math.sqrt(sum(errors))


def _problem_errors(first: Sequence[Result], second: Sequence[Result]) -> tuple[float, float]:
    """Return how far the difference lies above and below its 95 % interval's ends, by resampling problems."""
    known = sorted(set.intersection(*(set(result.problems) for result in (*first, *second))))
    if len(known) < 2:
        return 0.0, 0.0
    ours, theirs = (
        np.mean([[result.problems[it] for it in known] for result in results], axis=0)
        for results in (first, second)
    )
    of_problems, draws = ours - theirs, np.random.default_rng(SEED)  # [problems]
    size = len(known)
    means = np.concatenate(
        [of_problems[draws.integers(size, size=(_BLOCK, size))].mean(axis=1) for _ in range(RESAMPLES // _BLOCK)]
    )
    low, high = np.percentile(means, TAILS)
    return float(max(0.0, of_problems.mean() - low)), float(max(0.0, high - of_problems.mean()))


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetVerdict:
    """Two configs at one budget, e.g. at "60 s": 0.94 and 0.95, and a difference that is not certain."""

    budget: str
    values: tuple[tuple[float, ...], tuple[float, ...]]  # of each config, by seed
    difference: MeanDifference | None  # None: too few seeds

    @property
    def better(self) -> int | None:
        """Place of the better config in the pair; None if the seeds cannot tell."""
        found = self.difference
        return None if found is None or found.low <= 0.0 <= found.high else int(found.value < 0.0)

    def describe(self, names: Sequence[str]) -> str:
        """Text such as "at 60 s: a 0.940 ± 0.020, b 0.950 ± 0.010: 3 pairs of seeds cannot tell (...)"."""
        means = [f"{name} {_mean(values)}" for name, values in zip(names, self.values, strict=True)]
        start, found = f"at {self.budget}: {', '.join(means)}", self.difference
        if found is None:
            return f"{start}: one seed cannot tell; run three or more of each"
        seeds = " and ".join(str(len(values)) for values in self.values) + " seeds"
        seeds = counted(found.pairs, "pair") + " of seeds" if found.pairs else seeds
        if self.better is None:
            return (
                f"{start}: {seeds} cannot tell (difference {found.value:.3f}, {found.low:.3f} to {found.high:.3f})"
            )
        low, high = sorted((abs(found.low), abs(found.high)))
        interval = f"{low:.3f} to {high:.3f}, {seeds}"
        return f"{start}: {names[self.better]} is better by {abs(found.value):.3f} ({interval})"


def _mean(values: Sequence[float]) -> str:
    half = half_width(values)
    return f"{fmean(values):.3f}" + ("" if half is None else f" ± {half:.3f}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Verdicts on two configs, by their places among the configs."""

    first: int
    second: int
    verdicts: tuple[BudgetVerdict, ...]
    confounders: dict[str, tuple[str, ...]]  # settings that differ beside the setting under study, by topic

    def lines(self, names: Sequence[str], measure: str) -> list[str]:
        """Return a title, a line for each verdict, and a line that begins with `CONFOUNDED` if there are any."""
        both = names[self.first], names[self.second]
        found = [f"{both[0]} and {both[1]}, by {measure}", *(verdict.describe(both) for verdict in self.verdicts)]
        topics = [f"{topic} ({', '.join(settings)})" for topic, settings in self.confounders.items()]
        if topics:
            found.append(f"{CONFOUNDED} by {', '.join(topics)}: a difference may come from there")
        return found


def judge(configs: Sequence[RunConfig], curves: Sequence[Seeds]) -> tuple[Pair, ...]:
    """Return verdicts on each pair of configs, whose seeds' curves are `curves`.

    The budgets are `STAGES` of the costs that every run of the pair has had. Device-hours are left out where all
    of them spend as many in a second.
    """
    return tuple(
        Pair(
            first=first,
            second=second,
            verdicts=tuple(
                found
                for axis, budget in _budgets([*curves[first].values(), *curves[second].values()])
                if (found := _verdict(curves[first], curves[second], axis, budget)) is not None
            ),
            confounders=find_confounders(configs[first], configs[second]),
        )
        for first, second in combinations(range(len(configs)), 2)
    )


def _budgets(curves: Sequence[SeedCurve]) -> Iterator[tuple[Axis, float]]:
    """Yield budgets that all of these curves reach; none if a curve is empty."""
    if not all(curve.points for curve in curves):
        return
    ends = [curve.points[-1] for curve in curves]
    rates = [end.device_hours / end.rl_s for end in ends if end.rl_s]
    for axis in AXES:
        most = min(map(axis.cost, ends))
        in_proportion = axis is DEVICE_HOURS and rates and max(rates) <= min(rates) * 1.001
        if most > 0 and not in_proportion:
            yield from ((axis, stage * most) for stage in STAGES)


def _verdict(first: Seeds, second: Seeds, axis: Axis, budget: float) -> BudgetVerdict | None:
    """Return the verdict on two configs at a budget; None where one has no result yet."""
    at = partial(result_at, axis=axis, budget=budget)
    ours, theirs = (
        {seed: result for seed, curve in seeds.items() if (result := at(curve))} for seeds in (first, second)
    )
    if not ours or not theirs:
        return None
    first_values, second_values = (tuple(result.value for result in found.values()) for found in (ours, theirs))
    return BudgetVerdict(
        budget=axis.format(budget),
        values=(first_values, second_values),
        difference=difference(ours, theirs),
    )


def find_confounders(first: RunConfig, second: RunConfig) -> dict[str, tuple[str, ...]]:
    """Return settings that differ and that change costs, learning or the measure, by topic of `CONFOUNDERS`.

    Where only settings of one topic differ, that topic is under study and is none of them, unless it is the
    evaluation. Where more differ, all are named, since nobody can tell which one is under study.
    """
    flat = [flatten(config) for config in (first, second)]
    keys = [key for key in dict.fromkeys([*flat[0], *flat[1]]) if not key.startswith((*OWN, "seed"))]
    differ = [key for key in keys if json.dumps(flat[0].get(key)) != json.dumps(flat[1].get(key))]
    topics: dict[str, list[str]] = defaultdict(list)
    for key in differ:
        topics[next((topic for topic, names in CONFOUNDERS.items() if key.startswith(names)), "")].append(key)
    if len(topics) == 1 and "evaluation" not in topics:
        return {}
    return {topic: tuple(topics[topic]) for topic in CONFOUNDERS if topic in topics}


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """The mean over seeds along an axis [N], with the ends of its 95 % t-interval; one seed has no interval."""

    x: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def band(seeds: Seeds, axis: Axis, *, points: int) -> Band:
    """Return the band of one config where all of its seeds have a value, at so many budgets; empty without any."""
    curves = [curve.points for curve in seeds.values()]
    if not all(curves):
        return Band(x=[], mean=[], low=[], high=[])
    start = max(axis.cost(curve[0]) for curve in curves)
    end = min(axis.cost(curve[-1]) for curve in curves)
    budgets = np.linspace(start, max(start, end), points).tolist()
    at = [[value for curve in curves if (value := value_at(curve, axis, x)) is not None] for x in budgets]
    means, halves = [fmean(values) for values in at], [half_width(values) or 0.0 for values in at]
    return Band(
        x=budgets,
        mean=means,
        low=[mean - half for mean, half in zip(means, halves, strict=True)],
        high=[mean + half for mean, half in zip(means, halves, strict=True)],
    )
