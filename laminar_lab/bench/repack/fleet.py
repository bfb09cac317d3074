"""Gain of repacking on 16 replicas at the speed of published tables.

The production policies lead a run on a virtual clock (`simulate.run`), so figures depend on
seeds alone, and not on the machine. Arms: nothing moves, the paper's planner, ours, and replicas that never drain:
the ceiling, whose weights are swapped in place.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import yaml

from laminar_lab.bench.report import Ratio, Row, Tell, spread
from laminar_lab.simulate.figures import SimulatedRun
from laminar_lab.simulate.run import simulate
from laminar_py.config import ConfigError, EmulationProfile, RunConfig, parse_config
from laminar_py.config.emulation import EngineTimes, LearnerTimes
from laminar_py.config.rollout import DEFAULT_PLANNER, NO_PLANNER

ROWS = (
    "throughput_repack_over_off_7b throughput_paper_over_off_7b throughput_full_over_off_7b gain_of_ceiling_7b "
    "ours_over_paper_planner_7b latency_p95_over_off_7b async_repack_of_ceiling_7b "
    "throughput_repack_over_off_32b throughput_paper_over_off_32b throughput_full_over_off_32b "
    "gain_of_ceiling_32b ours_over_paper_planner_32b latency_p95_over_off_32b async_repack_of_ceiling_32b"
)
REPLICAS, SLOTS, GROUP = 16, 256, 16
BATCH = 512  # trajectories of a replica under a version; a step trains as many of each
PROMPT, CAP = 400, 16_384
STEPS = 12  # the first quarter, while the fleet fills, does not count
LEARNER_GPUS = 128  # more than keep up, where generation is what is measured
FULL = "full"
ARMS = (NO_PLANNER, "paper", DEFAULT_PLANNER, FULL)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetModel:
    """A model on its GPUs, the same times as in a file of `configs/emulation/`."""

    suffix: str  # of its rows
    profile: EmulationProfile
    gpus: int  # of a replica
    kv_capacity: int
    spread_s: float  # over which the replicas begin, about a batch, so that they are not in step


MODEL_7B = FleetModel(
    suffix="7b",
    profile=EmulationProfile(
        engine=EngineTimes(
            step_s=5.90e-3,
            sequence_s=7.8e-6,
            kv_token_s=1.86e-8,
            prefill_tokens_per_s=46_000,
            load_s=0.5,
            reserve_tokens=600,
        ),
        learner=LearnerTimes(
            train_tokens_per_s=8675,
            num_parameters=7_600_000_000,
            hidden_size=3584,
            num_layers=28,
            optimizer_s=2.0,
        ),
    ),
    gpus=1,
    kv_capacity=927_000,
    spread_s=200.0,
)
MODEL_32B = FleetModel(
    suffix="32b",
    profile=EmulationProfile(
        engine=EngineTimes(
            step_s=8.00e-3,
            sequence_s=16.7e-6,
            kv_token_s=22.1e-9,
            prefill_tokens_per_s=31_000,
            load_s=0.55,
            reserve_tokens=600,
            gpus=4,
        ),
        learner=LearnerTimes(
            train_tokens_per_s=2000,
            num_parameters=32_800_000_000,
            hidden_size=5120,
            num_layers=64,
            optimizer_s=2.0,
        ),
    ),
    gpus=4,
    kv_capacity=794_000,
    spread_s=250.0,
)
MODELS = {model.suffix: model for model in (MODEL_7B, MODEL_32B)}


def rows(*, seeds: int = 3, models: str = "7b,32b", tell: Tell) -> list[Row]:
    """Rows of a 7B on one GPU a replica, and of a 32B on four; a minute of one core a run, six runs a seed."""
    chosen = models.split(",")
    if unknown := [name for name in chosen if name not in MODELS]:
        raise ConfigError(f"models={models}: {unknown[0]} is not known; choose {' or '.join(MODELS)}")
    return [row for name in chosen for row in _rows(MODELS[name], seeds, tell)]


def _rows(model: FleetModel, seeds: int, tell: Tell) -> list[Row]:
    found: dict[str, list[SimulatedRun]] = {arm: [] for arm in ARMS}
    shares: list[float] = []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        for seed in range(seeds):
            for arm, runs in found.items():
                runs.append(simulate(arm_config(model, arm, seed=seed, folder=Path(folder))))
                tell(f"{model.suffix}, seed {seed}, {arm}: {runs[-1].figures}")
            latest = {arm: runs[-1] for arm, runs in found.items()}
            shares.append(_of_ceiling(model, latest, seed=seed, folder=Path(folder), tell=tell))
    return [*planner_rows(found, model, seeds), _ceiling_row(model, shares)]


def arm_config(
    model: FleetModel, arm: str, *, seed: int, folder: Path, replicas: int = REPLICAS, learner: int = LEARNER_GPUS
) -> RunConfig:
    """The run of an arm; its profile is written into `folder`. Seconds are the GPUs'."""
    profile = folder / f"{model.suffix}.yaml"
    profile.write_text(yaml.safe_dump(model.profile.model_dump()))
    return parse_config(
        {
            "name": f"repack-{model.suffix}",
            "seed": seed,
            "steps": STEPS,
            "schedule": "async",
            "emulation": {"profile": str(profile), "start_spread_s": model.spread_s, "learner_devices": learner},
            "simulation": {"prompt_tokens": PROMPT},
            "model": {"path": str(folder), "from_scratch": True},
            "data": {"train": str(folder / "train.jsonl")},
            "rollout": {
                "replicas": replicas,
                "max_batch": SLOTS,
                "max_len": PROMPT + CAP,
                "kv_capacity": model.kv_capacity,
                "batch_per_replica": BATCH,
                "on_new_weights": "in_place" if arm == FULL else "drain",
                "prompts_per_step": REPLICAS * BATCH // GROUP,
                "group_size": GROUP,
                "without_signal": "train",
                "sampling": {"max_new_tokens": CAP},
            },
            "reward": {"use": [{"kind": "exact", "pattern": "(x)"}]},
            "repack": {"planner": NO_PLANNER if arm == FULL else arm},
            "packer": {"max_tokens": 32_768},
        }
    )


def planner_rows(found: Mapping[str, Sequence[SimulatedRun]], model: FleetModel, seeds: int) -> list[Row]:
    """Rows of the four arms, each of which has a run for each seed."""
    rates = {arm: [run.figures.generated_tokens_per_s for run in runs] for arm, runs in found.items()}
    latencies = {arm: [run.figures.latency_p95_s for run in runs] for arm, runs in found.items()}
    kv_use = {arm: median(run.figures.kv_use for run in runs) for arm, runs in found.items()}
    told = ", ".join(f"{arm} {use:.2f}" for arm, use in kv_use.items())
    off = f"without repacking {median(rates[NO_PLANNER]):,.0f} generated tokens/s"
    conditions = f"{_conditions(model, seeds)}; {off}; KV use {told}"

    def over(name: str, values: Mapping[str, Sequence[float]], one: str, other: str) -> Row:
        ratio = Ratio.of(values[one], values[other])
        return Row(
            f"{name}_{model.suffix}", ratio.median, f"x ({ratio.least:.3f} to {ratio.most:.3f})", conditions
        )

    gains = [
        (ours - off) / (full - off)
        for ours, off, full in zip(rates[DEFAULT_PLANNER], rates[NO_PLANNER], rates[FULL], strict=True)
    ]
    return [
        over("throughput_repack_over_off", rates, DEFAULT_PLANNER, NO_PLANNER),
        over("throughput_paper_over_off", rates, "paper", NO_PLANNER),
        over("throughput_full_over_off", rates, FULL, NO_PLANNER),
        Row(f"gain_of_ceiling_{model.suffix}", median(gains), spread(gains, ".3f"), conditions),
        over("ours_over_paper_planner", rates, DEFAULT_PLANNER, "paper"),
        over("latency_p95_over_off", latencies, DEFAULT_PLANNER, NO_PLANNER),
    ]


def _conditions(model: FleetModel, seeds: int) -> str:
    return (
        f"simulated, {REPLICAS} replicas of {model.gpus} GPUs, H100 tables; steps 4 to {STEPS} of"
        f" {REPLICAS * BATCH:,} trajectories, median of seeds 0 to {seeds - 1}; KV {model.kv_capacity:,} tokens,"
        f" {SLOTS} slots, prompts {PROMPT}, lengths log-normal, median 1,500, sigma 0.99, cap {CAP:,}, {BATCH}"
        " trajectories a replica and version"
    )


# ---- replicas and learner on as many GPUs


def _of_ceiling(
    model: FleetModel, runs: Mapping[str, SimulatedRun], *, seed: int, folder: Path, tell: Tell
) -> float:
    """Trained tokens/s with repacking over those of replicas that never drain, each with its best split."""
    trained: dict[str, float] = {}
    for arm in (DEFAULT_PLANNER, FULL):
        replicas = best_split(model, runs[arm])
        learner = model.gpus * (REPLICAS - replicas)
        done = simulate(
            arm_config(model, arm, seed=seed, folder=folder, replicas=replicas, learner=learner)
        ).figures
        trained[arm] = done.trained_tokens_per_s
        tell(f"{model.suffix}, seed {seed}, {arm} on {replicas} replicas and {learner} GPUs of a learner: {done}")
    return trained[DEFAULT_PLANNER] / trained[FULL]


def best_split(model: FleetModel, run: SimulatedRun) -> int:
    """Replicas, out of `REPLICAS` with as many GPUs, beside whose learner a step is shortest; by a run that has
    `REPLICAS` and a learner of `LEARNER_GPUS`."""
    first, last = run.rows[-2], run.rows[-1]
    fixed_s = model.profile.learner.optimizer_s
    gpu_s = LEARNER_GPUS * (last.learner_busy_s - first.learner_busy_s - fixed_s)
    step_tokens = last.trained_tokens - first.trained_tokens
    rate = run.figures.generated_tokens_per_s / REPLICAS

    def step_s(replicas: int) -> float:
        return max(step_tokens / (rate * replicas), fixed_s + gpu_s / (model.gpus * (REPLICAS - replicas)))

    return min(range(2, REPLICAS), key=step_s)  # alone one has nobody to give anything to


def _ceiling_row(model: FleetModel, shares: Sequence[float]) -> Row:
    gpus = model.gpus * REPLICAS
    conditions = (
        f"{_conditions(model, len(shares))}; {gpus} GPUs in all, divided between replicas and learner as serves"
        " each best"
    )
    unit = f"of replicas that never drain, trained tokens/s ({min(shares):.3f} to {max(shares):.3f})"
    return Row(f"async_repack_of_ceiling_{model.suffix}", median(shares), unit, conditions)
