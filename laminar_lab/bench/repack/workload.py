"""Gain of repacking on 16 emulated replicas under the real runtime, by planner.

Times of GPUs are emulated, `COMPRESSION` times as fast. Processes, relays, ledger and controller are real and
share the cores of this machine. The workload is in `configs/emulation/repack.yaml`; run this in the project's
folder.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from laminar_lab.bench.repack.arms import ARMS, FULL, PAPER, arm_settings, compare_arms
from laminar_lab.bench.repack.plan import MAX_STALL_S, SPEED
from laminar_lab.bench.report import Row, log_line
from laminar_lab.bench.runs import FinishedRun, require_project_file, train
from laminar_py.config.rollout import DEFAULT_PLANNER, NO_PLANNER
from laminar_py.ledger import reading

ROWS = (
    "throughput_repack_over_off throughput_paper_over_off throughput_full_over_off gain_of_ceiling "
    "ours_over_paper_planner latency_p95_over_off round_s kv_use_off kv_use_paper kv_use_repack kv_use_full"
)
CONFIG = Path("configs/emulation/repack.yaml")
COMPRESSION = 20
INTERVAL_S = 5.0  # emulated, as all seconds below
SIGMA = 0.99  # of log-lengths: p99 is 10 times the median
SPREAD_S = 400.0  # over which the replicas begin, about one batch, so that they start at different times


@dataclass(frozen=True, slots=True)
class Window:
    """Emulated seconds of RL: first the ones that are left out, then the ones that count."""

    warm_s: float
    counted_s: float


WORKLOAD = Window(600.0, 1000.0)  # 12 runs fit into 20 minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """Figures of a run, in emulated seconds."""

    tokens_per_s: float  # generated
    kv_use: float
    latency_p95_s: float  # from issue to the last token
    round_s: float  # longest prefill that a round of repacking cost a destination, in the whole run


def settings_of(arm: str, *, seed: int, replicas: int = 16) -> list[str]:
    """Return the settings of any run of an arm; the config's seconds are real ones."""
    return [
        f"seed={seed}",
        *arm_settings(arm),
        f"repack.interval_s={INTERVAL_S / COMPRESSION}",
        f"repack.max_stall_s={MAX_STALL_S / COMPRESSION}",
        f"repack.roofline_batch={SPEED.roofline_batch}",
        f"rollout.engine.compression={COMPRESSION}",
        f"rollout.replicas={replicas}",
        "steps=100000",
    ]


def rows(*, seeds: int = 3) -> list[Row]:
    """Run each arm under so many seeds and compare the medians. Two minutes a run, four runs a seed."""
    require_project_file(CONFIG)
    found: dict[str, list[ArmFigures]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        for seed in range(seeds):
            for arm, kept in found.items():
                kept.append(run_arm(arm, seed=seed, folder=Path(folder), window=WORKLOAD))
                log_line(f"seed {seed}, {arm}: {kept[-1]}")
    return table(found)


def run_arm(arm: str, *, seed: int, folder: Path, window: Window, sigma: float = SIGMA) -> ArmFigures:
    """Run one of `ARMS` on all replicas."""
    settings = [
        f"name=repack-{arm}",
        f"runs={folder}",
        *settings_of(arm, seed=seed),
        f"rollout.engine.start_spread_s={SPREAD_S}",
        f"max_rl_seconds={(window.warm_s + window.counted_s) / COMPRESSION + 1}",
        f"rollout.engine.sigma={sigma}",
    ]
    return read_figures(train(CONFIG, settings), window)


def read_figures(done: FinishedRun, window: Window) -> ArmFigures:
    """Read the figures of a run within the window that counts."""
    rows = [row for row in done.fleet if row.rl_s * COMPRESSION >= window.warm_s]
    first, last = rows[0], rows[-1]
    elapsed_s = last.rl_s - first.rl_s
    return ArmFigures(
        tokens_per_s=(last.generated_tokens - first.generated_tokens) / elapsed_s / COMPRESSION,
        kv_use=(last.kv_s - first.kv_s) / elapsed_s,
        latency_p95_s=COMPRESSION * latency_p95_s(done.folder, newest_s=elapsed_s),
        round_s=done.summary.repack.prefill_max / SPEED.prefill_tokens_per_s,
    )


def latency_p95_s(run: Path, *, newest_s: float) -> float:
    """Return the p95 of real seconds from issue to last token; of responses finished in the last `newest_s`."""
    with (
        reading(run) as connection,
        closing(
            connection.execute(
                "SELECT done.mono - begun.mono FROM event AS done JOIN event AS begun"
                " ON begun.subject = done.subject AND begun.kind = 'issued' WHERE done.kind = 'finished'"
                " AND done.mono > (SELECT max(mono) FROM event WHERE kind = 'finished') - ?",
                (newest_s,),
            )
        ) as rows,
    ):
        return float(np.percentile([latency for (latency,) in rows], 95))


def table(found: Mapping[str, Sequence[ArmFigures]]) -> list[Row]:
    """Make the rows of the four arms, each of which has an entry a seed."""
    seeds = len(found[NO_PLANNER])
    conditions = (
        f"16 emulated replicas, compressed {COMPRESSION} times, real runtime; {WORKLOAD.counted_s:g} emulated s"
        f" after {WORKLOAD.warm_s:g}, median of seeds 0 to {seeds - 1}; KV 120,000 tokens, 64 slots,"
        " decode step 20 ms + 80 ns a KV token, prefill 25,000 tokens/s, prompts 400, lengths log-normal, median"
        " 1,500, sigma 0.99, cap 16,384, 200 trajectories a replica and version; the paper's planner keeps to the"
        " roofline batch of 48, ours to the slots"
    )
    rates = {arm: [figures.tokens_per_s for figures in runs] for arm, runs in found.items()}
    latencies = {arm: [figures.latency_p95_s for figures in runs] for arm, runs in found.items()}
    kv_use = {arm: median(figures.kv_use for figures in runs) for arm, runs in found.items()}
    longest = {arm: max(figures.round_s for figures in found[arm]) for arm in (DEFAULT_PLANNER, PAPER)}
    paper = f"{conditions}; of the whole run, from its start; the paper's planner {longest[PAPER]:.2f}"
    names = {NO_PLANNER: "off", PAPER: "paper", DEFAULT_PLANNER: "repack", FULL: "full"}
    return [
        *compare_arms(rates, latencies, conditions=conditions),
        Row("round_s", longest[DEFAULT_PLANNER], "s of prefill at most, emulated", paper),
        *(Row(f"kv_use_{name}", kv_use[arm], "of KV caches", conditions) for arm, name in names.items()),
    ]
