"""Time to plan a round of repacking on a large fleet."""

import time
from collections.abc import Sequence
from statistics import median

import numpy as np

from laminar_lab.bench.lengths import log_normal_lengths
from laminar_lab.bench.report import Row
from laminar_py.records.replica import Survey, TrajectorySummary
from laminar_py.repack import EngineSpeed, GroupForecast, PlanningContext, PredictivePlanner, RemainingTokens

ROWS = "plan_256x8192_ms"
REPLICAS, TRAJECTORIES = 256, 8192
MAX_STALL_S = 5.0
MAX_NEW_TOKENS = 16_384
SPEED = EngineSpeed(
    step_s=0.02, step_s_per_sequence=0.0, step_s_per_token=8e-8, prefill_tokens_per_s=25_000, roofline_batch=48
)


def rows(*, repeats: int = 11) -> list[Row]:
    """Measure forecast and plan for 8,192 trajectories on 256 replicas of one version.

    The row is the worst of three fleets: in ramp-down, with contexts so short that each could move, with queues.
    """
    fleets = {"ramp-down": ramp_down, "short": _short, "queues": _queues}
    found = {
        name: [_plan_round(make(np.random.default_rng(seed))) for seed in range(repeats)]
        for name, make in fleets.items()
    }
    times = {name: 1e3 * median(elapsed_s for elapsed_s, _ in runs) for name, runs in found.items()}
    each = ", ".join(f"{name} {ms:.1f} ms ({found[name][-1][1]} moves)" for name, ms in times.items())
    return [Row("plan_256x8192_ms", max(times.values()), "ms", f"worst of: {each}; medians of {repeats}")]


def _plan_round(group: Sequence[Survey]) -> tuple[float, int]:
    """Plan a round; return seconds and moves. Every second trajectory has three finished siblings."""
    remaining = RemainingTokens(MAX_NEW_TOKENS)
    running = [held for survey in group for held in survey.running]
    with_siblings = {held.trajectory_id for held in running[::2]}
    began = time.perf_counter()
    remaining.update([held.length for held in running])
    forecast = GroupForecast(remaining, lambda name: (1000, 2000, 3000) if name in with_siblings else ())
    context = PlanningContext(
        speed=SPEED, forecast=forecast, max_stall_s=MAX_STALL_S, max_new_tokens=MAX_NEW_TOKENS
    )
    moves = PredictivePlanner(context).plan(group)
    return time.perf_counter() - began, len(moves)


def ramp_down(rng: np.random.Generator) -> list[Survey]:
    """Draw a fleet whose replicas have few or many trajectories."""
    counts = rng.multinomial(TRAJECTORIES, rng.dirichlet(np.full(REPLICAS, 3.0)))
    return [_survey(replica, _lengths(rng, count)) for replica, count in enumerate(counts.tolist())]


def _short(rng: np.random.Generator) -> list[Survey]:
    """Draw a fleet of short contexts, half of whose replicas could be emptied."""
    return [_survey(replica, rng.integers(1, 50, 32).tolist()) for replica in range(REPLICAS)]


def _queues(rng: np.random.Generator) -> list[Survey]:
    """Draw a fleet; one half has queues, the other has room."""
    lengths = [_lengths(rng, 16) for _ in range(REPLICAS)]
    return [_survey(replica, n, waiting=32 if replica % 2 else 0) for replica, n in enumerate(lengths)]


def _lengths(rng: np.random.Generator, count: int) -> list[int]:
    return log_normal_lengths(rng, count, median=1500, cap=16_000)


def _survey(replica: int, lengths: Sequence[int], *, waiting: int = 0) -> Survey:
    held = tuple(TrajectorySummary(f"g{replica}.{i}", 400 + n, n) for i, n in enumerate(lengths))
    queue = tuple(TrajectorySummary(f"w{replica}.{i}", 400, 0) for i in range(waiting))
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
