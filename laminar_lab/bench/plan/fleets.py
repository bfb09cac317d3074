"""Emulated fleets under the real runtime, predicted and run.

`configs/emulation/repack.yaml`, 16 replicas, under each schedule, with and without repacking; and 8 replicas at
the speed of published tables, with repacking. The profile is the same on both sides, so what differs is
the runtime. Run it in the project's folder.
"""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from laminar_lab.bench.plan.facts import Compared, Setting, median_error, trained_tokens_per_s, warm_steps
from laminar_lab.bench.report import Row, Tell, spread
from laminar_lab.bench.runs import FinishedRun, train
from laminar_lab.simulate.run import simulate
from laminar_py.config import ConfigError, load_config

ROWS = (
    "plan_fleet_error_median plan_fleet_error_max plan_fleet_kv_error_max plan_fleet_staleness_error_max "
    "plan_fleet_async plan_fleet_async_repack plan_fleet_async_paper plan_fleet_in_place plan_fleet_one_step "
    "plan_fleet_sync plan_fleet_published"
)
CONFIG = Path("configs/emulation/repack.yaml")
COMPRESSION, PUBLISHED_COMPRESSION = 20, 2
STEPS = 6
LIMIT_S = 600.0  # for a run
BASE = (  # a step is what all replicas have at a time
    f"emulation.compression={COMPRESSION}",
    f"steps={STEPS}",
    "rollout.prompts_per_step=128",
    "rollout.batch_per_replica=64",
)
BATCHES = "rollout.batch_per_replica=128"  # two a version, as a replica that is free goes on
SETTINGS = (
    Setting("fleet_async", ("repack.planner=none", BATCHES)),
    Setting("fleet_async_repack", ("repack.planner=predictive", BATCHES)),
    Setting("fleet_async_paper", ("repack.planner=paper", BATCHES)),
    Setting("fleet_in_place", ("repack.planner=none", "rollout.on_new_weights=in_place", BATCHES)),
    Setting("fleet_one_step", ("schedule=one_step", "repack.planner=none")),
    Setting("fleet_sync", ("schedule=sync", "repack.planner=none")),
    Setting(
        "fleet_published",
        (
            "emulation.profile=configs/emulation/h100_7b_tp1.yaml",
            f"emulation.compression={PUBLISHED_COMPRESSION}",
            "emulation.learner_devices=64",
            "emulation.start_spread_s=200",  # about a batch, so that they are not in step
            "rollout.replicas=8",
            "rollout.max_batch=256",
            "rollout.kv_capacity=927000",
            "rollout.batch_per_replica=512",
            "rollout.group_size=16",
            "rollout.prompts_per_step=256",
            "repack.interval_s=2.5",
            "repack.max_stall_s=2.5",
            "repack.roofline_batch=128",
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class FleetFigures:
    """Figures of a run once its fleet is full, e.g. `FleetFigures(12_000.0, 0.72, 1.4)`."""

    trained_tokens_per_s: float  # in seconds of the GPUs
    kv_use: float
    staleness: float


def rows(*, runs: int = 3, tell: Tell) -> list[Row]:
    """Predicted beside measured, medians of `runs` rounds, a seed each; a round takes a quarter of an hour."""
    if not CONFIG.is_file():
        raise ConfigError(f"{CONFIG}: no such file; run this in the project's folder")
    predicted: dict[str, list[FleetFigures]] = {one.name: [] for one in SETTINGS}
    measured: dict[str, list[FleetFigures]] = {one.name: [] for one in SETTINGS}
    loads: list[float] = []
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        for seed in range(runs):
            for one in SETTINGS:
                settings = [*BASE, *one.settings, f"seed={seed}"]
                predicted[one.name].append(predict(settings))
                done = train(CONFIG, [f"name={one.name}", f"runs={folder}", *settings], limit_s=LIMIT_S)
                measured[one.name].append(read_figures(done, compression=_compression(settings)))
                loads.append(os.getloadavg()[0])
                tell(f"seed {seed}, {one.name}: predicted {predicted[one.name][-1]}")
                tell(f"measured {measured[one.name][-1]}; load average {loads[-1]:.1f}")
    return table(predicted, measured, loads)


def predict(settings: Sequence[str]) -> FleetFigures:
    """Figures of a simulated run."""
    found = simulate(load_config(CONFIG, list(settings))).figures
    return FleetFigures(found.trained_tokens_per_s, found.kv_use, found.staleness_mean)


def read_figures(done: FinishedRun, *, compression: float) -> FleetFigures:
    """Figures of a real run, of the steps that count in a simulated one too."""
    warm = warm_steps(len(done.steps))
    first, counted = done.steps[warm - 1], done.steps[warm:]
    rows = [row for row in done.fleet if first.rl_s <= row.rl_s <= counted[-1].rl_s]
    return FleetFigures(
        trained_tokens_per_s(done) / compression,
        (rows[-1].kv_s - rows[0].kv_s) / (rows[-1].rl_s - rows[0].rl_s),
        float(np.mean([row.staleness_mean for row in counted])),
    )


def _compression(settings: Sequence[str]) -> float:
    emulation = load_config(CONFIG, list(settings)).emulation
    assert emulation is not None, "the config has it"
    return emulation.compression


def table(
    predicted: dict[str, list[FleetFigures]], measured: dict[str, list[FleetFigures]], loads: Sequence[float]
) -> list[Row]:
    """Rows of all settings; `loads` are the load averages at the end of the runs."""
    conditions = (
        f"{CONFIG}, 16 emulated replicas, compressed {COMPRESSION} times, steps {warm_steps(STEPS) + 1} to"
        f" {STEPS} of {STEPS}, each of 1,024 trajectories; published: 8 replicas of configs/emulation/"
        f"h100_7b_tp1.yaml, compressed {PUBLISHED_COMPRESSION} times; the same seeds simulated;"
        f" load average after a run {spread(loads, '.1f')}"
    )

    def compared(field: str) -> list[Compared]:
        return [
            Compared(
                name,
                [getattr(one, field) for one in predicted[name]],
                [getattr(one, field) for one in measured[name]],
            )
            for name in predicted
        ]

    rates = compared("trained_tokens_per_s")
    kv_error = max(abs(one.difference) for one in compared("kv_use"))
    stale_error = max(abs(one.difference) for one in compared("staleness"))
    worst = max(abs(one.error) for one in rates)
    return [
        Row("plan_fleet_error_median", median_error(rates), "of measured trained tokens/s", conditions),
        Row("plan_fleet_error_max", worst, "of measured trained tokens/s", conditions),
        Row("plan_fleet_kv_error_max", kv_error, "of the KV caches", conditions),
        Row("plan_fleet_staleness_error_max", stale_error, "learner steps", conditions),
        *(one.row(f"plan_{one.name}", conditions=conditions) for one in rates),
    ]
