"""What `laminar bench repack` measures: how long a plan takes, repacking on a fleet, and whole schedules."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from laminar_py.bench.repack_schedules import schedule_rows
from laminar_py.bench.repack_workload import (
    MAX_STALL_S,
    PREFILL_TOKENS_PER_S,
    ROOFLINE_BATCH,
    SIGMA,
    workload_rows,
)
from laminar_py.bench.report import Row
from laminar_py.repack.planner import PredictivePlanner
from laminar_py.repack.signals import EngineSpeed, Numbers, RemainingTokens
from laminar_py.types import Held, Survey

PARTS = ("plan", "workload", "schedules")
SIGMA_20X = 1.288  # p99 is 20 times the median


def rows(*, seeds: Sequence[int], parts: Sequence[str], tell: Callable[[str], None]) -> list[Row]:
    """The figures of these parts; the schedules with the first seed alone."""
    out = plan_rows() if "plan" in parts else []
    if "workload" in parts:
        out += workload_rows(seeds=seeds, tell=tell)
    if "schedules" in parts:
        with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
            for sigma in (SIGMA, SIGMA_20X):
                out += schedule_rows(seeds=seeds[:1], sigma=sigma, tell=tell, folder=Path(folder))
    return out


def plan_rows(*, repeats: int = 21) -> list[Row]:
    """How long the predictive planner takes for a fleet in one version group that is all in ramp-down."""
    conditions = f"one version group, log-normal lengths, none waits, median of {repeats}"
    speed = EngineSpeed(0.02, 0.0, 8e-8, PREFILL_TOKENS_PER_S, ROOFLINE_BATCH)
    remaining = RemainingTokens(16_384)

    def to_come(held: Sequence[Held]) -> Numbers:
        return remaining.expected(np.array([item.length for item in held], np.float64))

    planner = PredictivePlanner(speed, to_come, max_stall_s=MAX_STALL_S)
    times, moves = [], 0
    for seed in range(repeats):
        group = make_surveys(replicas=256, trajectories=8192, seed=seed)
        remaining.look(held.length for survey in group for held in survey.running)
        began = time.perf_counter()
        moves = len(planner.plan(group))
        times.append(time.perf_counter() - began)
    return [Row("plan_256x8192_ms", 1e3 * median(times), "ms", f"{conditions}; {moves} moves in the last")]


def make_surveys(*, replicas: int, trajectories: int, seed: int) -> list[Survey]:
    """A fleet whose replicas have about as many each, some few and some many."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(trajectories, rng.dirichlet(np.full(replicas, 3.0)))
    surveys = []
    for replica, count in enumerate(counts.tolist()):
        lengths = np.minimum(16_000, 1500 * np.exp(0.99 * rng.standard_normal(count))).astype(int)
        held = tuple(Held(f"g{replica}.{i}", 400 + n, n) for i, n in enumerate(lengths.tolist()))
        used = sum(item.context for item in held)
        surveys.append(Survey(replica, 7, 64, used, max(120_000, used), held))
    return surveys
