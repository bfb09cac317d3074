"""Plants silent failures in real runs, and shows which alarm names each, after how many steps; see README.md.

A healthy run stands beside them. Exit code 1 where a failure is not named within its bound, or a healthy run is.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from further import FP8
from plants import ALL, LORA, Plant

from laminar_py.ledger import read_events, reading
from laminar_py.records.events import Alarmed, Stepped, Unquantized

HERE = Path(__file__).parent
REPO = HERE.parents[1]
LIMIT_S = 600.0
QUICKSTART = "configs/quickstart.yaml"
BASE = ("learner.checkpoint_every=2", "eval.every_steps=100")
HEALTHY = {  # sound runs, in which every alarm is false
    "quickstart": (QUICKSTART, ("steps=40", "learner.checkpoint_every=5", "eval.every_steps=10")),
    "countdown": ("experiments/countdown/countdown.yaml", ("steps=25", "learner.checkpoint_every=5")),
    "turns": ("experiments/tool_calculator/tool_calculator.yaml", ("steps=25", "learner.checkpoint_every=5")),
    "fp8": (QUICKSTART, (*FP8, "steps=40", "learner.checkpoint_every=5", "eval.every_steps=10")),
    "adapter": (QUICKSTART, (*LORA, "steps=25", "learner.checkpoint_every=5")),
    "fleet": ("configs/emulation/repack.yaml", ("steps=6", "rollout.replicas=4", "rollout.prompts_per_step=50")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a run said about a planted failure."""

    alarms: list[Alarmed]
    steps: int
    exit_code: int
    elapsed_s: float
    output: str


def train(name: str, folder: Path, settings: Sequence[str], *, config: str = QUICKSTART) -> tuple[int, str]:
    """Train with a planted failure, "" for none; return the exit code and the output."""
    environment = os.environ | {"SILENT_PLANT": name, "PYTHONPATH": f"{HERE / 'inject'}:{REPO}"}
    command = [sys.executable, "-c", "from laminar_py.cli import main; main()", "train", config]
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


def run(
    name: str, folder: Path, settings: Sequence[str], *, resumes: bool = False, config: str = QUICKSTART
) -> Seen:
    """Train with a planted failure, after a sound run of two steps if it `resumes`."""
    began = time.monotonic()
    if resumes:
        train("", folder, [*settings, "steps=2"])
        settings = [*settings, "--resume"]
    code, output = train(name, folder, settings, config=config)
    alarms, steps = [], 0
    for ledger in sorted(folder.glob("*/*.sqlite"))[-1:]:
        with reading(ledger.parent) as connection:
            alarms = list(read_events(connection, Alarmed))
            ended = read_events(connection, Unquantized)
            alarms += [Alarmed(one.step, "quantization", "replicas", one.describe()) for one in ended]
            steps = len(list(read_events(connection, Stepped)))
    return Seen(alarms=alarms, steps=steps, exit_code=code, elapsed_s=time.monotonic() - began, output=output)


def named(plant: Plant, seen: Seen) -> Alarmed | None:
    """The alarm that names a failure within its bound."""
    checks = (plant.check,) if isinstance(plant.check, str) else plant.check
    within = plant.within + (2 if plant.resumes else 0)
    return next((one for one in seen.alarms if one.check in checks and one.step <= within), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="failures to plant, or kinds of sound runs; all by default")
    parser.add_argument("--healthy", type=int, default=0, help="sound runs in place of failures: this many seeds")
    parser.add_argument("--runs", type=Path, default=REPO / "runs" / "silent")
    options = parser.parse_args()
    if options.healthy:
        kinds = options.names or HEALTHY
        sound = [is_sound(kind, seed, options.runs) for kind in kinds for seed in range(options.healthy)]
    else:
        sound = [is_named(name, ALL[name], options.runs) for name in options.names or ALL]
    print(f"{sum(sound)} of {len(sound)} as they should be")
    raise SystemExit(not all(sound))


def is_named(name: str, plant: Plant, runs: Path) -> bool:
    """Plant a failure, and say what named it, and when."""
    steps = max(6, plant.within + 4)
    settings = [*BASE, f"steps={steps}", *plant.settings]
    seen = run(name, runs / name, settings, resumes=plant.resumes)
    alarm = named(plant, seen)
    shown = alarm or next(iter(seen.alarms), None)
    line = "" if shown is None else f"step {shown.step}: {shown.check}: {shown.part}: {shown.message}"
    outcome = f"{seen.elapsed_s:.0f} s, {seen.steps} steps, exit {seen.exit_code}"
    print(f"{'named ' if alarm else 'MISSED'} {name} ({outcome}): {line}", flush=True)
    if alarm is None:
        print("      ", *seen.output.strip().splitlines()[-3:], sep="\n       ", flush=True)
    return alarm is not None


def is_sound(kind: str, seed: int, runs: Path) -> bool:
    """Run without a failure, and say which alarms were false."""
    config, settings = HEALTHY[kind]
    seen = run("", runs / f"{kind}-{seed}", [*settings, f"seed={seed}"], config=config)
    found = [f"{one.check}: {one.message}" for one in seen.alarms]
    print(f"{kind} seed {seed}: exit {seen.exit_code}, {seen.steps} steps, alarms: {found}", flush=True)
    return not found and seen.exit_code == 0


if __name__ == "__main__":
    main()
