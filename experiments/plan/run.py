"""Is the first choice of the formulas of `laminar plan` near the best of its simulations?

`python experiments/plan/run.py [--only N]` plans twelve fleets (or fleet N, from 0) and prints the simulated
tokens/s of the formulas' first choice over those of the planner's. Each fleet takes a minute of CPU time or more.
"""

import argparse
import os
from collections.abc import Sequence
from multiprocessing import get_context

from laminar_lab.gpus import gpu_named
from laminar_lab.plan.judge import Judgement, judge
from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.placements import FleetPlacement
from laminar_lab.plan.planner import make_plan, plan_by_formula
from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_py.config.learner import LearnerConfig


def ask(size: str, gpu: str, nodes: int, p50: float, p99: float, *, prompts: int = 32) -> PlanRequest:
    """Make the request for a model on nodes of eight GPUs, with percentiles of response tokens."""
    name, shape = model_named(size)
    return PlanRequest(
        model=name,
        shape=shape,
        fleet=GpuFleet(gpu=gpu_named(gpu), nodes=nodes, per_node=8),
        lengths=Lengths.of_percentiles(p50, p99, cap=16_384, prompt=400),
        prompts_per_step=prompts,
        group_size=8,
        learner=LearnerConfig(),
    )


CASES = (
    ask("1.5B", "H100", 1, 1000, 8000),
    ask("3B", "H100", 1, 1500, 15_000),
    ask("7B", "H100", 1, 1500, 15_000),
    ask("7B", "H100", 2, 1500, 15_000),
    ask("7B", "A100", 2, 800, 6000),
    ask("7B", "H100", 4, 4000, 16_000, prompts=64),
    ask("14B", "H100", 2, 1500, 15_000),
    ask("14B", "H100", 4, 3000, 12_000),
    ask("32B", "H100", 4, 1500, 15_000),
    ask("32B", "H200", 8, 4000, 16_000, prompts=64),
    ask("7B", "H100", 8, 1500, 15_000, prompts=64),
    ask("Qwen3-30B-A3B", "H100", 4, 1500, 15_000),
)


def measure(request: PlanRequest) -> tuple[PlanRequest, str, str, float]:
    """Return the formulas' first choice, the planner's, and their simulated tokens/s, first over planner's."""
    simulated: dict[tuple[FleetPlacement, int, int], Judgement] = {}

    def judge_all(placements: Sequence[FleetPlacement], seed: int, times: int = 1) -> list[Judgement]:
        for one in placements:
            if (one, seed, times) not in simulated:
                simulated[one, seed, times] = judge(request, one, seed=seed, times=times)
        return [simulated[one, seed, times] for one in placements]

    plan, first = make_plan(request, judge_all=judge_all), plan_by_formula(request).best.placement
    (judged,) = judge_all([first], 0)
    return request, words(first), words(plan.best.placement), judged.tokens_per_s / plan.best.tokens_per_s


def words(placement: FleetPlacement) -> str:
    """Return a placement as `laminar plan` writes it, with the trajectories that a replica admits."""
    split = f"{placement.learner_gpus}+{placement.replicas}x{placement.tensor_parallel}"
    return f"{placement.schedule} {split} ({placement.batch_per_replica})"


def main() -> None:
    """Print a line for each fleet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", type=int, choices=range(len(CASES)), help="number of a fleet")
    only = parser.parse_args().only
    cases = CASES if only is None else (CASES[only],)
    shares = []
    with get_context("spawn").Pool(min(len(cases), os.cpu_count() or 1)) as pool:
        for case, first, best, share in pool.imap(measure, cases):
            shares.append(share)
            fleet = f"{case.fleet.nodes} x 8 {case.fleet.gpu.name}"
            print(f"{case.model:13} {fleet}: {first:24} {best:24} {share:.2f}", flush=True)
    print(f"within 10 %: {sum(share >= 0.9 for share in shares)} of {len(shares)}; the least {min(shares):.2f}")


if __name__ == "__main__":
    main()
