"""Cells of this experiment: a fleet of GPUs, a use of it, and the simulated run of this use.

Every cell simulates the production policies on `laminar plan`'s times of the model. A split cell has separate
GPUs, a shared cell `cluster.share`. `turns` is the way of two processes on one GPU: stop, swap everything, `sync`.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from formula import (
    SharedPlacement,
    continuing_fleet,
    shared_fleet,
    shared_placements,
    shared_step_s,
    split_step_s,
)

from laminar_lab.emulation.settings import EmulationProfile
from laminar_lab.gpus import gpu_named
from laminar_lab.plan.known_models import model_named
from laminar_lab.plan.placements import FleetPlacement, placements
from laminar_lab.plan.request import GpuFleet, Lengths, PlanRequest
from laminar_lab.plan.stages import estimate
from laminar_lab.simulate.figures import SimulatedFigures
from laminar_lab.simulate.run import simulate
from laminar_lab.step_time import LOAD_BYTES_PER_S, version_bytes
from laminar_py.config import ConfigError, RunConfig
from laminar_py.config.cluster import LeaseCache, LeaseSwitch
from laminar_py.config.learner import LearnerConfig, LoraConfig
from laminar_py.config.rollout import OnNewWeights, Schedule

PCIE_BYTES_PER_S = 25e9  # an assumption: states of the learner to the host's memory, and back
STEPS = {256: 20, 512: 14, 1024: 10}  # of the rows, by the trajectories of a step
DRAWN_STEPS, DRAWN_REPLICAS, DRAWN_RESPONSES = 10, 4, 256  # most of a drawn fleet, which is shrunk
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
    fits = bool(_splits(fleet.request) or shared_placements(fleet.request))
    return fleet if fits else replace(fleet, adapter=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A use of a fleet to simulate."""

    name: str
    request: PlanRequest
    use: FleetPlacement | SharedPlacement
    on_new_weights: OnNewWeights
    switch: LeaseSwitch = LeaseSwitch.READY
    turns: bool = False
    is_whole: bool = True  # all replicas are simulated

    @property
    def is_shared(self) -> bool:
        """Whether learner and replicas share GPUs."""
        return isinstance(self.use, SharedPlacement)


def split_cells(request: PlanRequest, *, each: int, retracting: int) -> Iterator[Cell]:
    """Yield the best split placements by formula: `drain`, `each` in place, some `retracting`, and `sync`."""
    every = _splits(request)
    of_schedule = {
        schedule: sorted(
            (one for one in every if one.schedule is schedule), key=lambda one: estimate(request, one).step_s
        )
        for schedule in Schedule
    }
    apart: dict[tuple[int, int], FleetPlacement] = {}
    for one in sorted(of_schedule[Schedule.ASYNC], key=lambda one: split_step_s(request, one)):
        apart.setdefault((one.learner_gpus, one.tensor_parallel), one)
    for policy, found in (
        (OnNewWeights.DRAIN, of_schedule[Schedule.ASYNC][:1]),
        (OnNewWeights.IN_PLACE, list(apart.values())[:each]),
        (OnNewWeights.RETRACT, list(apart.values())[:retracting]),
        (OnNewWeights.DRAIN, of_schedule[Schedule.SYNC][:1]),
    ):
        for one in found:
            name = f"split_{one.schedule}_{policy}_{_words(one)}"
            yield Cell(name=name, request=request, use=one, on_new_weights=policy)


def shared_cells(
    request: PlanRequest, *, each: int, switches: tuple[LeaseSwitch, ...], schedules: tuple[Schedule, ...]
) -> Iterator[Cell]:
    """Yield the best shared placements by formula, `each` with either cache, and the first under all settings."""
    every = shared_placements(request)
    for cache in LeaseCache:
        found = [one for one in every if one.cache is cache]
        found.sort(key=lambda one: shared_step_s(request, one))
        for place, one in enumerate(found[:each]):
            for schedule in schedules if place == 0 else (Schedule.ASYNC,):
                # a batch of a schedule with barriers ends before its turn, so both switches are one
                for switch in switches if place == 0 and schedule is Schedule.ASYNC else switches[:1]:
                    yield _shared_cell(request, one, schedule, switch)


def _shared_cell(request: PlanRequest, one: SharedPlacement, schedule: Schedule, switch: LeaseSwitch) -> Cell:
    policy = one.on_new_weights if schedule is Schedule.ASYNC else OnNewWeights.DRAIN
    used = replace(one, fleet=replace(one.fleet, schedule=schedule), on_new_weights=policy)
    name = f"shared_{schedule}_{policy}_{one.cache}_{switch}_{_words(one.fleet)}"
    return Cell(name=name, request=request, use=used, on_new_weights=policy, switch=switch)


def turns_cell(request: PlanRequest) -> Cell:
    """Return the cell of two processes that take turns, each with the whole GPU."""
    (one, *_) = [one for one in shared_placements(request) if one.cache is LeaseCache.RELEASE]
    cell = _shared_cell(request, one, Schedule.SYNC, LeaseSwitch.READY)
    return replace(cell, name="turns", turns=True)


def simulate_cell(cell: Cell, *, seed: int) -> SimulatedFigures:
    """Simulate a cell; the figures are of the whole fleet, except counts of trajectories and events."""
    config, profile = _config(cell, seed)
    steps = STEPS[config.trajectories_per_step] if cell.is_whole else DRAWN_STEPS
    figures = simulate(config.model_copy(update={"steps": steps}), profile=profile).figures
    ratio = cell.request.trajectories_per_step / config.trajectories_per_step
    return SimulatedFigures(
        **{name: getattr(figures, name) for name in figures.__struct_fields__ if name != "trained_tokens_per_s"},
        trained_tokens_per_s=figures.trained_tokens_per_s * ratio,
    )


def _config(cell: Cell, seed: int) -> tuple[RunConfig, EmulationProfile]:
    use, request = cell.use, cell.request
    fleet = use.fleet if isinstance(use, SharedPlacement) else use
    replicas = fleet.replicas
    if not cell.is_whole:  # a few replicas that have `DRAWN_RESPONSES` of a step at most
        replicas = max(2, min(DRAWN_REPLICAS, DRAWN_RESPONSES * replicas // request.trajectories_per_step))
    if isinstance(use, FleetPlacement):
        return continuing_fleet(request, use, policy=cell.on_new_weights, replicas=replicas, seed=seed)
    config, profile = shared_fleet(request, use, replicas=replicas, seed=seed, switch=cell.switch)
    if not cell.turns:
        return config, profile
    # the learner's fp32 weights leave the GPU and come back, and the engine loads all of its own
    whole, moved_s = version_bytes(request.shape.total), 4 * request.shape.total / PCIE_BYTES_PER_S
    times = {
        "hand_over_s": profile.engine.hand_over_s + moved_s,
        "load_s": whole / fleet.tensor_parallel / LOAD_BYTES_PER_S,
    }
    alone = replace(request, fleet=replace(request.fleet, nodes=1, per_node=2))
    room = next(one for one in placements(alone) if one.tensor_parallel == 1)
    rollout = config.rollout.model_copy(update={"kv_capacity": room.kv_tokens, "max_batch": room.max_batch})
    return (
        config.model_copy(update={"rollout": rollout}),
        profile.model_copy(update={"engine": profile.engine.model_copy(update=times)}),
    )


def _splits(request: PlanRequest) -> list[FleetPlacement]:
    try:
        return [one for one in placements(request) if not one.shared]
    except ConfigError:
        return []


def _words(one: FleetPlacement) -> str:
    return f"{one.learner_gpus}of{one.replicas}x{one.tensor_parallel}_{one.batch_per_replica}"
