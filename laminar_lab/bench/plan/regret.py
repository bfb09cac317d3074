"""The planner's first choice against an exhaustive search of the simulator.

Cases are drawn by seed: models, GPUs, lengths, work of a step, bounds. All placements of a case are judged as the
planner judges its few. The best of so many noisy figures flatters itself: the best three and the planner's choice
are simulated again with other seeds, and those figures are compared.
"""

import random
from collections.abc import Sequence
from statistics import mean

import numpy as np

from laminar_lab.bench.report import Row, log_line
from laminar_lab.gpus import gpu_named
from laminar_lab.plan.judge import Judgement, judge, judge_in_parallel
from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.placements import FleetPlacement, placements
from laminar_lab.plan.planner import make_plan
from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_py.config import ConfigError
from laminar_py.config.learner import LearnerConfig

ROWS = ("plan_regret_p95",)
MOST_PLACEMENTS = 200
FINALISTS = 3
SEEDS = (101, 102)  # of the second simulation


def rows(*, cases: int = 20) -> list[Row]:
    """Measure the regret over all cases."""
    found = []
    for number in range(cases):
        request = draw_case(number)
        found.append(_regret(request))
        log_line(
            f"case {number}: {request.model} on {request.fleet.gpus} {request.fleet.gpu.name}: {found[-1]:.3f}"
        )
    conditions = f"{cases} cases; median {np.median(found):.3f}, largest {max(found):.3f}"
    return [Row("plan_regret_p95", float(np.percentile(found, 95)), "of tokens/s", conditions)]


def draw_case(number: int) -> PlanRequest:
    """Draw a request of at most 64 GPUs and 200 placements, some of which fit."""
    draw = random.Random(number)
    while True:
        size, kind = draw.choice(["1.5B", "7B", "14B", "32B"]), draw.choice(["A100", "H100", "H200", "B200"])
        name, shape = model_named(size)
        request = PlanRequest(
            model=name,
            shape=shape,
            fleet=GpuFleet(gpu=gpu_named(kind), nodes=draw.choice([1, 2, 4, 8]), per_node=8),
            lengths=Lengths(
                median=draw.choice([400, 1500, 4000]),
                sigma=draw.choice([0.5, 0.99]),
                cap=draw.choice([8192, 16_384]),
                prompt=draw.choice([200, 1000]),
            ),
            prompts_per_step=draw.choice([16, 32, 64]),
            group_size=draw.choice([8, 16]),
            learner=LearnerConfig(),
            max_staleness=draw.choice([1, 2, 4, None]),
        )
        try:
            if len(placements(request)) <= MOST_PLACEMENTS:
                return request
        except ConfigError:  # too few GPUs for the model
            continue


def _regret(request: PlanRequest) -> float:
    """Return the share of the best placement's tokens/s that the planner's choice lacks.

    0 where it is the best.
    """
    everything = placements(request)
    judge_all = judge_in_parallel(request)
    judged = dict(zip(everything, judge_all(everything, 0), strict=True))

    def known(some: Sequence[FleetPlacement], seed: int) -> list[Judgement]:
        return judge_all(some, seed) if seed else [judged[one] for one in some]

    choice = make_plan(request, judge_all=known).best.placement
    order = sorted(everything, key=lambda one: -judged[one].tokens_per_s)
    again = {one: _again(request, one) for one in {choice, *order[:FINALISTS]}}
    return max(0.0, 1.0 - again[choice] / max(again.values()))


def _again(request: PlanRequest, placement: FleetPlacement) -> float:
    return mean(judge(request, placement, seed=seed).tokens_per_s for seed in SEEDS)
