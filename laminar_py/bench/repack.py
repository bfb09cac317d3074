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
from laminar_py.records.replica import Held, Survey
from laminar_py.repack.planner import PredictivePlanner
from laminar_py.repack.signals import EngineSpeed, GroupForecast, RemainingTokens

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


def plan_rows(*, repeats: int = 11) -> list[Row]:
    """How long a round thinks about 8,192 trajectories on 256 replicas of one version: forecast and plan.

    The worst of three fleets: in ramp-down, with contexts so short that all could move, and with queues.
    """
    speed = EngineSpeed(
        step_s=0.02,
        step_s_per_sequence=0.0,
        step_s_per_token=8e-8,
        prefill_tokens_per_s=PREFILL_TOKENS_PER_S,
        roofline_batch=ROOFLINE_BATCH,
    )
    fleets = {"ramp-down": make_surveys, "short": make_short, "queues": make_queues}
    found = {name: [_think(speed, make(seed=seed)) for seed in range(repeats)] for name, make in fleets.items()}
    times = {name: 1e3 * median(elapsed_s for elapsed_s, _ in runs) for name, runs in found.items()}
    told = ", ".join(f"{name} {ms:.1f} ms ({found[name][-1][1]} moves)" for name, ms in times.items())
    return [Row("plan_256x8192_ms", max(times.values()), "ms", f"worst of: {told}; medians of {repeats}")]


def _think(speed: EngineSpeed, group: Sequence[Survey]) -> tuple[float, int]:
    """Seconds, and moves. Every second trajectory has three finished siblings."""
    remaining = RemainingTokens(16_384)
    running = [held for survey in group for held in survey.running]
    siblings = {held.trajectory_id: [1000, 2000, 3000] for held in running[::2]}
    began = time.perf_counter()
    remaining.look([held.length for held in running])
    forecast = GroupForecast(remaining, siblings)
    moves = PredictivePlanner(speed, forecast, max_stall_s=MAX_STALL_S).plan(group)
    return time.perf_counter() - began, len(moves)


def make_surveys(*, seed: int, replicas: int = 256, trajectories: int = 8192) -> list[Survey]:
    """A fleet whose replicas have few or many, of log-normal lengths."""
    rng = np.random.default_rng(seed)
    counts = rng.multinomial(trajectories, rng.dirichlet(np.full(replicas, 3.0)))
    surveys = []
    for replica, count in enumerate(counts.tolist()):
        lengths = np.minimum(16_000, 1500 * np.exp(0.99 * rng.standard_normal(count))).astype(int)
        surveys.append(_survey(replica, lengths.tolist()))
    return surveys


def make_short(*, seed: int) -> list[Survey]:
    """All of them short, so that half of the fleet could be emptied."""
    rng = np.random.default_rng(seed)
    return [_survey(replica, rng.integers(1, 50, 32).tolist()) for replica in range(256)]


def make_queues(*, seed: int) -> list[Survey]:
    """Half of the fleet has queues, the other half has room."""
    rng = np.random.default_rng(seed)
    lengths = [np.minimum(16_000, 1500 * np.exp(0.99 * rng.standard_normal(16))).astype(int) for _ in range(256)]
    return [_survey(i, n.tolist(), waiting=32 if i % 2 else 0) for i, n in enumerate(lengths)]


def _survey(replica: int, lengths: Sequence[int], *, waiting: int = 0) -> Survey:
    held = tuple(Held(f"g{replica}.{i}", 400 + n, n) for i, n in enumerate(lengths))
    queue = tuple(Held(f"w{replica}.{i}", 400, 0) for i in range(waiting))
    used = sum(item.context for item in held)
    return Survey(
        replica=replica,
        version=7,
        slots=64,
        kv_used=used,
        kv_capacity=max(120_000, used),
        running=held,
        waiting=queue,
    )
