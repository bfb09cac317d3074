"""Judgement of a placement by simulation: the production policies on a fleet that is shrunk in proportion.

Called by `plan.planner`. Replicas, learner GPUs and groups of a step shrink together; what a replica does stays
as it is. Invariant: the learner keeps its speed for each replica, also where its GPUs do not divide.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from laminar_lab.plan.placements import FleetPlacement
from laminar_lab.plan.request import PlanRequest
from laminar_lab.plan.stages import estimate, profile_of, publish_s
from laminar_lab.simulate.figures import SimulatedFigures
from laminar_lab.simulate.run import simulate
from laminar_py.config import EmulationProfile, RunConfig, parse_config
from laminar_py.config.rollout import Schedule

REPLICAS, FEWEST_REPLICAS = 8, 4  # of a shrunk fleet
MOST_A_STEP = 768  # trajectories, where that leaves replicas enough
MOST_TRAJECTORIES = 4500  # that a simulation ends
LEAST_STEPS, MOST_STEPS = 6, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Figures of a placement, of the whole fleet."""

    figures: SimulatedFigures  # of the shrunk one
    tokens_per_s: float  # response tokens that are trained on
    step_s: float
    replicas: int  # of the shrunk fleet


def judge(request: PlanRequest, placement: FleetPlacement, *, times: int = 1, seed: int = 0) -> Judgement:
    """Simulate some steps of the placement on a few of its replicas, or so many times more of them."""
    each = request.trajectories_per_step / placement.replicas
    replicas = times * max(FEWEST_REPLICAS, min(REPLICAS, int(MOST_A_STEP / each)))
    few = shrunk_fleet(request, placement, replicas=replicas // times, seed=seed)[0]
    config, profile = shrunk_fleet(request, placement, replicas=replicas, seed=seed)
    config = config.model_copy(update={"steps": few.steps})  # as many, however many replicas
    figures = simulate(config, profile=profile).figures
    ratio = request.trajectories_per_step / config.trajectories_per_step
    step_s = figures.step_s
    return Judgement(
        figures=figures,
        tokens_per_s=figures.trained_tokens_per_s * ratio,
        step_s=step_s,
        replicas=config.rollout.replicas,
    )


def mean_of(judged: Sequence[Judgement]) -> Judgement:
    """Mean speed of several simulations of a placement, with the figures of the first."""
    return replace(
        judged[0],
        tokens_per_s=mean(one.tokens_per_s for one in judged),
        step_s=mean(one.step_s for one in judged),
    )


def shrunk_fleet(
    request: PlanRequest, placement: FleetPlacement, *, replicas: int, seed: int
) -> tuple[RunConfig, EmulationProfile]:
    """Config and times of a fleet of about so many replicas."""
    wanted = min(1.0, replicas / placement.replicas)
    groups = max(1, round(wanted * request.prompts_per_step))
    ratio = groups / request.prompts_per_step  # that the groups, which come whole, allow
    shrunk = max(1, round(ratio * placement.replicas))
    devices = max(1, round(ratio * placement.learner_gpus))
    rates, learner = profile_of(request, placement)
    learner = learner.model_copy(
        update={"train_tokens_per_s": learner.train_tokens_per_s * ratio * placement.learner_gpus / devices}
    )
    lengths, spread = request.lengths, placement.schedule is Schedule.ASYNC
    config = parse_config(
        {
            "name": "plan",
            "seed": seed,
            "steps": _steps(_live_steps(request, placement), groups * request.group_size),
            "schedule": str(placement.schedule),
            "emulation": {
                "profile": "of the plan",
                "start_spread_s": estimate(request, placement).step_s if spread else 0,
                "learner_devices": devices,
                "median_tokens": max(1, round(lengths.median)),
                "sigma": lengths.sigma,
                "prompt_share": lengths.prompt_share,
            },
            "simulation": {
                "prompt_tokens": lengths.prompt,
                "reward_median_s": request.reward_s,
                "publish_s": publish_s(request),
            },
            "model": {"path": "model", "from_scratch": True},
            "data": {"train": "train.jsonl"},
            "reward": {"use": ["math"]},
            "rollout": _rollout(request, placement, replicas=shrunk, groups=groups),
            "staleness": {"max_staleness": _bound(request, placement)},
            "packer": {"max_tokens": placement.pack_tokens},
        }
    )
    return config, EmulationProfile(engine=rates.times, learner=learner)


def _rollout(request: PlanRequest, placement: FleetPlacement, *, replicas: int, groups: int) -> dict[str, object]:
    return {
        "replicas": replicas,
        "max_batch": placement.max_batch,
        "max_len": request.lengths.most,
        "kv_capacity": placement.kv_tokens,
        "batch_per_replica": placement.batch_per_replica,
        "prompts_per_step": groups,
        "group_size": request.group_size,
        "without_signal": "train",
        "sampling": {"max_new_tokens": request.lengths.cap},
    }


def _bound(request: PlanRequest, placement: FleetPlacement) -> int | None:
    return request.max_staleness if placement.schedule is Schedule.ASYNC else None


def _live_steps(request: PlanRequest, placement: FleetPlacement) -> float:
    """Learner steps' worth of trajectories that the fleet has in flight."""
    if placement.schedule is not Schedule.ASYNC:
        return 1.0
    admitted = placement.replicas * placement.batch_per_replica / request.trajectories_per_step
    return admitted if request.max_staleness is None else min(admitted, request.max_staleness + 1.0)


def _steps(live: float, per_step: int) -> int:
    """Steps of a simulation: until the fleet is under way, and as many again, as far as time allows."""
    wanted = LEAST_STEPS + math.ceil(4 * live)
    return max(LEAST_STEPS, min(wanted, MOST_STEPS, MOST_TRAJECTORIES // per_step))
