"""Planted walls: does the triage name each, and does its first remedy bring what was predicted?

`python experiments/walls/run.py [--json] [--only NAME] [--seeds N] [--steps N] [--sync]` trains the quickstart
twice for each YAML of this folder and each seed, in turn: with the wall, and with the first remedy against it. The
step of the second is predicted from the first alone, at the very value that is set. The twelve runs of one seed
take about ten minutes on two quiet cores, and none more than `LIMIT_S` of RL. `--sync`: a third, of that schedule.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import yaml
from rich.console import Console

from laminar_lab.advice import Remedy, remedies, steps_under, what_if_set
from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import train
from laminar_py.config.loading import load_config
from laminar_py.config.rollout import Schedule
from laminar_py.observe.diagnosis import Diagnosis, Wall
from laminar_py.observe.mean_step import MeanStep
from laminar_py.observe.report import read_report
from laminar_py.observe.terminal import make_table

CONFIG = Path("configs/quickstart.yaml")
HERE = Path(__file__).parent
LIMIT_S = 180
HEADS = ("change", "named", "cores", "step", "predicted", "seen", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A wall as its YAML has it."""

    name: str
    wall: Wall
    remedy: str  # key that must be the first
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run with a wall and one with a change to it, e.g. predicted 1.1 s a step, and seen 1.2 s after 2.8 s."""

    named: bool  # the wall, and its remedy
    change: Remedy
    before: MeanStep
    predicted_s: float
    seen_s: float


def read_plant(path: Path) -> Plant:
    """One of the folder's YAML files."""
    tree = yaml.safe_load(path.read_text())
    settings = tuple(f"{key}={value}" for key, value in tree["settings"].items())
    wall, remedy = Wall(tree["expect"]["wall"]), tree["expect"]["remedy"]
    return Plant(name=path.stem, wall=wall, remedy=remedy, settings=settings)


def diagnosed(settings: list[str]) -> Diagnosis:
    """Diagnosis of a run with these settings."""
    done = train(CONFIG, settings)
    found = read_report(done.folder).diagnosis
    assert found is not None, f"{done.folder} has no steps"
    return found


def try_changes(plant: Plant, *, seed: int, steps: int, sync: bool) -> list[Trial]:
    """Train with the wall, then with the first remedy against it, whatever else binds on this machine."""
    common = [f"steps={steps}", f"max_rl_seconds={LIMIT_S}", "eval.every_steps=null", f"seed={seed}"]
    settings = [f"name=walls-{plant.name}", *common, *plant.settings]
    found = diagnosed(settings)
    step = found.mean_step
    first = remedies(plant.wall, load_config(CONFIG, settings), step)[0]
    changes = {first: what_if_set(step, plant.wall, first)}
    if sync:
        changes[Remedy("schedule", "async -> sync", "")] = steps_under(step)[Schedule.SYNC][0]
    return [
        Trial(
            named=found.binding.wall is plant.wall and first.key == plant.remedy,
            change=change,
            before=step,
            predicted_s=predicted_s,
            seen_s=diagnosed([*settings, f"{change.key}={change.new}"]).mean_step.measured_s,
        )
        for change, predicted_s in changes.items()
    ]


def rows(plant: Plant, trials: list[Trial]) -> list[Row]:
    """Figures of one change to a wall, means over the seeds."""
    before, predicted, seen = (
        fmean(seconds)
        for seconds in zip(*((one.before.measured_s, one.predicted_s, one.seen_s) for one in trials), strict=True)
    )
    busy = fmean(one.before.use.cpu if one.before.use is not None else 0.0 for one in trials)
    change, values = trials[0].change, "/".join(dict.fromkeys(one.change.new for one in trials))
    conditions = f"{plant.name}: {change.key} {change.old} -> {values}, {len(trials)} seeds"
    name = f"{plant.name}_{change.key}"
    return [
        Row(f"{name}_named", fmean(one.named for one in trials), "of 1", conditions),
        Row(f"{name}_cores", busy, "in use before", conditions),
        Row(f"{name}_step", before, "s, before", conditions),
        Row(f"{name}_predicted", before / predicted, "x", conditions),
        Row(f"{name}_seen", before / seen, "x", conditions),
        Row(f"{name}_error", predicted / seen - 1, "of the step seen", conditions),
    ]


def line(found: list[Row]) -> list[str]:
    """The line of one change in the table."""
    named, cores, step, predicted, seen, error = (row.value or 0.0 for row in found)
    wall, _, change = found[0].conditions.rpartition(",")[0].partition(": ")
    times = f"{step:.2f} s", f"{predicted:.2f} x", f"{seen:.2f} x"
    return [wall, change, f"{named:.0%}", f"{cores:.0%}", *times, f"{error:+.0%}"]


def main() -> None:
    """Try the remedies of all plants and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--only", choices=sorted(path.stem for path in HERE.glob("*.yaml")))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--sync", action="store_true", help="try schedule=sync too")
    args = parser.parse_args()
    plants = [read_plant(path) for path in sorted(HERE.glob("*.yaml")) if args.only in (None, path.stem)]
    trials: dict[str, list[list[Trial]]] = {plant.name: [] for plant in plants}
    for seed in range(args.seeds):
        for plant in plants:
            trials[plant.name].append(try_changes(plant, seed=seed, steps=args.steps, sync=args.sync))
    found = [rows(plant, list(same)) for plant in plants for same in zip(*trials[plant.name], strict=True)]
    if args.json:
        show("walls", [row for of_change in found for row in of_change], as_json=True)
        return
    Console().print(make_table("Planted walls", "wall", HEADS, map(line, found)))


if __name__ == "__main__":
    main()
