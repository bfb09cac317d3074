"""Plants silent failures in real runs, and shows which alarm names each, after how many steps; see README.md.

A healthy run stands beside them. Exit code 1 where a failure is not named within its bound, or a healthy run is.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from plants import ALL, Plant

from laminar_py.ledger import read_events, reading
from laminar_py.records.events import Alarmed, Stepped

HERE = Path(__file__).parent
REPO = HERE.parents[1]
LIMIT_S = 600.0
BASE = ("steps=8", "learner.checkpoint_every=2", "eval.every_steps=100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a run said about a planted failure."""

    alarms: list[Alarmed]
    steps: int
    exit_code: int
    elapsed_s: float
    output: str


def train(name: str, folder: Path, settings: list[str]) -> tuple[int, str]:
    """Train the quickstart with a planted failure, "" for none; return the exit code and the output."""
    environment = os.environ | {"SILENT_PLANT": name, "PYTHONPATH": f"{HERE / 'inject'}:{REPO}"}
    command = [sys.executable, "-c", "from laminar_py.cli import main; main()", "train", "configs/quickstart.yaml"]
    done = subprocess.run(
        [*command, *settings, f"runs={folder}"],
        cwd=REPO,
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def run(name: str, runs: Path, settings: list[str], *, resumes: bool = False) -> Seen:
    """Train with a planted failure, after a sound run of two steps if it `resumes`."""
    began, folder = time.monotonic(), runs / (name or "healthy")
    if resumes:
        train("", folder, [*settings, "steps=2"])
        settings = [*settings, "--resume"]
    code, output = train(name, folder, settings)
    alarms, steps = [], 0
    for ledger in sorted(folder.glob("*/*.sqlite"))[-1:]:
        with reading(ledger.parent) as connection:
            alarms = list(read_events(connection, Alarmed))
            steps = len(list(read_events(connection, Stepped)))
    return Seen(alarms=alarms, steps=steps, exit_code=code, elapsed_s=time.monotonic() - began, output=output)


def named(plant: Plant, seen: Seen) -> Alarmed | None:
    """The alarm that names a failure within its bound."""
    checks = (plant.check,) if isinstance(plant.check, str) else plant.check
    within = plant.within + (2 if plant.resumes else 0)
    return next((one for one in seen.alarms if one.check in checks and one.step <= within), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="failures to plant; all by default")
    parser.add_argument("--healthy", type=int, default=0, help="healthy runs, by seed")
    parser.add_argument("--runs", type=Path, default=REPO / "runs" / "silent")
    options = parser.parse_args()
    missed = 0
    for name in options.names or ([] if options.healthy else ALL):
        plant = ALL[name]
        steps = max(6, plant.within + 4)
        settings = [*BASE, f"steps={steps}", *plant.settings]
        seen = run(name, options.runs, settings, resumes=plant.resumes)
        alarm = named(plant, seen)
        missed += alarm is None
        shown = alarm or next(iter(seen.alarms), None)
        line = "" if shown is None else f"step {shown.step}: {shown.check}: {shown.part}: {shown.message}"
        outcome = f"{seen.elapsed_s:.0f} s, {seen.steps} steps, exit {seen.exit_code}"
        print(f"{'named ' if alarm else 'MISSED'} {name} ({outcome}): {line}", flush=True)
        if alarm is None:
            print("      ", *seen.output.strip().splitlines()[-3:], sep="\n       ", flush=True)
    for seed in range(options.healthy):
        seen = run("", options.runs, [*BASE, "steps=40", f"seed={seed}"])
        missed += bool(seen.alarms) or seen.exit_code != 0
        found = [one.message for one in seen.alarms]
        print(f"healthy seed {seed}: exit {seen.exit_code}, {seen.steps} steps, alarms: {found}", flush=True)
    raise SystemExit(missed > 0)


if __name__ == "__main__":
    main()
