"""Planted bottlenecks: does the diagnosis name each, and does its first remedy bring the predicted speed?

`python experiments/walls/run.py [--json] [--only NAME] [--seeds N] [--steps N]` trains the quickstart twice for
each YAML of this folder and each seed: with the bottleneck, and with the first remedy against it. The step of the
second run is predicted from the first run alone, with the value that the remedy sets. The twelve runs of one seed
take about ten minutes on two quiet cores, and none takes more than `LIMIT_S` of RL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import yaml

from laminar_lab.advice import Remedy, remedies, what_if_set
from laminar_lab.bench.report import Row, show
from laminar_lab.bench.runs import make_parser, train
from laminar_lab.report.diagnosis import Bottleneck, Diagnosis
from laminar_lab.report.mean_step import MeanStep
from laminar_lab.report.run_report import read_report
from laminar_py.config.loading import load_config

CONFIG = Path("configs/quickstart.yaml")
HERE = Path(__file__).parent
LIMIT_S = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A bottleneck of a YAML file."""

    name: str
    bottleneck: Bottleneck
    remedy: str  # key that must be the first
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A run with a bottleneck and one with its remedy, e.g. predicted 1.1 s a step, and seen 1.2 s after 2.8 s."""

    named: bool  # the bottleneck, and its remedy
    change: Remedy
    before: MeanStep
    predicted_s: float
    seen_s: float


def read_plant(path: Path) -> Plant:
    """Read one of the folder's YAML files."""
    tree = yaml.safe_load(path.read_text())
    settings = tuple(f"{key}={value}" for key, value in tree["settings"].items())
    bottleneck, remedy = Bottleneck(tree["expect"]["wall"]), tree["expect"]["remedy"]
    return Plant(name=path.stem, bottleneck=bottleneck, remedy=remedy, settings=settings)


def diagnose(settings: list[str]) -> Diagnosis:
    """Train with these settings and return the diagnosis of the run."""
    done = train(CONFIG, settings)
    found = read_report(done.folder).diagnosis
    assert found is not None, f"{done.folder} has no steps"
    return found


def try_remedy(plant: Plant, *, seed: int, steps: int) -> Trial:
    """Train with the bottleneck, then with the first remedy against it, whichever other limit this machine has."""
    common = [f"steps={steps}", f"max_rl_seconds={LIMIT_S}", "eval.every_steps=null", f"seed={seed}"]
    settings = [f"name=walls-{plant.name}", *common, *plant.settings]
    found = diagnose(settings)
    step = found.mean_step
    first = remedies(plant.bottleneck, load_config(CONFIG, settings), step)[0]
    return Trial(
        named=found.binding.bottleneck is plant.bottleneck and first.key == plant.remedy,
        change=first,
        before=step,
        predicted_s=what_if_set(step, plant.bottleneck, first),
        seen_s=diagnose([*settings, f"{first.key}={first.new}"]).mean_step.measured_s,
    )


def rows(plant: Plant, trials: Sequence[Trial]) -> list[Row]:
    """Make the rows of one bottleneck, means over the seeds."""
    before = fmean(one.before.measured_s for one in trials)
    predicted = fmean(one.predicted_s for one in trials)
    seen = fmean(one.seen_s for one in trials)
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


def main() -> None:
    """Try the remedies of all plants and report."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", choices=sorted(path.stem for path in HERE.glob("*.yaml")))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=24)
    args = parser.parse_args()
    plants = [read_plant(path) for path in sorted(HERE.glob("*.yaml")) if args.only in (None, path.stem)]
    trials: dict[str, list[Trial]] = {plant.name: [] for plant in plants}
    for seed in range(args.seeds):
        for plant in plants:
            trials[plant.name].append(try_remedy(plant, seed=seed, steps=args.steps))
    show("walls", [row for plant in plants for row in rows(plant, trials[plant.name])], as_json=args.json)


if __name__ == "__main__":
    main()
