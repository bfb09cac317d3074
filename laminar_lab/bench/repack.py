"""The gain of repacking for a model at the speed of published decode tables, simulated on a virtual clock.

A number on a virtual clock depends on no machine. The workload is `CONFIG` with the times, slots and KV cache of a
replica of `MODELS`; a version has `BATCH` trajectories on each replica. Run this in the project's folder.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import median

from laminar_lab.bench.report import Ratio, Row, log_line
from laminar_lab.bench.runs import require_project_file
from laminar_lab.simulate.figures import SimulatedFigures
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
)
CONFIG = Path("configs/emulation/repack.yaml")
FULL, PAPER = "full", "paper"
ARMS = {  # settings of the compared ways to take new weights
    NO_PLANNER: (f"repack.planner={NO_PLANNER}",),
    DEFAULT_PLANNER: (f"repack.planner={DEFAULT_PLANNER}",),
    PAPER: (f"repack.planner={PAPER}",),
    FULL: (f"repack.planner={NO_PLANNER}", "rollout.on_new_weights=in_place"),  # replicas that never drain
}
REPLICAS, SLOTS, GROUP = 16, 256, 16
BATCH = 512  # trajectories of a replica under a version; a step trains as many of each replica
STEPS = 12  # the first quarter, while the fleet fills, does not count
LEARNER_GPUS = 128  # more than keep up


@dataclass(frozen=True, kw_only=True)
class FleetModel:
    """A model on its GPUs, see `MODELS`."""

    table: str  # file of its times in `configs/emulation`
    gpus: int  # per replica
    kv_capacity: int  # tokens per replica
    spread_s: float  # over which the replicas begin, about a batch, so that they start at different times


MODELS = {
    "7b": FleetModel(table="h100_7b_tp1", gpus=1, kv_capacity=927_000, spread_s=200.0),
    "32b": FleetModel(table="h100_32b_tp4", gpus=4, kv_capacity=794_000, spread_s=250.0),
}


def rows(*, seeds: int = 3, model: str = "7b") -> list[Row]:
    """Simulate every arm of a model of `MODELS` under each seed; rows are medians over seeds.

    `model=7b` has one GPU a replica and `model=32b` four. A seed takes four runs, each a minute of one core.
    """
    require_project_file(CONFIG)
    if model not in MODELS:
        raise ConfigError(f"model={model}: not a known model; choose {' or '.join(MODELS)}")
    fleet = MODELS[model]
    figures: dict[str, list[SimulatedFigures]] = {arm: [] for arm in ARMS}
    for seed in range(seeds):
        for arm, runs in figures.items():
            runs.append(simulate(_arm_config(fleet, arm, seed=seed)).figures)
            log_line(f"{model}, seed {seed}, {arm}: {runs[-1]}")
    rates = {arm: [run.generated_tokens_per_s for run in runs] for arm, runs in figures.items()}
    latencies = {arm: [run.latency_p95_s for run in runs] for arm, runs in figures.items()}
    kv_use = ", ".join(f"{arm} {median(run.kv_use for run in runs):.2f}" for arm, runs in figures.items())
    conditions = (
        f"simulated {model}, {REPLICAS} replicas of {fleet.gpus} GPUs, H100 tables; steps 4 to {STEPS} of"
        f" {REPLICAS * BATCH:,} trajectories, median of seeds 0 to {seeds - 1}; KV {fleet.kv_capacity:,} tokens,"
        f" {SLOTS} slots, prompts 400, lengths log-normal, median 1,500, sigma 0.99, cap 16,384, {BATCH}"
        f" trajectories a replica and version; KV use {kv_use}; without repacking"
        f" {median(rates[NO_PLANNER]):,.0f} generated tokens/s"
    )

    def over(name: str, values: dict[str, list[float]], arm: str, base: str) -> Row:
        ratio = Ratio.between(values[arm], values[base])
        return Row(name, ratio.median, f"x ({ratio.least:.3f} to {ratio.most:.3f})", conditions)

    gains = [
        (ours - off) / (full - off)
        for ours, off, full in zip(rates[DEFAULT_PLANNER], rates[NO_PLANNER], rates[FULL], strict=True)
    ]
    share = f"of the gain of replicas that never drain ({min(gains):.3f} to {max(gains):.3f})"
    return [
        over("throughput_repack_over_off", rates, DEFAULT_PLANNER, NO_PLANNER),
        over("throughput_paper_over_off", rates, PAPER, NO_PLANNER),
        over("throughput_full_over_off", rates, FULL, NO_PLANNER),
        Row("gain_of_ceiling", median(gains), share, conditions),
        over("ours_over_paper_planner", rates, DEFAULT_PLANNER, PAPER),
        over("latency_p95_over_off", latencies, DEFAULT_PLANNER, NO_PLANNER),
    ]


def _arm_config(model: FleetModel, arm: str, *, seed: int) -> RunConfig:
    """Make the config of an arm's run. Seconds are of the GPUs."""
    settings = {
        "seed": seed,
        "steps": STEPS,
        "rollout.engine.profile": CONFIG.with_name(f"{model.table}.yaml"),
        "rollout.engine.compression": 1,
        "rollout.engine.start_spread_s": model.spread_s,
        "rollout.engine.learner_devices": LEARNER_GPUS,
        "rollout.engine.simulation.prompt_tokens": 400,
        "rollout.replicas": REPLICAS,
        "rollout.max_batch": SLOTS,
        "rollout.kv_capacity": model.kv_capacity,
        "rollout.batch_per_replica": BATCH,
        "rollout.prompts_per_step": REPLICAS * BATCH // GROUP,
        "rollout.group_size": GROUP,
        "repack.interval_s": 5,
        "repack.max_stall_s": 5,
    }
    return load_config(CONFIG, [*(f"{key}={value}" for key, value in settings.items()), *ARMS[arm]])
