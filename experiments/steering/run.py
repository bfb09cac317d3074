"""Fixed bounds on staleness against `staleness.control`: `python experiments/steering/run.py [--json] [--tasks
...]`.

Quickstart and countdown train for equal seconds with bounds of 1, 2, 4 and 8, and under control, three seeds each.
Control starts at 4 and does not know which bound is best. It holds if its mean accuracy is at least the mean of
the best fixed bound, less one standard deviation of this bound over seeds. A further run has a learning rate that
is too high for old data: control must name the collapse. A second start measures only the missing runs.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import KeptResults, make_parser, train
from laminar_py.ledger import read_events, reading
from laminar_py.records.events import Alarmed, SettingChanged

HERE = Path(__file__).parent
KEPT = Path(".cache/steering")
SEEDS = 3
BOUNDS = (1, 2, 4, 8)
START = 4  # bound at which control begins
BOUND = "staleness.max_staleness"
LIMIT_S = 1_200.0  # of a run
# as much in flight as any of the bounds allows
COMMON = ("steps=100000", "rollout.batch_per_replica=1024", "buffer.capacity=4096", "eval.every_steps=null")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task, its seconds of RL, its settings, and the evaluation sets whose mean accuracy counts."""

    config: Path
    seconds: int
    settings: tuple[str, ...]
    sets: tuple[str, ...]


TASKS = {
    "quickstart": Task(config=Path("configs/quickstart.yaml"), seconds=30, settings=(), sets=("heldout",)),
    "countdown": Task(
        config=Path("experiments/countdown/countdown.yaml"),
        seconds=150,
        settings=(
            "learner.decay=none",  # a decay counts steps, and the number of steps differs
            *(f"eval.sets.{name}.every_steps=null" for name in ("one_change", "two_changes", "short")),
            "eval.sets.one_change_sampled.samples=1",
            "eval.sets.two_changes_sampled.samples=1",
        ),
        sets=("short", "one_change", "two_changes"),
    ),
}
COLLAPSE_S = 60  # of RL
COLLAPSE = ("learner.lr=1e-2", f"{BOUND}=8", "algorithm.clip_high=1e9", "algorithm.importance_cap=null")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run, e.g. with an accuracy of 0.9 after 30 s of RL."""

    accuracy: float
    steps: int
    changes: list[SettingChanged]
    alarms: list[Alarmed]

    @property
    def last_bound(self) -> int | None:
        """Bound at the end, None if it never changed."""
        bounds = [change.value for change in self.changes if change.name == BOUND]
        return bounds[-1] if bounds else None


def measure(task: Task, name: str, seed: int, settings: Sequence[str], *, seconds: int) -> Outcome:
    """Train for `seconds` of RL, and evaluate at the end."""
    given = [f"name={name}", f"seed={seed}", f"max_rl_seconds={seconds}", *COMMON, *task.settings, *settings]
    done = train(task.config, given, limit_s=LIMIT_S)
    last = {one.set_name: one.mean for one in done.summary.evaluations}
    with reading(done.folder) as connection:
        events = list(read_events(connection, SettingChanged, Alarmed))
    return Outcome(
        accuracy=statistics.mean(last[name] for name in task.sets),
        steps=done.summary.steps,
        changes=[event for event in events if isinstance(event, SettingChanged)],
        alarms=[event for event in events if isinstance(event, Alarmed)],
    )


def variants(bounds: Sequence[int]) -> dict[str, tuple[str, ...]]:
    """Settings by the name of a variant."""
    fixed = {f"bound_{bound}": (f"{BOUND}={bound}",) for bound in bounds}
    return fixed | {"control": (f"{BOUND}={START}", f"staleness.control.max={max(BOUNDS)}")}


def measure_task(
    kept: KeptResults, name: str, *, num_seeds: int, bounds: Sequence[int], seconds: int
) -> dict[str, list[Outcome]]:
    """Measure all variants of a task that are not kept; each seed begins with another one."""
    names = list(variants(bounds))
    found: dict[str, list[Outcome]] = {variant: [] for variant in names}
    for seed in range(num_seeds):
        first = seed % len(names)
        for variant in names[first:] + names[:first]:
            run = partial(measure, TASKS[name], "steering", seed, variants(bounds)[variant], seconds=seconds)
            found[variant].append(kept.get(f"{name}-{seconds}-{variant}-{seed}", Outcome, run))
    return found


def rows(task: str, found: Mapping[str, Sequence[Outcome]], *, seconds: int) -> list[Row]:
    """Make a row for each variant, and the margin by which control holds (0 or more) or fails."""
    mean = {name: statistics.mean(one.accuracy for one in outcomes) for name, outcomes in found.items()}
    deviation = {
        name: statistics.stdev([one.accuracy for one in outcomes]) if len(outcomes) > 1 else 0.0
        for name, outcomes in found.items()
    }
    best = max((name for name in found if name != "control"), key=mean.__getitem__)
    margin = mean["control"] - (mean[best] - deviation[best])
    steps = {name: statistics.mean(one.steps for one in outcomes) for name, outcomes in found.items()}
    each = "; ".join(
        f"{name} {mean[name]:.3f} +- {deviation[name]:.3f}, {steps[name]:.0f} steps" for name in found
    )
    ends = ", ".join(f"{len(one.changes)} to {one.last_bound or START}" for one in found["control"])
    setting = (
        f"{task}, {len(found['control'])} seeds, {seconds} s of RL, accuracy at its end, mean +- deviation over"
        f" seeds: {each}; changes of control and its last bound: {ends}"
    )
    verdict = f"control {'holds' if margin >= 0 else 'FAILS'}: the best fixed is {best}, less one deviation"
    return [
        *(Row(f"{task}_{name}", mean[name], "accuracy", setting) for name in found),
        Row(f"{task}_control_margin", margin, "accuracy", verdict),
    ]


def collapse_rows(one: Outcome) -> list[Row]:
    """Make the row of the planted collapse: the step at which it was named, none if it was not."""
    named = [alarm for alarm in one.alarms if alarm.check == "staleness"]
    words = named[0].message if named else "no alarm"
    setting = (
        f"quickstart, {', '.join(COLLAPSE)}: {words}; accuracy at the end {one.accuracy:.3f}, last bound"
        f" {one.last_bound}"
    )
    return [Row("collapse_named_at_step", float(named[0].step) if named else None, "step", setting)]


def main() -> None:
    """Run the missing runs and report."""
    parser = make_parser(__doc__)
    parser.add_argument("--tasks", nargs="*", choices=list(TASKS), default=list(TASKS), help="tasks to measure")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="seeds 0, 1, ...")
    parser.add_argument("--bounds", nargs="+", type=int, default=list(BOUNDS), help="fixed bounds")
    parser.add_argument("--seconds", type=int, help="seconds of RL; default: of each task")
    args = parser.parse_args()
    configs = [task.config for task in TASKS.values()]
    kept = KeptResults(KEPT, sources=[HERE, *configs], settings="")
    found: list[Row] = []
    for name in args.tasks:
        seconds = args.seconds or TASKS[name].seconds
        outcomes = measure_task(kept, name, num_seeds=args.seeds, bounds=args.bounds, seconds=seconds)
        found += rows(name, outcomes, seconds=seconds)
    seconds = args.seconds or COLLAPSE_S
    planted = [*COLLAPSE, f"staleness.control.max={max(BOUNDS)}"]
    run = partial(measure, TASKS["quickstart"], "collapse", 0, planted, seconds=seconds)
    found += collapse_rows(kept.get(f"collapse-{seconds}", Outcome, run))
    show("steering", found, as_json=args.json)


if __name__ == "__main__":
    main()
