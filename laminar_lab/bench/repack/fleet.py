"""Gain of repacking on 16 replicas at the speed of published tables, simulated.

The production policies lead a run on a virtual clock (`simulate.run`), so figures depend on seeds alone, and not
on the machine. `arms` has the compared arms. Run this in the project's folder.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median

from laminar_lab.bench.repack.arms import ARMS, FULL, arm_settings, compare_arms
from laminar_lab.bench.report import Row, log_line
from laminar_lab.bench.runs import require_project_file
from laminar_lab.emulation.settings import EmulationProfile, read_profile
from laminar_lab.simulate.figures import SimulatedRun
from laminar_lab.simulate.run import simulate
from laminar_py.config import ConfigError, RunConfig, load_config
from laminar_py.config.rollout import DEFAULT_PLANNER

ROWS = (
    "throughput_repack_over_off_7b throughput_paper_over_off_7b throughput_full_over_off_7b gain_of_ceiling_7b "
    "ours_over_paper_planner_7b latency_p95_over_off_7b async_repack_of_ceiling_7b "
    "throughput_repack_over_off_32b throughput_paper_over_off_32b throughput_full_over_off_32b "
    "gain_of_ceiling_32b ours_over_paper_planner_32b latency_p95_over_off_32b async_repack_of_ceiling_32b"
)
CONFIG = Path("configs/emulation/repack.yaml")
REPLICAS, SLOTS, GROUP = 16, 256, 16
BATCH = 512  # trajectories of a replica under a version; a step trains as many of each replica
STEPS = 12  # the first quarter, while the fleet fills, does not count
LEARNER_GPUS = 128  # more than keep up, for the runs that measure generation


@dataclass(frozen=True, kw_only=True)
class FleetModel:
    """A model on its GPUs, see `MODELS`."""

    name: str  # ending of its rows
    table: str  # file of its times in `configs/emulation`
    gpus: int  # of a replica
    kv_capacity: int
    spread_s: float  # over which the replicas begin, about a batch, so that they start at different times

    @cached_property
    def profile(self) -> EmulationProfile:
        """Times of engine and learner."""
        return read_profile(CONFIG.with_name(f"{self.table}.yaml"))


MODELS = {
    "7b": FleetModel(name="7b", table="h100_7b_tp1", gpus=1, kv_capacity=927_000, spread_s=200.0),
    "32b": FleetModel(name="32b", table="h100_32b_tp4", gpus=4, kv_capacity=794_000, spread_s=250.0),
}


def rows(*, seeds: int = 3, models: str = "7b,32b") -> list[Row]:
    """Simulate a 7B on one GPU a replica, and a 32B on four; a minute of one core a run, six runs a seed."""
    require_project_file(CONFIG)
    chosen = models.split(",")
    if unknown := [name for name in chosen if name not in MODELS]:
        raise ConfigError(f"models={models}: {unknown[0]} is not known; choose {' or '.join(MODELS)}")
    return [row for name in chosen for row in _measure_model(MODELS[name], seeds)]


def _measure_model(model: FleetModel, seeds: int) -> list[Row]:
    found: dict[str, list[SimulatedRun]] = {arm: [] for arm in ARMS}
    shares: list[float] = []
    for seed in range(seeds):
        for arm, runs in found.items():
            runs.append(simulate(arm_config(model, arm, seed=seed)))
            log_line(f"{model.name}, seed {seed}, {arm}: {runs[-1].figures}")
        shares.append(_share_of_ceiling(model, {arm: runs[-1] for arm, runs in found.items()}, seed=seed))
    kv_use = ", ".join(f"{arm} {median(run.figures.kv_use for run in runs):.2f}" for arm, runs in found.items())
    conditions = (
        f"simulated, {REPLICAS} replicas of {model.gpus} GPUs, H100 tables; steps 4 to {STEPS} of"
        f" {REPLICAS * BATCH:,} trajectories, median of seeds 0 to {seeds - 1}; KV {model.kv_capacity:,} tokens,"
        f" {SLOTS} slots, prompts 400, lengths log-normal, median 1,500, sigma 0.99, cap 16,384, {BATCH}"
        f" trajectories a replica and version; KV use {kv_use}"
    )
    rates = {arm: [run.figures.generated_tokens_per_s for run in runs] for arm, runs in found.items()}
    latencies = {arm: [run.figures.latency_p95_s for run in runs] for arm, runs in found.items()}
    unit = f"of replicas that never drain, trained tokens/s ({min(shares):.3f} to {max(shares):.3f})"
    split = f"{model.gpus * REPLICAS} GPUs in all, divided between replicas and learner as serves each best"
    return [
        *compare_arms(rates, latencies, suffix=f"_{model.name}", conditions=conditions),
        Row(f"async_repack_of_ceiling_{model.name}", median(shares), unit, f"{conditions}; {split}"),
    ]


def arm_config(
    model: FleetModel, arm: str, *, seed: int, replicas: int = REPLICAS, learner: int = LEARNER_GPUS
) -> RunConfig:
    """Make the config of an arm's run, with so many replicas and GPUs of the learner. Seconds are of the GPUs."""
    settings = {
        "seed": seed,
        "steps": STEPS,
        "rollout.engine.profile": CONFIG.with_name(f"{model.table}.yaml"),
        "rollout.engine.compression": 1,
        "rollout.engine.start_spread_s": model.spread_s,
        "rollout.engine.learner_devices": learner,
        "rollout.engine.simulation.prompt_tokens": 400,
        "rollout.replicas": replicas,
        "rollout.max_batch": SLOTS,
        "rollout.kv_capacity": model.kv_capacity,
        "rollout.batch_per_replica": BATCH,
        "rollout.prompts_per_step": REPLICAS * BATCH // GROUP,
        "rollout.group_size": GROUP,
        "repack.interval_s": 5,
        "repack.max_stall_s": 5,
        "repack.roofline_batch": "null",
    }
    return load_config(CONFIG, [*(f"{key}={value}" for key, value in settings.items()), *arm_settings(arm)])


def _share_of_ceiling(model: FleetModel, runs: Mapping[str, SimulatedRun], *, seed: int) -> float:
    """Return trained tokens/s with repacking over replicas that never drain, each arm with its best split."""
    trained: dict[str, float] = {}
    for arm in (DEFAULT_PLANNER, FULL):
        replicas = best_split(model, runs[arm])
        learner = model.gpus * (REPLICAS - replicas)
        done = simulate(arm_config(model, arm, seed=seed, replicas=replicas, learner=learner)).figures
        trained[arm] = done.trained_tokens_per_s
        log_line(f"{model.name}, seed {seed}, {arm} on {replicas} replicas and {learner} learner GPUs: {done}")
    return trained[DEFAULT_PLANNER] / trained[FULL]


def best_split(model: FleetModel, run: SimulatedRun) -> int:
    """Return how many replicas of `REPLICAS`, with the GPUs of the others for the learner, make the shortest step.

    `run` has all replicas, and a learner of `LEARNER_GPUS` beside them. The split leaves two replicas at least,
    since one alone has no other to move trajectories to.
    """
    first, last = run.rows[-2], run.rows[-1]
    fixed_s = model.profile.learner.optimizer_s
    gpu_s = LEARNER_GPUS * (last.learner_busy_s - first.learner_busy_s - fixed_s)
    step_tokens = last.trained_tokens - first.trained_tokens
    rate = run.figures.generated_tokens_per_s / REPLICAS

    def step_s(replicas: int) -> float:
        return max(step_tokens / (rate * replicas), fixed_s + gpu_s / (model.gpus * (REPLICAS - replicas)))

    return min(range(2, REPLICAS), key=step_s)
