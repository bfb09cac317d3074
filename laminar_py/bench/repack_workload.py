"""The workload of `laminar bench repack`: 16 emulated replicas under the real runtime, by planner.

Times of GPUs are emulated, `COMPRESSION` times as fast; everything else is real: Ray's processes, relays, ledger
and controller, on whatever cores there are. The workload is that of `configs/emulation/repack.yaml`. Run it in the
project's folder.
"""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from laminar_py.bench.report import Row
from laminar_py.bench.runs import FinishedRun, train
from laminar_py.config import ConfigError, RepackPlanner
from laminar_py.store.database import reading

CONFIG = Path("configs/emulation/repack.yaml")
COMPRESSION = 20
INTERVAL_S = 5.0  # emulated, as all seconds below
ROOFLINE_BATCH = 48
MAX_STALL_S = 0.7
PREFILL_TOKENS_PER_S = 25_000
SIGMA = 0.99  # of log-lengths: p99 is 10 times the median
SPREAD_S = 400.0  # over which the replicas begin, about one batch, so that they are not in step


@dataclass(frozen=True, slots=True)
class Window:
    """Emulated seconds of RL that are left out at first, and that count."""

    warm_s: float
    counted_s: float


WORKLOAD = Window(700.0, 1000.0)


@dataclass(frozen=True, slots=True)
class Figures:
    """One run, in emulated seconds."""

    tokens_per_s: float  # generated
    kv_use: float
    latency_p95_s: float  # from issue to the last token
    round_s: float  # longest prefill that a round cost a destination


def settings_of(planner: RepackPlanner, *, seed: int, replicas: int = 16) -> list[str]:
    """Of any run here; the config's seconds are real ones."""
    return [
        f"seed={seed}",
        f"repack.planner={planner}",
        f"repack.interval_s={INTERVAL_S / COMPRESSION}",
        f"repack.max_stall_s={MAX_STALL_S / COMPRESSION}",
        f"repack.roofline_batch={ROOFLINE_BATCH}",
        f"emulation.compression={COMPRESSION}",
        f"rollout.replicas={replicas}",
        "steps=100000",
    ]


def check_folder() -> None:
    """Raises ConfigError where the workload's files are not."""
    if not CONFIG.is_file():
        raise ConfigError(f"{CONFIG}: no such file; run this benchmark in the project's folder")


def workload_rows(*, seeds: Sequence[int], tell: Callable[[str], None], window: Window = WORKLOAD) -> list[Row]:
    """The planners side by side, medians over the seeds. Two minutes a run, four runs a seed."""
    check_folder()
    found: dict[str, list[Figures]] = {"none": [], "paper": [], "predictive": [], "full": []}
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        for seed in seeds:
            for name, kept in found.items():
                figures = run_arm(name, seed=seed, folder=Path(folder), window=window)
                kept.append(figures)
                tell(f"seed {seed}, {name}: {figures}")
    return table(found, _conditions(seeds, window))


def run_arm(name: str, *, seed: int, folder: Path, window: Window, sigma: float = SIGMA) -> Figures:
    """One of `none`, `paper`, `predictive` and `full`, on all replicas."""
    # the ceiling never drains: what runs goes on in place when weights come
    planner = RepackPlanner.NONE if name == "full" else RepackPlanner(name)
    seconds = (window.warm_s + window.counted_s) / COMPRESSION
    settings = [
        f"name=repack-{name}",
        f"runs={folder}",
        *settings_of(planner, seed=seed),
        f"emulation.start_spread_s={SPREAD_S}",
        f"max_rl_seconds={seconds + 1}",
        f"rollout.on_new_weights={'in_place' if name == 'full' else 'drain'}",
        f"emulation.sigma={sigma}",
    ]
    return read_figures(train(CONFIG, settings), window)


def read_figures(done: FinishedRun, window: Window) -> Figures:
    """Of the part of a run that counts."""
    rows = [row for row in done.fleet if row.rl_s * COMPRESSION >= window.warm_s]
    first, last = rows[0], rows[-1]
    elapsed_s = last.rl_s - first.rl_s
    return Figures(
        (last.generated_tokens - first.generated_tokens) / elapsed_s / COMPRESSION,
        (last.kv_s - first.kv_s) / elapsed_s,
        COMPRESSION * latency_p95_s(done.folder, newest_s=elapsed_s),
        done.summary.repack.prefill_max / PREFILL_TOKENS_PER_S,
    )


def latency_p95_s(run: Path, *, newest_s: float) -> float:
    """Real seconds from issue to the last token, of training trajectories that finished in the last so many."""
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


def _conditions(seeds: Sequence[int], window: Window) -> str:
    return (
        f"16 emulated replicas, compressed {COMPRESSION} times, real runtime; {window.counted_s:g} emulated s"
        f" after {window.warm_s:g}, median of seeds {', '.join(map(str, seeds))}; KV 120,000 tokens, 64 slots,"
        " decode step 20 ms + 80 ns a KV token, prefill 25,000 tokens/s, prompts 400, lengths log-normal, median"
        " 1,500, sigma 0.99, cap 16,384, 200 trajectories a replica and version"
    )


def table(found: dict[str, list[Figures]], conditions: str) -> list[Row]:
    """The rows of all arms, each with one entry a seed."""

    def ratio(name: str, other: str) -> float:
        pairs = zip(found[name], found[other], strict=True)
        return median(one.tokens_per_s / two.tokens_per_s for one, two in pairs)

    gains = [
        (ours.tokens_per_s - off.tokens_per_s) / (full.tokens_per_s - off.tokens_per_s)
        for ours, off, full in zip(found["predictive"], found["none"], found["full"], strict=True)
    ]
    latencies = zip(found["predictive"], found["none"], strict=True)
    rows = [
        Row("throughput_repack_over_off", ratio("predictive", "none"), "x generated tokens/s", conditions),
        Row("throughput_paper_over_off", ratio("paper", "none"), "x generated tokens/s", conditions),
        Row("throughput_full_over_off", ratio("full", "none"), "x generated tokens/s", conditions),
        Row("gain_of_ceiling", median(gains), "of the gain of full replicas", conditions),
        Row("ours_over_paper_planner", ratio("predictive", "paper"), "x generated tokens/s", conditions),
        Row(
            "latency_p95_over_off",
            median(ours.latency_p95_s / off.latency_p95_s for ours, off in latencies),
            "x",
            conditions,
        ),
        Row("round_s", max(figures.round_s for figures in found["predictive"]), "s at most, emulated", conditions),
        Row(
            "round_paper_s", max(figures.round_s for figures in found["paper"]), "s at most, emulated", conditions
        ),
    ]
    labels = {"none": "off", "paper": "paper", "predictive": "repack", "full": "full"}
    for name, label in labels.items():
        kv_use = median(figures.kv_use for figures in found[name])
        rows.append(Row(f"kv_use_{label}", kv_use, "of KV caches", conditions))
    return rows
