"""Gain of repacking on 16 replicas at the speed of published tables, simulated.

The production policies lead a run on a virtual clock (`simulate.run`), so figures depend on seeds alone, and not
on the machine. `arms` has the compared arms. Run this in the project's folder.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from laminar_lab.bench.repack.arms import ARMS, CONFIG, FULL, PAPER, arm_settings
from laminar_lab.bench.report import Ratio, Row, log_line
from laminar_lab.bench.runs import require_project_file
from laminar_lab.emulation.settings import EmulationProfile, read_profile
from laminar_lab.simulate.figures import SimulatedRun
from laminar_lab.simulate.run import simulate
from laminar_py.config import ConfigError, RunConfig, load_config
from laminar_py.config.rollout import DEFAULT_PLANNER, NO_PLANNER

ROWS = (
    "throughput_repack_over_off",
    "throughput_paper_over_off",
    "throughput_full_over_off",
    "gain_of_ceiling",
    "ours_over_paper_planner",
    "latency_p95_over_off",
    "async_repack_of_ceiling",
)
REPLICAS, SLOTS, GROUP = 16, 256, 16
BATCH = 512  # trajectories of a replica under a version; a step trains as many of each replica
STEPS = 12  # the first quarter, while the fleet fills, does not count
LEARNER_GPUS = 128  # more than keep up, for the runs that measure generation


@dataclass(frozen=True, kw_only=True)
class FleetModel:
    """A model on its GPUs, see `MODELS`."""

    name: str
    table: str  # file of its times in `configs/emulation`
    gpus: int  # per replica
    kv_capacity: int  # tokens per replica
    spread_s: float  # over which the replicas begin, about a batch, so that they start at different times

    @cached_property
    def profile(self) -> EmulationProfile:
        """Read the emulated times of engine and learner from the table."""
        return read_profile(CONFIG.with_name(f"{self.table}.yaml"))


MODELS = {
    "7b": FleetModel(name="7b", table="h100_7b_tp1", gpus=1, kv_capacity=927_000, spread_s=200.0),
    "32b": FleetModel(name="32b", table="h100_32b_tp4", gpus=4, kv_capacity=794_000, spread_s=250.0),
}


def rows(*, seeds: int = 3, model: str = "7b") -> list[Row]:
    """Simulate every arm of a model of `MODELS` under each seed, then the best splits of GPUs; return the rows.

    `model=7b` has one GPU a replica and `model=32b` four. A seed takes six runs, each a minute of one core.
    """
    require_project_file(CONFIG)
    if model not in MODELS:
        raise ConfigError(f"model={model}: not a known model; choose {' or '.join(MODELS)}")
    return _measure_model(MODELS[model], seeds)


def _measure_model(model: FleetModel, seeds: int) -> list[Row]:
    """Return the rows of a model, medians over seeds."""
    found: dict[str, list[SimulatedRun]] = {arm: [] for arm in ARMS}
    shares: list[float] = []
    for seed in range(seeds):
        for arm, runs in found.items():
            runs.append(simulate(arm_config(model, arm, seed=seed)))
            log_line(f"{model.name}, seed {seed}, {arm}: {runs[-1].figures}")
        shares.append(_share_of_ceiling(model, {arm: runs[-1] for arm, runs in found.items()}, seed=seed))
    kv_use = ", ".join(f"{arm} {median(run.figures.kv_use for run in runs):.2f}" for arm, runs in found.items())
    conditions = (
        f"simulated {model.name}, {REPLICAS} replicas of {model.gpus} GPUs, H100 tables; steps 4 to {STEPS} of"
        f" {REPLICAS * BATCH:,} trajectories, median of seeds 0 to {seeds - 1}; KV {model.kv_capacity:,} tokens,"
        f" {SLOTS} slots, prompts 400, lengths log-normal, median 1,500, sigma 0.99, cap 16,384, {BATCH}"
        f" trajectories a replica and version; KV use {kv_use}"
    )
    rates = {arm: [run.figures.generated_tokens_per_s for run in runs] for arm, runs in found.items()}
    latencies = {arm: [run.figures.latency_p95_s for run in runs] for arm, runs in found.items()}
    unit = f"of replicas that never drain, trained tokens/s ({min(shares):.3f} to {max(shares):.3f})"
    split = f"{model.gpus * REPLICAS} GPUs in all, divided between replicas and learner as serves each best"
    return [
        *_compare_arms(rates, latencies, conditions=conditions),
        Row("async_repack_of_ceiling", median(shares), unit, f"{conditions}; {split}"),
    ]


def _compare_arms(
    rates: Mapping[str, Sequence[float]],
    latencies: Mapping[str, Sequence[float]],
    *,
    conditions: str,
) -> list[Row]:
    """Make the rows of all arms from generated tokens a second and p95 latencies, [seeds] of each arm.

    `gain_of_ceiling` is the part of the ceiling's gain over no repacking that our planner reaches.
    """
    off = f"without repacking {median(rates[NO_PLANNER]):,.0f} generated tokens/s"

    def over(name: str, values: Mapping[str, Sequence[float]], arm: str, base: str) -> Row:
        ratio = Ratio.between(values[arm], values[base])
        unit = f"x ({ratio.least:.3f} to {ratio.most:.3f})"
        return Row(name, ratio.median, unit, f"{conditions}; {off}")

    gains = [
        (ours - off) / (full - off)
        for ours, off, full in zip(rates[DEFAULT_PLANNER], rates[NO_PLANNER], rates[FULL], strict=True)
    ]
    share = f"of the ceiling's gain ({min(gains):.3f} to {max(gains):.3f})"
    return [
        over("throughput_repack_over_off", rates, DEFAULT_PLANNER, NO_PLANNER),
        over("throughput_paper_over_off", rates, PAPER, NO_PLANNER),
        over("throughput_full_over_off", rates, FULL, NO_PLANNER),
        Row("gain_of_ceiling", median(gains), share, f"{conditions}; {off}"),
        over("ours_over_paper_planner", rates, DEFAULT_PLANNER, PAPER),
        over("latency_p95_over_off", latencies, DEFAULT_PLANNER, NO_PLANNER),
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
