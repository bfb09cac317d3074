"""`async` against `one_step` and `sync`: same parts, seeds and settings; only the schedule differs.

`python experiments/schedules/run.py [--json] [--seeds N] [--seconds S]` trains the quickstart under each of the
three for 60 s of RL, seed by seed; the weights in force after 30 and 60 s are kept and evaluated when RL is over.
A second start measures only the missing runs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from laminar_lab.bench.report import Ratio, Row, show, spread
from laminar_lab.bench.runs import FinishedRun, KeptResults, make_parser, train
from laminar_py.config.rollout import Schedule

HERE = Path(__file__).parent
CONFIG = Path("configs/quickstart.yaml")
KEPT = Path(".cache/schedules")
ORDER = (Schedule.SYNC, Schedule.ONE_STEP, Schedule.ASYNC)
SEEDS = 3
SECONDS = 60  # of RL
REST_S = 300.0  # that a run may take for its start, the warm start and the evaluations; on two idle cores a tenth


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run, e.g. `Figure("steps", ",.0f", lambda done: done.summary.steps)`."""

    unit: str
    form: str  # of its numbers
    read: Callable[[FinishedRun], float]


def figures(marks_s: Sequence[int]) -> dict[str, Figure]:
    """Figures by their names; accuracies after so many seconds of RL."""
    found = {
        "trained_tokens_per_s": Figure("tokens/s", ",.0f", lambda done: done.summary.trained_tokens_per_s),
        "generated_tokens_per_s": Figure(
            "tokens/s", ",.0f", lambda done: done.summary.tokens.generated / done.summary.rl_seconds
        ),
        "steps": Figure("steps", ",.0f", lambda done: done.summary.steps),
        "staleness_mean": Figure("steps", ".2f", lambda done: done.summary.staleness.mean),
        "versions_alive_max": Figure("versions", ".0f", lambda done: done.summary.versions_alive_max),
        "overlap_share": Figure("share of learner time", ".2f", lambda done: done.summary.overlap_share),
    }
    for mark in marks_s:
        at = partial(accuracy_at, mark_s=mark, last_s=marks_s[-1])
        found[f"accuracy_{mark}s"] = Figure("share of 300", ".3f", at)
    return found


def run(schedule: Schedule, seed: int, marks_s: Sequence[int]) -> FinishedRun:
    """One run under a schedule."""
    return train(
        CONFIG,
        [
            "name=schedules",
            f"schedule={schedule}",
            f"seed={seed}",
            "steps=100000",
            f"max_rl_seconds={marks_s[-1]}",
            f"eval.at_seconds={list(marks_s)}",
            "eval.every_steps=null",
            "eval.deferred=true",
        ],
        limit_s=marks_s[-1] + REST_S,
    )


def accuracy_at(done: FinishedRun, *, mark_s: int, last_s: int) -> float:
    """Held-out accuracy of the weights in force after so many seconds of RL."""
    # the last moment at or before the mark; the run itself ends with the step that crosses the last mark
    known = [e for e in done.summary.evaluations if e.rl_s > 0 and (e.rl_s <= mark_s or mark_s == last_s)]
    return max(known, key=lambda e: e.rl_s).mean


def rows(runs: Mapping[Schedule, Sequence[FinishedRun]], marks_s: Sequence[int]) -> list[Row]:
    """Speed and learning side by side, medians over the seeds; conditions say the ranges."""
    seeds = len(runs[Schedule.SYNC])
    setting = f"quickstart, {seeds} seeds, {marks_s[-1]} s of RL each, one thread per process"
    found = []
    for schedule, done in runs.items():
        values = {name: [figure.read(one) for one in done] for name, figure in figures(marks_s).items()}
        ranges = ", ".join(f"{name} {spread(values[name], one.form)}" for name, one in figures(marks_s).items())
        found += [
            Row(f"{name}_{schedule}", median(values[name]), figure.unit, f"{setting}; {schedule}: {ranges}")
            for name, figure in figures(marks_s).items()
        ]
    speeds = {schedule: [one.summary.trained_tokens_per_s for one in done] for schedule, done in runs.items()}
    ratio = Ratio.between(speeds[Schedule.ASYNC], speeds[Schedule.SYNC])
    return [Row("async_over_sync", ratio.median, "x trained tokens/s", f"{setting}; {ratio}"), *found]


def main() -> None:
    """Run all three for each seed, as far as that has not been done, and report."""
    parser = make_parser(__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each schedule, with seeds 0, 1, ...")
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of RL in each run")
    args = parser.parse_args()
    marks_s = (args.seconds // 2, args.seconds)
    kept = KeptResults(KEPT, sources=[HERE, CONFIG], settings=f"marks {marks_s}")
    runs: dict[Schedule, list[FinishedRun]] = {schedule: [] for schedule in ORDER}
    for seed in range(args.seeds):
        for schedule in ORDER:
            runs[schedule].append(kept.run(f"{schedule}-{seed}", partial(run, schedule, seed, marks_s)))
    show("schedules", rows(runs, marks_s), as_json=args.json)


if __name__ == "__main__":
    main()
