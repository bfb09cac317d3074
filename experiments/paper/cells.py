"""Cells of the comparison: one schedule on one fleet, from the table of parameters to its figures.

Used by `experiments/paper/run.py`. What a cell needs beyond `parameters.yaml` is in a profile under
`configs/emulation`; fleet and iteration are divided alike (`shrink`), and figures are of the whole fleet.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

import msgspec
import yaml
from baselines import Baseline, simulate_baseline

from laminar_lab.emulation.settings import EmulationProfile, read_profile
from laminar_lab.simulate.figures import WARM_SHARE, SimulatedRun
from laminar_lab.simulate.run import simulate
from laminar_py.config.loading import load_config
from laminar_py.config.run import RunConfig

HERE = Path(__file__).parent
BASE = Path("configs/emulation/paper_7b.yaml")
PROFILE_MFU = 0.4  # of all profiles
USUAL = 3  # staleness below which the paper has most trajectories
NEVER_WAITED_FOR = 1e6  # times as fast: a learner that leaves the figures to generation


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Values of `parameters.yaml`, which has the source of each."""

    trajectories_per_iteration: dict[str, int]
    response_tokens: dict[str, float]
    prompt_tokens: int
    minibatches: int
    fleets: dict[str, list[int]]
    learner_share: list[float]
    tensor_parallel: dict[str, list[int]]
    engine: str
    kv_tokens: dict[str, list[int]]
    slots: int
    learner_mfu: list[float]
    learner_is: str
    optimizer_s: float
    bytes_per_parameter: int
    refresh_gb_per_s: float
    global_sync_over_load: float
    relay_gb_per_s: float
    partial_max_staleness: int
    batch_per_replica: str
    capacity_iterations: int
    planner: str
    repack_interval_s: float
    repack_fleets: dict[str, int]
    repack_learner: str
    start_spread_s: str
    shrink: dict[str, int]
    iterations: dict[str, int]
    published: dict[str, float]
    asked: dict[str, float]


@cache
def read_parameters() -> Parameters:
    """The table."""
    tree = yaml.safe_load((HERE / "parameters.yaml").read_text())
    return msgspec.convert({name: item.get("value", item) for name, item in tree.items()}, Parameters)


class Arm(StrEnum):
    """Schedules that are compared."""

    SYNC = "sync"
    ONE_STEP = "one_step"
    STREAM = "stream"
    PARTIAL = "partial"
    ASYNC = "async"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A schedule on a fleet, e.g. `Cell(arm=Arm.SYNC, size="7b", gpus=64, tp=1, share=0.5, mfu=0.4)`."""

    arm: Arm
    size: str
    gpus: int
    tp: int
    share: float  # of the GPUs, for the learner; `sync` has all of them for either
    mfu: float
    planner: str = "none"
    generates_alone: bool = False  # the learner is never waited for
    shrink: int | None = None  # None: as the parameters have it
    iterations: int | None = None

    @property
    def name(self) -> str:
        """The cell in a word."""
        more = [self.planner] * (self.arm is Arm.ASYNC) + ["alone"] * self.generates_alone
        more += [f"shrink{self.shrink}"] * (self.shrink is not None)
        more += [f"steps{self.iterations}"] * (self.iterations is not None)
        where = f"{self.size}-{self.gpus}-tp{self.tp}-{self.share:g}-mfu{self.mfu:g}"
        return "-".join([self.arm, where, *more])


class CellFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a cell."""

    trained_tokens_per_s: float
    generated_tokens_per_s: float
    kv_use: float
    learner_busy_share: float
    step_s: float
    consumed_staleness_max: int
    staleness_mean: float  # at a response's end, as the paper counts it
    usual_share: float  # of responses, below `USUAL`
    staleness_max: int


def measure(cell: Cell) -> CellFigures:
    """Lead the cell's run."""
    parameters, profile = read_parameters(), profile_of(cell)
    config = config_of(cell)
    if cell.arm is Arm.ASYNC:
        run = simulate(config, profile=profile)
    else:
        run = simulate_baseline(
            config,
            Baseline(cell.arm),
            profile=profile,
            sync_s=sync_s(cell),
            updates=min(parameters.minibatches, config.rollout.prompts_per_step),
            max_staleness=parameters.partial_max_staleness,
        )
    return _figures(run, shrink_of(cell))


def _figures(run: SimulatedRun, shrink: int) -> CellFigures:
    figures = run.figures
    began = run.rows[max(1, round(WARM_SHARE * len(run.rows))) - 1].rl_s
    ages = [one.age for one in run.ended if began <= one.at_s <= run.rows[-1].rl_s]
    return CellFigures(
        trained_tokens_per_s=shrink * figures.trained_tokens_per_s,
        generated_tokens_per_s=shrink * figures.generated_tokens_per_s,
        kv_use=figures.kv_use,
        learner_busy_share=1.0 - figures.learner_waiting_share,
        step_s=figures.step_s,
        consumed_staleness_max=figures.staleness_max,
        staleness_mean=sum(ages) / len(ages),
        usual_share=sum(age < USUAL for age in ages) / len(ages),
        staleness_max=max(ages),
    )


# ---- from the parameters to a run


def shrink_of(cell: Cell) -> int:
    """What fleet and iteration are divided by: a power of two."""
    parameters = read_parameters()
    if cell.shrink is not None:
        return cell.shrink
    least = (1 - max(parameters.learner_share)) * cell.gpus / cell.tp  # replicas
    shrink = 1
    while 2 * shrink <= parameters.shrink["most"] and least / (2 * shrink) >= parameters.shrink["least_replicas"]:
        shrink *= 2
    return shrink


def replicas_of(cell: Cell) -> int:
    """Replicas of the fleet as it is simulated."""
    share = 0.0 if cell.arm is Arm.SYNC else cell.share
    replicas = (1 - share) * cell.gpus / cell.tp / shrink_of(cell)
    assert replicas == int(replicas), f"{cell.name}: {replicas} replicas"
    return int(replicas)


def profile_of(cell: Cell) -> EmulationProfile:
    """Times of the engines, and of a learner that is one device as fast as all its GPUs."""
    profile = base_profile(cell)
    devices = cell.gpus * (1.0 if cell.arm is Arm.SYNC else cell.share) / shrink_of(cell)
    learner = profile.learner
    speed = learner.train_tokens_per_s * cell.mfu / PROFILE_MFU * devices
    if cell.generates_alone:
        changes = {"train_tokens_per_s": speed * NEVER_WAITED_FOR, "optimizer_s": 0.0}
    else:
        changes = {"train_tokens_per_s": speed, "optimizer_s": read_parameters().optimizer_s}
    return profile.model_copy(update={"learner": learner.model_copy(update=changes)})


@cache
def _read(path: Path) -> EmulationProfile:
    return read_profile(path)


def base_profile(cell: Cell) -> EmulationProfile:
    """The published times of engine and GPU."""
    return _read(Path(read_parameters().engine.format(size=cell.size, tp=cell.tp)))


def weight_gb(cell: Cell) -> float:
    """Weights, in GB."""
    return base_profile(cell).learner.num_parameters * read_parameters().bytes_per_parameter / 1e9


def sync_s(cell: Cell) -> float:
    """Time that a baseline takes for weights."""
    parameters = read_parameters()
    if cell.arm is Arm.SYNC:
        return weight_gb(cell) / parameters.refresh_gb_per_s
    return base_profile(cell).engine.load_s * parameters.global_sync_over_load


def config_of(cell: Cell) -> RunConfig:
    """The run's config."""
    parameters, replicas, shrink = read_parameters(), replicas_of(cell), shrink_of(cell)
    lengths, iteration = parameters.response_tokens, parameters.trajectories_per_iteration
    prompts, samples = iteration["prompts"] // shrink, iteration["samples"]
    per_replica = -(-prompts // replicas) * samples
    kv_tokens = parameters.kv_tokens[cell.size][parameters.tensor_parallel[cell.size].index(cell.tp)]
    spread_s = lengths["cap"] * base_profile(cell).engine.step_s
    settings: dict[str, object] = {
        "steps": cell.iterations or parameters.iterations[cell.arm],
        "rollout.engine.learner_devices": 1,
        "rollout.engine.start_spread_s": spread_s,
        "rollout.engine.median_tokens": int(lengths["median"]),
        "rollout.engine.sigma": lengths["sigma"],
        "rollout.engine.simulation.prompt_tokens": parameters.prompt_tokens,
        "rollout.engine.simulation.publish_s": weight_gb(cell) / parameters.relay_gb_per_s,
        "rollout.sampling.max_new_tokens": int(lengths["cap"]),
        "rollout.replicas": replicas,
        "rollout.max_batch": parameters.slots,
        "rollout.kv_capacity": kv_tokens,
        "rollout.batch_per_replica": per_replica,
        "rollout.prompts_per_step": prompts,
        "rollout.group_size": samples,
        "buffer.capacity": parameters.capacity_iterations * prompts * samples,
        "repack.planner": cell.planner,
        "repack.interval_s": parameters.repack_interval_s,
    }
    return load_config(BASE, [f"{key}={value}" for key, value in settings.items()])
