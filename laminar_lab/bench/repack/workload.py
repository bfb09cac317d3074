"""Repacking on a fleet: 16 emulated replicas under the real runtime, by planner.

Times of GPUs are emulated, `COMPRESSION` times as fast; everything else is real: Ray's processes, relays, ledger
and controller, on whatever cores there are. The workload is that of `configs/emulation/repack.yaml`. Run it in the
project's folder.
"""

import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from laminar_lab.bench.repack.plan import MAX_STALL_S, SPEED
from laminar_lab.bench.report import Ratio, Row, Tell
from laminar_lab.bench.runs import FinishedRun, train
from laminar_py.config import ConfigError
from laminar_py.config.rollout import NO_PLANNER
from laminar_py.ledger import decode_event, reading
from laminar_py.records.events import Assigned, Finished, Interrupted

ROWS = (
    "throughput_repack_over_off throughput_paper_over_off throughput_full_over_off gain_of_ceiling "
    "ours_over_paper_planner latency_p95_over_off round_s round_paper_s release_s kv_use_off kv_use_paper "
    "kv_use_repack kv_use_full"
)
CONFIG = Path("configs/emulation/repack.yaml")
COMPRESSION = 20
INTERVAL_S = 5.0  # emulated, as all seconds below
SIGMA = 0.99  # of log-lengths: p99 is 10 times the median
SPREAD_S = 400.0  # over which the replicas begin, about one batch, so that they are not in step


@dataclass(frozen=True, slots=True)
class Window:
    """Emulated seconds of RL that are left out at first, and that count."""

    warm_s: float
    counted_s: float


WORKLOAD = Window(600.0, 1000.0)  # with 12 runs, what fits into 20 minutes


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmFigures:
    """Figures of a run, in emulated seconds."""

    tokens_per_s: float  # generated
    kv_use: float
    latency_p95_s: float  # from issue to the last token
    round_s: float  # longest prefill that a round cost a destination
    release_s: float  # real: median from the last hand-over of an emptied replica to its first new prompt


def settings_of(planner: str, *, seed: int, replicas: int = 16) -> list[str]:
    """Settings of any run here; the config's seconds are real ones."""
    return [
        f"seed={seed}",
        f"repack.planner={planner}",
        f"repack.interval_s={INTERVAL_S / COMPRESSION}",
        f"repack.max_stall_s={MAX_STALL_S / COMPRESSION}",
        f"repack.roofline_batch={SPEED.roofline_batch}",
        f"emulation.compression={COMPRESSION}",
        f"rollout.replicas={replicas}",
        "steps=100000",
    ]


def check_folder() -> None:
    """Raise `ConfigError` where the files of the emulation are not."""
    if not CONFIG.is_file():
        raise ConfigError(f"{CONFIG}: no such file; run this in the project's folder")


def rows(*, seeds: int = 3, tell: Tell) -> list[Row]:
    """The planners side by side, medians over so many seeds. Two minutes a run, four runs a seed."""
    check_folder()
    found: dict[str, list[ArmFigures]] = {"none": [], "paper": [], "predictive": [], "full": []}
    with tempfile.TemporaryDirectory(prefix="laminar-bench-") as folder:
        for seed in range(seeds):
            for name, kept in found.items():
                figures = run_arm(name, seed=seed, folder=Path(folder), window=WORKLOAD)
                kept.append(figures)
                tell(f"seed {seed}, {name}: {figures}")
    return table(found, _conditions(range(seeds)))


def run_arm(name: str, *, seed: int, folder: Path, window: Window, sigma: float = SIGMA) -> ArmFigures:
    """Run `none`, `paper`, `predictive` or `full` on all replicas."""
    # the ceiling never drains: what runs goes on in place when weights come
    planner = NO_PLANNER if name == "full" else name
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


def read_figures(done: FinishedRun, window: Window) -> ArmFigures:
    """Figures of the part of a run that counts."""
    rows = [row for row in done.fleet if row.rl_s * COMPRESSION >= window.warm_s]
    first, last = rows[0], rows[-1]
    elapsed_s = last.rl_s - first.rl_s
    return ArmFigures(
        tokens_per_s=(last.generated_tokens - first.generated_tokens) / elapsed_s / COMPRESSION,
        kv_use=(last.kv_s - first.kv_s) / elapsed_s,
        latency_p95_s=COMPRESSION * latency_p95_s(done.folder, newest_s=elapsed_s),
        round_s=done.summary.repack.prefill_max / SPEED.prefill_tokens_per_s,
        release_s=release_s(done.folder),
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


def release_s(run: Path) -> float:
    """Real seconds, median, from the move that emptied a replica to the first new trajectory there; 0: none."""
    held, freed, waits = Counter[int](), dict[int, float](), list[float]()
    owner: dict[str, int] = {}
    kinds = "('assigned', 'interrupted', 'finished')"
    with (
        reading(run) as connection,
        closing(connection.execute(f"SELECT mono, body FROM event WHERE kind IN {kinds} ORDER BY seq")) as rows,
    ):
        for mono, body in rows:
            event = decode_event(body)
            if isinstance(event, Assigned):
                owner[event.trajectory_id] = event.replica
                held[event.replica] += 1
                since = freed.pop(event.replica, None)
                if since is not None and event.epoch == 1:
                    waits.append(mono - since)
                continue
            assert isinstance(event, Interrupted | Finished), f"{body} is of another kind"
            replica = owner.pop(event.trajectory_id)
            held[replica] -= 1
            if isinstance(event, Interrupted) and event.reason == "repacked" and not held[replica]:
                freed[replica] = mono
    return median(waits) if waits else 0.0


def _conditions(seeds: Sequence[int]) -> str:
    return (
        f"16 emulated replicas, compressed {COMPRESSION} times, real runtime; {WORKLOAD.counted_s:g} emulated s"
        f" after {WORKLOAD.warm_s:g}, median of seeds {', '.join(map(str, seeds))}; KV 120,000 tokens, 64 slots,"
        " decode step 20 ms + 80 ns a KV token, prefill 25,000 tokens/s, prompts 400, lengths log-normal, median"
        " 1,500, sigma 0.99, cap 16,384, 200 trajectories a replica and version; the paper's planner keeps to the"
        " roofline batch of 48, ours to the slots"
    )


def table(found: dict[str, list[ArmFigures]], conditions: str) -> list[Row]:
    """Rows of the four arms, each of which has an entry a seed."""
    rates = {name: [figures.tokens_per_s for figures in arm] for name, arm in found.items()}
    latencies = {name: [figures.latency_p95_s for figures in arm] for name, arm in found.items()}

    def over(row: str, values: dict[str, list[float]], one: str, other: str) -> Row:
        ratio = Ratio.of(values[one], values[other])
        return Row(row, ratio.median, f"x ({ratio.least:.3f} to {ratio.most:.3f})", conditions)

    gains = [
        (ours - off) / (full - off)
        for ours, off, full in zip(rates["predictive"], rates["none"], rates["full"], strict=True)
    ]
    released_s = median(figures.release_s for figures in found["predictive"])
    kv_use = {name: median(figures.kv_use for figures in arm) for name, arm in found.items()}
    round_s = {name: max(figures.round_s for figures in found[name]) for name in ("predictive", "paper")}
    prefill, whole = "s of prefill at most, emulated", f"{conditions}; of the whole run, from its start"
    return [
        over("throughput_repack_over_off", rates, "predictive", "none"),
        over("throughput_paper_over_off", rates, "paper", "none"),
        over("throughput_full_over_off", rates, "full", "none"),
        Row("gain_of_ceiling", median(gains), f"({min(gains):.3f} to {max(gains):.3f})", conditions),
        over("ours_over_paper_planner", rates, "predictive", "paper"),
        over("latency_p95_over_off", latencies, "predictive", "none"),
        Row("round_s", round_s["predictive"], prefill, whole),
        Row("round_paper_s", round_s["paper"], prefill, whole),
        Row("release_s", released_s, "s, real", whole),
        *(
            Row(f"kv_use_{label}", kv_use[name], "of KV caches", conditions)
            for name, label in (("none", "off"), ("paper", "paper"), ("predictive", "repack"), ("full", "full"))
        ),
    ]
