"""Fleets, uses of them to simulate, and the planner's choice between shared and separate GPUs.

Every simulation runs the production policies on the times and placements of `laminar plan`. `turns` is the way of
two processes on one GPU: stop, swap everything, `sync`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import mean

import msgspec

from laminar_lab.gpus import gpu_named
from laminar_lab.plan.judge import judge, shrunk_fleet
from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.placements import FleetPlacement, on_new_weights, placements
from laminar_lab.plan.planner import RankedPlan, make_plan, plan_by_formula
from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_lab.plan.stages import estimate
from laminar_lab.simulate.figures import SimulatedFigures
from laminar_lab.simulate.run import simulate
from laminar_lab.step_time import LOAD_BYTES_PER_S, version_bytes
from laminar_py.config import ConfigError
from laminar_py.config.cluster import LeaseSwitch
from laminar_py.config.learner import LearnerConfig, LoraConfig
from laminar_py.config.rollout import OnNewWeights, Schedule

PCIE_BYTES_PER_S = 25e9  # an assumption: states of the learner to the host's memory, and back
STEPS = {256: 20, 512: 14, 1024: 10}  # of a cell, by the trajectories of a step
JUDGES = (3, 4)  # seeds of the simulations that judge a choice; the planner uses 0, 1 and 2
DRAWN_GPUS = (1, 2, 3, 4, 6, 8, 16, 24, 32, 48, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """E.g. `Fleet(name="8_full", model="7B", gpus=8, adapter=False, prompts=128)`."""

    name: str
    model: str
    gpus: int
    adapter: bool  # adapters are trained, and not all weights
    prompts: int  # of a step, with 8 answers each
    p50: float = 1500.0
    p99: float = 15_000.0
    cap: int = 16_384

    @property
    def request(self) -> PlanRequest:
        """The planner's request."""
        name, shape = model_named(self.model)
        nodes = max(1, self.gpus // 8)
        return PlanRequest(
            model=name,
            shape=shape,
            fleet=GpuFleet(gpu=gpu_named("H100"), nodes=nodes, per_node=self.gpus // nodes),
            lengths=Lengths.of_percentiles(self.p50, self.p99, cap=self.cap, prompt=400),
            prompts_per_step=self.prompts,
            group_size=8,
            learner=LearnerConfig(lora=LoraConfig() if self.adapter else None),
        )


ROWS = (
    Fleet(name="1_adapter", model="7B", gpus=1, adapter=True, prompts=32),
    Fleet(name="2_adapter", model="7B", gpus=2, adapter=True, prompts=32),
    Fleet(name="4_adapter", model="7B", gpus=4, adapter=True, prompts=64),
    Fleet(name="4_full", model="7B", gpus=4, adapter=False, prompts=64),
    Fleet(name="8_adapter", model="7B", gpus=8, adapter=True, prompts=128),
    Fleet(name="8_full", model="7B", gpus=8, adapter=False, prompts=128),
)


def drawn_fleet(seed: int) -> Fleet:
    """Draw GPUs, model, lengths and the work of a step; a model whose weights do not fit is trained by adapter."""
    draw = random.Random(f"shared/{seed}")
    gpus = draw.choice(DRAWN_GPUS)
    cap = draw.choice((4096, 8192, 16_384))
    p50 = draw.uniform(300, cap / 4)
    fleet = Fleet(
        name=f"drawn_{seed}",
        model=draw.choice(("1.5B", "7B", "14B")),
        gpus=gpus,
        adapter=draw.random() < 0.5,
        prompts=max(16, gpus * draw.choice((2, 4, 8))),
        p50=p50,
        p99=min(draw.uniform(3, 10) * p50, 2 * cap),
        cap=cap,
    )
    try:
        placements(fleet.request)
    except ConfigError:
        return replace(fleet, adapter=True)
    return fleet


# ---- cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A use of a fleet to simulate, with all of its replicas."""

    name: str
    request: PlanRequest
    placement: FleetPlacement
    on_new_weights: OnNewWeights
    switch: LeaseSwitch = LeaseSwitch.READY
    turns: bool = False


def cells_of(request: PlanRequest) -> Iterator[Cell]:
    """Yield the best placements by formula: shared and split, under `async` and `sync`, with all policies."""
    best: dict[tuple[Schedule, bool, bool], FleetPlacement] = {}
    for one in sorted(placements(request), key=lambda one: estimate(request, one).step_s):
        if one.schedule is not Schedule.ONE_STEP:
            best.setdefault((one.schedule, bool(one.shared), one.keeps_cache), one)
    for one in best.values():
        planned = on_new_weights(one, request.learner)
        yield _cell(request, one, planned)
        if one.schedule is not Schedule.ASYNC:
            continue
        if one.shared:
            yield _cell(request, one, planned, LeaseSwitch.TAIL)
        else:  # as on shared GPUs: responses continue under new weights
            yield _cell(request, one, OnNewWeights.RESUME if request.learner.lora else OnNewWeights.IN_PLACE)
    if request.fleet.gpus == 1:
        one = best[Schedule.SYNC, True, False]
        yield replace(_cell(request, one, OnNewWeights.DRAIN), name="turns", turns=True)


def _cell(
    request: PlanRequest,
    one: FleetPlacement,
    policy: OnNewWeights,
    switch: LeaseSwitch = LeaseSwitch.READY,
) -> Cell:
    kind = f"shared_{'keep' if one.keeps_cache else 'release'}_{switch}" if one.shared else "split"
    name = f"{kind}_{one.schedule}_{policy}_{one.learner_gpus}of{one.replicas}x{one.tensor_parallel}"
    return Cell(name=name, request=request, placement=one, on_new_weights=policy, switch=switch)


def simulate_cell(cell: Cell, *, seed: int) -> SimulatedFigures:
    """Simulate a cell."""
    config, profile = shrunk_fleet(cell.request, cell.placement, replicas=cell.placement.replicas, seed=seed)
    changes = {"on_new_weights": cell.on_new_weights}
    if cell.turns:
        # the learner's fp32 weights leave the GPU and come back, and the engine loads all of its own
        shape = cell.request.shape
        times = {
            "hand_over_s": profile.engine.hand_over_s + 4 * shape.total / PCIE_BYTES_PER_S,
            "load_s": version_bytes(shape.total) / LOAD_BYTES_PER_S,
        }
        profile = profile.model_copy(update={"engine": profile.engine.model_copy(update=times)})
        alone = replace(cell.request, fleet=replace(cell.request.fleet, per_node=2))
        room = next(one for one in placements(alone) if not one.shared and one.tensor_parallel == 1)
        changes |= {"kv_capacity": room.kv_tokens, "max_batch": room.max_batch}
    lease = config.cluster.lease.model_copy(update={"switch": cell.switch})
    config = config.model_copy(
        update={
            "steps": STEPS[config.trajectories_per_step],
            "rollout": config.rollout.model_copy(update=changes),
            "cluster": config.cluster.model_copy(update={"lease": lease}),
        }
    )
    return simulate(config, profile=profile).figures


# ---- choices


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The planner's choice for a fleet, and speeds that other seeds give; trained tokens/s, 0.0: none fits."""

    formula_shares: bool  # the first choice by formula alone
    plan_shares: bool  # the first choice by simulations
    formula: float
    plan: float
    shared: float  # the fastest shared placement
    split: float  # the fastest on separate GPUs

    @property
    def best(self) -> float:
        """Speed of the better kind."""
        return max(self.shared, self.split)


def choose(request: PlanRequest) -> Choice:
    """Plan a fleet, and simulate the first choices of each kind, by formula and by the plan."""
    formula, plan = plan_by_formula(request), make_plan(request)
    firsts = {
        shares: [*_firsts(formula, shares=shares), *_firsts(plan, shares=shares)] for shares in (True, False)
    }
    speeds = {
        one: mean(judge(request, one, seed=seed).tokens_per_s for seed in JUDGES)
        for one in dict.fromkeys((*firsts[True], *firsts[False]))
    }
    return Choice(
        formula_shares=bool(formula.best.placement.shared),
        plan_shares=bool(plan.best.placement.shared),
        formula=speeds[formula.best.placement],
        plan=speeds[plan.best.placement],
        shared=max((speeds[one] for one in firsts[True]), default=0.0),
        split=max((speeds[one] for one in firsts[False]), default=0.0),
    )


def _firsts(plan: RankedPlan, *, shares: bool) -> list[FleetPlacement]:
    """Return the first placement of a kind; nothing where none is ranked."""
    return [one.placement for one in plan.ranked if bool(one.placement.shared) is shares][:1]
