"""Six planted walls: does the triage name each, with the right remedy first, and what would `sync` make of it?

`python experiments/walls/run.py [--json] [--only NAME] [--steps N]` trains the quickstart once for each YAML of
this folder under `async`, and again under `sync`, whose step time the diagnosis of the first has predicted.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import yaml

from laminar_py.analytics.triage.diagnosis import Diagnosis
from laminar_py.analytics.triage.report import read_report
from laminar_py.bench.report import Row, show
from laminar_py.bench.runs import train
from laminar_py.config.staleness import Schedule

CONFIG = Path("configs/quickstart.yaml")
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Plant:
    """A wall as its YAML has it."""

    name: str
    wall: str
    remedy: str
    settings: tuple[str, ...]


def read_plant(path: Path) -> Plant:
    """One of the folder's YAML files."""
    tree = yaml.safe_load(path.read_text())
    settings = tuple(f"{key}={value}" for key, value in tree["settings"].items())
    return Plant(path.stem, tree["expect"]["wall"], tree["expect"]["remedy"], settings)


def run(plant: Plant, schedule: Schedule, steps: int) -> Diagnosis:
    """The diagnosis of a run with that wall."""
    settings = [f"name=walls-{plant.name}", f"schedule={schedule}", f"steps={steps}", "eval.every_steps=null"]
    done = train(CONFIG, [*settings, *plant.settings])
    found = read_report(done.folder).diagnosis
    assert found is not None, f"{done.folder} has no steps"
    return found


def rows(plant: Plant, found: Diagnosis, sync: Diagnosis) -> list[Row]:
    """What was named, and what `sync` is predicted and measured to be."""
    binding = found.binding
    named = binding.wall == plant.wall and binding.remedies[0].key == plant.remedy
    first = f"{binding.wall}: {binding.evidence}; first {binding.remedies[0]}"
    largest = f"predicted; its {found.walls_under[Schedule.SYNC]} takes most"
    return [
        Row(f"{plant.name}_named", float(named), "of 1", first),
        Row(f"{plant.name}_gain", binding.gain, "x goodput at most", f"then {found.next.wall}"),
        Row(f"{plant.name}_step_async", found.mean_step.measured_s, "s", "measured"),
        Row(f"{plant.name}_step_sync_predicted", found.under[Schedule.SYNC], "s", largest),
        Row(f"{plant.name}_step_sync", sync.mean_step.measured_s, "s", f"measured; named {sync.binding.wall}"),
    ]


def main() -> None:
    """Run all plants and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--only", choices=sorted(path.stem for path in HERE.glob("*.yaml")))
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    plants = [read_plant(path) for path in sorted(HERE.glob("*.yaml")) if args.only in (None, path.stem)]
    found = []
    for plant in plants:
        named, sync = (run(plant, schedule, args.steps) for schedule in (Schedule.ASYNC, Schedule.SYNC))
        found += rows(plant, named, sync)
    named_rows = [row for row in found if row.name.endswith("_named")]
    total = Row("walls_named", sum(row.value for row in named_rows), f"of {len(named_rows)}", "under async")
    show("walls", [total, *found], as_json=args.json)


if __name__ == "__main__":
    main()
