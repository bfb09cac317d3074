"""Sends signals to runs of the quickstart in each phase; prints each transcript with seconds since the signal.

`python experiments/stops/measure.py FOLDER [PHASE ...]` keeps the runs in FOLDER.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parent.parent.parent
LAMINAR = Path(sys.executable).with_name("laminar")
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
SET = "experiments/quickstart/data/heldout.jsonl"
LONG = f"eval.sets.heldout={{path: {SET}, samples: 20, temperature: 1}}"
SLOW_DISK = """
import os, time
fsync = os.fsync
def slowly(file):
    path = os.readlink(f"/proc/self/fd/{file}")
    if "/checkpoints/step-" in path and "/checkpoints/step-0-" not in path:
        time.sleep(2)
    fsync(file)
os.fsync = slowly
"""


@dataclass(frozen=True, slots=True)
class Phase:
    """Settings of a run, the file after which signals come, and the signals with their seconds."""

    settings: tuple[str, ...]
    reached: str  # file in the run's folder, by pattern; "" for the start of the command
    wait_s: float  # from that file to the first signal
    signals: tuple[tuple[signal.Signals, float], ...]
    slow_disk: bool = False


QUICK = ("warm_start.steps=3", "eval.sets={}", "rollout.replicas=1", "relay.nodes=1")
PHASES = {
    "imports": Phase(QUICK, "", 0.15, ((TERM, 0),)),
    "start of processes": Phase(QUICK, "ledger.sqlite", 0.5, ((TERM, 0),)),
    "warm start": Phase((*QUICK, "warm_start.steps=5000"), "logs/learner-0.log", 8.0, ((INT, 0),)),
    "first evaluation": Phase((*QUICK, LONG), "checkpoints/step-0-*", 1.0, ((HUP, 0),)),
    "RL": Phase(QUICK, "metrics.jsonl", 2.0, ((TERM, 0),)),
    "checkpoint on a slow disk": Phase(
        (*QUICK, "learner.checkpoint_every=2"), "checkpoints/step-2-*.tmp", 0.0, ((INT, 0),), slow_disk=True
    ),
    "RL, sync, SIGTERM again after 0.2 s": Phase(
        (*QUICK, "schedule=sync"), "metrics.jsonl", 2.0, ((TERM, 0), (TERM, 0.2))
    ),
    "RL, sync, a long batch; again after 1.5 s": Phase(
        (*QUICK, "schedule=sync", "rollout.max_batch=8", "rollout.prompts_per_step=512"),
        "checkpoints/step-0-*",
        3.0,
        ((TERM, 0), (TERM, 1.5)),
    ),
    "last evaluation": Phase(
        (*QUICK, LONG, "steps=1", "eval.every_steps=1000000"), "checkpoints/step-1-*", 1.0, ((INT, 0),)
    ),
}


def measure(name: str, phase: Phase, folder: Path) -> None:
    """Run a phase, and print its transcript from the signal on."""
    label = f"s{list(PHASES).index(name)}"
    output = folder / f"{label}.txt"
    environment = dict(os.environ)
    if phase.slow_disk:
        (folder / "sitecustomize.py").write_text(SLOW_DISK)
        environment["PYTHONPATH"] = f"{folder}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    command = [LAMINAR, "train", "configs/quickstart.yaml", f"name={label}", f"runs={folder}", *phase.settings]
    with output.open("wb") as file:
        train = subprocess.Popen(
            command, cwd=REPO, env=environment, stdout=file, stderr=file, start_new_session=True
        )
    while phase.reached and not list((folder / f"{label}-1").glob(phase.reached)):
        assert train.poll() is None, output.read_text()
        time.sleep(0.01)
    time.sleep(phase.wait_s)
    print(f"\n## {name}, load {os.getloadavg()[0]:.0f}\n", flush=True)
    for line in output.read_text().splitlines()[-1:]:
        print(f"         {line}")
    known, due, began = output.stat().st_size, list(phase.signals), time.monotonic()
    ended = False
    while not ended:
        ended = train.poll() is not None
        now = time.monotonic() - began
        if due and now >= due[0][1] and not ended:
            print(f"+{now:.2f} s  {due[0][0].name}")
            train.send_signal(due.pop(0)[0])
        for line in output.read_bytes()[known:].decode().splitlines():
            print(f"+{now:.2f} s  {line}")
        known = output.stat().st_size
        time.sleep(0.005)
    print(f"+{now:.2f} s  exit code {train.returncode}", flush=True)


if __name__ == "__main__":
    where = Path(sys.argv[1]).absolute()
    where.mkdir(parents=True, exist_ok=True)
    for chosen in sys.argv[2:] or PHASES:
        measure(chosen, PHASES[chosen], where)
