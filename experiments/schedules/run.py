"""`async` against `one_step` and `sync`: same parts, seed and settings; only the schedule differs.

`python experiments/schedules/run.py [--json] [--seed N]` trains the quickstart three times for 60 s of RL, keeps
the weights in force after 30 and 60 s and evaluates them when RL is over.
"""

import argparse
from pathlib import Path

from laminar_py.bench.report import Row, show
from laminar_py.bench.runs import FinishedRun, train
from laminar_py.config.staleness import Schedule

CONFIG = Path("configs/quickstart.yaml")
MARKS_S = (30, 60)
ORDER = (Schedule.SYNC, Schedule.ONE_STEP, Schedule.ASYNC)


def run(schedule: Schedule, seed: int) -> FinishedRun:
    """One minute of RL under a schedule."""
    return train(
        CONFIG,
        [
            "name=schedules",
            f"schedule={schedule}",
            f"seed={seed}",
            "steps=100000",
            f"max_rl_seconds={MARKS_S[-1]}",
            f"eval.at_seconds={list(MARKS_S)}",
            "eval.every_steps=null",
            "eval.deferred=true",
        ],
    )


def accuracy_at(done: FinishedRun, mark_s: int) -> float:
    """Held-out accuracy of the weights in force after so many seconds of RL."""
    # the last moment at or before the mark; the run itself ends with the step that crosses the last mark
    known = [e for e in done.summary.evaluations if e.rl_s > 0 and (e.rl_s <= mark_s or mark_s == MARKS_S[-1])]
    return max(known, key=lambda e: e.rl_s).accuracy


def rows(runs: dict[Schedule, FinishedRun], seed: int) -> list[Row]:
    """Speed and learning, side by side."""
    conditions = f"quickstart, seed {seed}, {MARKS_S[-1]} s of RL each, one thread per process"
    found = []
    for schedule, done in runs.items():
        summary = done.summary
        found += [
            Row(f"trained_tokens_per_s_{schedule}", summary.trained_tokens_per_s, "tokens/s", conditions),
            Row(
                f"generated_tokens_per_s_{schedule}",
                summary.tokens.generated / summary.rl_seconds,
                "tokens/s",
                conditions,
            ),
            Row(f"steps_{schedule}", summary.steps, "steps", conditions),
            Row(f"staleness_mean_{schedule}", summary.staleness.mean, "versions", conditions),
            Row(f"versions_alive_max_{schedule}", summary.versions_alive_max, "versions", conditions),
            Row(f"overlap_share_{schedule}", summary.overlap_share, "share of learner time", conditions),
            *(
                Row(f"accuracy_{mark}s_{schedule}", accuracy_at(done, mark), "share of 300", conditions)
                for mark in MARKS_S
            ),
        ]
    ratio = runs[Schedule.ASYNC].summary.trained_tokens_per_s / runs[Schedule.SYNC].summary.trained_tokens_per_s
    return [Row("async_over_sync", ratio, "x trained tokens/s", conditions), *found]


def main() -> None:
    """Run all three and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    runs = {schedule: run(schedule, args.seed) for schedule in ORDER}
    show("schedules", rows(runs, args.seed), as_json=args.json)


if __name__ == "__main__":
    main()
