"""Simulation of a placement: the production policies on a fleet that is shrunk in proportion.

The planner calls it. Replicas, learner GPUs and groups of a step shrink together; a replica keeps its load, and
the learner keeps its speed per replica
(`tests/plan/test_planner.py::test_a_shrunk_fleet_keeps_the_learners_speed_for_each_replica`).
"""

import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import AsyncResult
from statistics import mean

from laminar_lab.emulation.settings import EmulationProfile
from laminar_lab.plan.placements import FleetPlacement, lease_settings, on_new_weights
from laminar_lab.plan.request import PlanRequest
from laminar_lab.plan.stages import estimate, traffic_slowdown
from laminar_lab.simulate.figures import SimulatedFigures
from laminar_lab.simulate.run import simulate
from laminar_py.config import RunConfig, parse_config
from laminar_py.config.replay import ReplayConfig
from laminar_py.config.rollout import Schedule

REPLICAS, FEWEST_REPLICAS = 8, 4  # of a shrunk fleet
MOST_A_STEP = 768  # trajectories of a step, if that leaves enough replicas
MOST_TRAJECTORIES = 4500  # of a simulation
LEAST_STEPS, MOST_STEPS = 6, 40
MOST_PROCESSES = 8
SHOW_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Simulated speed of a placement."""

    figures: SimulatedFigures  # of the shrunk fleet
    tokens_per_s: float  # trained response tokens of the whole fleet
    step_s: float
    replicas: int  # of the shrunk fleet


def judge(request: PlanRequest, placement: FleetPlacement, *, times: int = 1, seed: int = 0) -> Judgement:
    """Simulate some steps of a placement on `times` as many replicas as the usual few."""
    each = request.new_per_step / placement.replicas
    replicas = times * max(FEWEST_REPLICAS, min(REPLICAS, int(MOST_A_STEP / each)))
    few = shrunk_fleet(request, placement, replicas=replicas // times, seed=seed)[0]
    config, profile = shrunk_fleet(request, placement, replicas=replicas, seed=seed)
    config = config.model_copy(update={"steps": few.steps})  # as many steps on every number of replicas
    figures = simulate(config, profile=profile).figures
    ratio = request.trajectories_per_step / config.trajectories_per_step
    return Judgement(
        figures=figures,
        tokens_per_s=figures.trained_tokens_per_s * ratio,
        step_s=figures.step_s,
        replicas=config.rollout.replicas,
    )


class Judges:
    """Judges placements in processes until `within_s` after its start; calls `show` at least twice a second.

    A context manager, whose end ends the processes at once.
    """

    def __init__(
        self, request: PlanRequest, *, within_s: float, show: Callable[[int], None] = lambda judged: None
    ) -> None:
        self._request, self._show = request, show
        self._end_s = time.monotonic() + within_s
        self._judged = 0

    def __enter__(self) -> "Judges":
        """Start the processes; a Ctrl-C reaches this process alone, which ends them."""
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            workers = min(MOST_PROCESSES, os.cpu_count() or 1)
            self._pool = multiprocessing.get_context("spawn").Pool(workers)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.terminate()

    def __call__(self, placements: Sequence[FleetPlacement], seed: int, times: int = 1) -> list[Judgement | None]:
        """Return the judgement of each placement on `times` as many replicas as usual; None: no time was left."""
        given = {"seed": seed, "times": times}
        pending = [self._pool.apply_async(judge, (self._request, one), given) for one in placements]
        return [self._await(result) for result in pending]

    def _await(self, result: "AsyncResult[Judgement]") -> Judgement | None:
        while not result.ready() and time.monotonic() < self._end_s:
            self._show(self._judged)
            result.wait(min(SHOW_S, max(0.0, self._end_s - time.monotonic())))
        if not result.ready():
            return None
        self._judged += 1
        return result.get()


def mean_judgement(judged: Sequence[Judgement]) -> Judgement:
    """Return the mean speed of several judgements of one placement, with the figures of the first."""
    return replace(
        judged[0],
        tokens_per_s=mean(one.tokens_per_s for one in judged),
        step_s=mean(one.step_s for one in judged),
    )


def shrunk_fleet(
    request: PlanRequest, placement: FleetPlacement, *, replicas: int, seed: int
) -> tuple[RunConfig, EmulationProfile]:
    """Make the config and profile of a fleet with about `replicas` replicas."""
    wanted = min(1.0, replicas / placement.replicas)
    groups = max(1, round(wanted * request.prompts_per_step))
    ratio = groups / request.prompts_per_step  # whole groups round the wanted ratio
    each = placement.tensor_parallel if placement.shared else placement.context_parallel
    devices = max(1, round(ratio * placement.learner_gpus / each)) * (each if placement.shared else 1)
    profile = request.profile(placement.tensor_parallel)
    rate = profile.learner.train_tokens_per_s * ratio * placement.learner_gpus / devices
    rate /= traffic_slowdown(request, placement)
    lengths, is_async = request.lengths, placement.schedule is Schedule.ASYNC
    spread_s = estimate(request, placement).step_s if is_async and not placement.shared else 0.0
    engine = request.emulated_engine(learner_devices=devices, start_spread_s=spread_s)
    config = parse_config(
        {
            "name": "plan",
            "seed": seed,
            "steps": _num_steps(_live_steps(request, placement), groups * request.group_size),
            "schedule": str(placement.schedule),
            "model": {"path": "model", "from_scratch": True},
            "data": {"train": "train.jsonl"},
            "reward": {"use": ["math"]},
            "rollout": {
                "engine": engine | {"engine_devices": placement.tensor_parallel},
                "replicas": max(1, round(ratio * placement.replicas)),
                "max_batch": placement.max_batch,
                "max_len": lengths.most,
                "kv_capacity": placement.kv_tokens,
                "batch_per_replica": placement.batch_per_replica,
                "prompts_per_step": groups,
                "group_size": request.group_size,
                "without_signal": "train",
                "on_new_weights": str(on_new_weights(placement, request.learner)),
                "sampling": {"max_new_tokens": lengths.cap},
            },
            "staleness": {"max_staleness": request.max_staleness if is_async else None},
            "buffer": {"replay": _replay_settings(request.replay_share, groups)},
            "packer": {"max_tokens": placement.pack_tokens},
            "cluster": lease_settings(placement),
        }
    )
    learner = profile.learner.model_copy(update={"train_tokens_per_s": rate})
    return config, EmulationProfile(engine=profile.engine, learner=learner)


def _replay_settings(share: float, groups: int) -> dict[str, float | int]:
    """Return settings by which a step of so many groups replays its share; {} where that is less than a group."""
    if not ReplayConfig(share=share).groups_of(groups):
        return {}
    return {"share": share, "capacity": MOST_STEPS * groups, "most": MOST_STEPS, "max_age": MOST_STEPS}


def _live_steps(request: PlanRequest, placement: FleetPlacement) -> float:
    """Return the trajectories in flight, in learner steps."""
    if placement.schedule is not Schedule.ASYNC:
        return 1.0
    admitted = placement.replicas * placement.batch_per_replica / request.new_per_step
    return admitted if request.max_staleness is None else min(admitted, request.max_staleness + 1.0)


def _num_steps(live: float, per_step: int) -> int:
    """Return the steps of a simulation: until the fleet is full and as many again, near the limits.

    The figures leave out a quarter. The rest is whole turns of a replica's batch where possible, since its short
    responses end first: a part of a turn would count as faster than the whole.
    """
    wanted = LEAST_STEPS + math.ceil(4 * live)
    number = max(LEAST_STEPS, min(wanted, MOST_STEPS, MOST_TRAJECTORIES // per_step))
    turns = 4 * max(1, round(live))
    return turns * max(1, round(number / turns)) if number * 1.5 >= turns else number
