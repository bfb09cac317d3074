"""Learning against its costs: evaluations and reward over time, trained tokens and device-hours.

The launcher and `laminar compare` read curves here. A device is a GPU where the run has any: of engines
(attached servers included), the learner, and servers of the reward. Without GPUs a device is a process: a replica,
a rank of the learner, or a reference stage. A replica counts while it is in the fleet, all other devices during
the whole RL phase.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import numpy as np

from laminar_lab.report.snapshot import read_steps
from laminar_py.config import RunConfig, load_config
from laminar_py.config.cluster import Device
from laminar_py.ledger import read_evaluations, read_rows, reading
from laminar_py.records import StepRow
from laminar_py.records.evaluations import SetFigures, problem_of
from laminar_py.records.events import Evaluated
from laminar_py.records.metrics import FleetRow
from laminar_py.records.trajectory import Kind

# 0.975 quantiles of Student's t by degrees of freedom, from 1; beyond the table within 0.001
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
Z_975 = 1.96  # of the normal distribution
REWARD_STEPS = 10  # steps whose mean is a point of the reward's curve


def t_quantile(degrees: float) -> float:
    """Return the 0.975 quantile of Student's t with at least one degree of freedom."""
    if degrees <= len(T_975):
        return float(np.interp(degrees, range(1, len(T_975) + 1), T_975))
    return Z_975 + 2.372 / (degrees - 1.2)


def half_width(values: Sequence[float]) -> float | None:
    """Return half of the 95 % t-interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return t_quantile(len(values) - 1) * stdev(values) / sqrt(len(values))


def format_mean(values: Sequence[float], *, seeds: int) -> str:
    """Return the mean with half of its 95 % t-interval, e.g. "0.412 ± 0.031", or "0.412, one seed".

    Where not all `seeds` have a value, it says how many have: "0.412, 1 of 3 seeds".
    """
    if not values:
        return "–"
    half = half_width(values)
    interval = "" if half is None else f" ± {half:,.3f}"
    having = f", {len(values)} of {seeds} seeds" if len(values) < seeds else ", one seed" if half is None else ""
    return f"{fmean(values):,.3f}{interval}{having}"


BAR = 19  # characters of a drawn interval; a row fits 80 columns


def draw_mean(values: Sequence[float], *, low: float, high: float) -> str:
    """Return a mean and its 95 % t-interval on an axis from `low` to `high`, e.g. "····├──●──┤····".

    An interval that leaves the axis has no end there, and one value has no interval.
    """

    def place(value: float) -> int:
        return round((min(max(value, low), high) - low) / (high - low) * (BAR - 1))

    cells = ["·"] * BAR
    if not values:
        return "".join(cells)
    mean, half = fmean(values), half_width(values) or 0.0
    first, last = place(mean - half), place(mean + half)
    cells[first : last + 1] = "─" * (last + 1 - first)
    if half and mean - half >= low:
        cells[first] = "├"
    if half and mean + half <= high:
        cells[last] = "┤"
    cells[place(mean)] = "●"
    return "".join(cells)


@dataclass(frozen=True, slots=True)
class FleetSizes:
    """Replicas and learner ranks over seconds of RL, from `fleet.jsonl`: `replicas[i]` from `at_s[i]` on."""

    at_s: tuple[float, ...] = ()
    replicas: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()  # 0: as the config says

    def replica_seconds(self, rl_s: float) -> float:
        """Return replica seconds until `rl_s`; the first number holds from the start of RL."""
        return self._seconds(self.replicas, rl_s)

    def rank_seconds(self, rl_s: float, *, usual: int) -> float:
        """Return seconds of learner ranks until `rl_s`; `usual`: as the config says."""
        return self._seconds([count or usual for count in self.ranks], rl_s)

    def _seconds(self, counts: Sequence[int], rl_s: float) -> float:
        edges = [0.0, *self.at_s[1:], math.inf]
        spans = zip(edges, edges[1:], counts, strict=False)
        return sum(max(0.0, min(rl_s, end) - start) * count for start, end, count in spans)


def read_fleet_sizes(run: Path) -> FleetSizes:
    """Read the fleet sizes of a run, row by row."""
    changes: list[tuple[float, int, int]] = []
    for row in read_rows(run / "fleet.jsonl", FleetRow):
        if not changes or (len(row.running), row.ranks) != changes[-1][1:]:
            changes.append((row.rl_s, len(row.running), row.ranks))
    return FleetSizes(*zip(*changes, strict=True)) if changes else FleetSizes()


def count_devices(config: RunConfig) -> tuple[int, str]:
    """Return the number and the kind of a run's devices: "GPU", "emulated GPU" or "process"."""
    rollout, learner = config.rollout, config.learner
    if rollout.engine.emulates is not None:
        return rollout.replicas + rollout.engine.emulates.learner_devices, "emulated GPU"
    attached = rollout.replicas * rollout.engine.gpus if rollout.engine.hosts else 0
    if gpus := config.gpus + attached:
        return gpus, "GPU"
    return rollout.replicas + learner.world_size + len(config.algorithm.computing_stages), "process"


def device_seconds(config: RunConfig, sizes: FleetSizes, rl_s: float) -> float:
    """Return the seconds of a run's devices until `rl_s`; `config` has the replicas at any moment."""
    devices, kind = count_devices(config)
    if not sizes.replicas:
        return devices * rl_s
    rollout, ranks = config.rollout, config.learner.world_size
    each = rollout.engine.gpus if kind == "GPU" else 1
    spent = (devices - each * rollout.replicas) * rl_s + each * sizes.replica_seconds(rl_s)
    if kind == "process" or (kind == "GPU" and config.learner_device is Device.CUDA):
        spent += sizes.rank_seconds(rl_s, usual=ranks) - ranks * rl_s
    return spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A value, and the run's costs by then.

    E.g. a reward is `Point(step=30, rl_s=29.0, tokens=240_000, device_hours=0.024, value=0.91)`.
    """

    step: int
    rl_s: float
    tokens: int  # trained
    device_hours: float
    value: float  # of an evaluation its mean reward
    figures: SetFigures | None = None  # of an evaluation
    pass_id: str = ""  # of an evaluation


def read_curves(run: Path) -> dict[str, list[Point]]:
    """Read the evaluations of each set, in the order of time, with the sets in the order of the config.

    Raises `ConfigError` where `run` is no run folder.
    """
    config = load_config(run / "config.yaml", [])
    return evaluation_curves(config, read_evaluations(run), read_steps(run), read_fleet_sizes(run))


def evaluation_curves(
    config: RunConfig, evaluations: Iterable[Evaluated], steps: Sequence[StepRow], sizes: FleetSizes
) -> dict[str, list[Point]]:
    """Return the curve of each set from evaluations in the order of time."""
    point = _point_maker(config, steps, sizes)
    curves: dict[str, list[Point]] = {name: [] for name in config.eval.sets}
    for event in evaluations:
        curves.setdefault(event.set_name, []).append(point(event.step, event.rl_s, event.figures, event.pass_id))
    return {name: points for name, points in curves.items() if points}


def read_problem_rewards(run: Path) -> dict[str, dict[int, float]]:
    """Read the mean reward of each problem in each evaluation, e.g. `{"e4-aime": {0: 1.0, 1: 0.25}}`.

    Answers without a score are left out. Raises `ConfigError` where the ledger cannot be read.
    """
    rewards: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    query = "SELECT group_id, id, reward FROM trajectory WHERE kind = ? AND reward IS NOT NULL"
    with reading(run) as connection:
        for group_id, id, reward in connection.execute(query, (Kind.EVAL,)):
            rewards[group_id][problem_of(id)].append(reward)
    return {group_id: {it: fmean(of_it) for it, of_it in found.items()} for group_id, found in rewards.items()}


def reward_curve(config: RunConfig, steps: Sequence[StepRow], sizes: FleetSizes | None = None) -> list[Point]:
    """Return the mean reward of the last `REWARD_STEPS` steps with one, at each of them."""
    point = _point_maker(config, steps, sizes or FleetSizes())
    rewarded = [row for row in steps if not math.isnan(row.reward)]
    rewards = [row.reward for row in rewarded]
    return [
        point(row.step, row.rl_s, fmean(rewards[max(0, place + 1 - REWARD_STEPS) : place + 1]))
        for place, row in enumerate(rewarded)
    ]


def _point_maker(config: RunConfig, steps: Sequence[StepRow], sizes: FleetSizes) -> Callable[..., Point]:
    """Return a function that makes a point from a step, its seconds of RL, and a value or an evaluation."""
    at = np.array([0.0, *(row.rl_s for row in steps)])
    tokens = np.array([0.0, *(row.trained_tokens for row in steps)])

    def make_point(step: int, rl_s: float, found: SetFigures | float, pass_id: str = "") -> Point:
        return Point(
            step=step,
            rl_s=rl_s,
            tokens=int(np.interp(rl_s, at, tokens)),
            device_hours=device_seconds(config, sizes, rl_s) / 3600,
            value=found.mean.value if isinstance(found, SetFigures) else found,
            figures=found if isinstance(found, SetFigures) else None,
            pass_id=pass_id,
        )

    return make_point
