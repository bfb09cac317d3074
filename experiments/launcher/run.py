"""Twelve runs of `experiment.yaml`, whose launcher is killed twice: `python experiments/launcher/run.py [--json]`.

Asked of it: every run ends once, and its ledger proves the laws.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from laminar_lab.audit.verify import verify
from laminar_lab.launcher.experiment import read_experiment
from laminar_lab.launcher.progress import RunState, read_all_progress

HERE = Path(__file__).parent
LAUNCH = [sys.executable, "-P", "-m", "laminar_py.cli", "launch"]
KILLED_AT = (2, 7)  # finished runs, after which the next run loses its launcher
LOOK_S = 0.5


def main() -> None:
    """Launch, kill, launch again, and judge."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "out", help="new folder for the runs")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True)
    file = Path(shutil.copy(HERE / "experiment.yaml", arguments.out))
    began = time.monotonic()
    for finished in KILLED_AT:
        kill_in_a_run(file, after=finished)
    code = subprocess.run([*LAUNCH, str(file)], check=False, stdout=sys.stderr).returncode
    figures = judge(file, code=code, elapsed_s=time.monotonic() - began)
    print(json.dumps(figures, indent=None if arguments.json else 2))
    raise SystemExit(0 if figures["ended_once"] == figures["runs"] and not figures["violations"] else 1)


def kill_in_a_run(file: Path, *, after: int) -> None:
    """Start a launcher, and kill it in the middle of a run when so many have finished."""
    launcher = subprocess.Popen([*LAUNCH, str(file)], stdout=sys.stderr)
    experiment = read_experiment(file)
    while True:
        progress = read_all_progress(experiment)
        ended = sum(one.state is RunState.FINISHED for one in progress)
        if ended >= after and any(0 < one.step < one.run.config.steps for one in progress):
            break
        assert launcher.poll() is None, "the launcher has ended by itself"
        time.sleep(LOOK_S)
    launcher.kill()
    launcher.wait()


def judge(file: Path, *, code: int, elapsed_s: float) -> dict[str, object]:
    """Figures of the whole."""
    experiment = read_experiment(file)
    progress = read_all_progress(experiment)
    folders = {run.name: list(run.config.runs.glob(f"{run.name}-[0-9]*/summary.json")) for run in experiment.runs}
    once = [one for one in progress if one.state is RunState.FINISHED and len(folders[one.run.name]) == 1]
    return {
        "runs": len(progress),
        "ended_once": len(once),
        "steps": sum(one.step for one in progress),
        "violations": sum(len(verify(one.run.folder.path)) for one in once if one.run.folder is not None),
        "exit_code": code,
        "launchers_killed": len(KILLED_AT),
        "minutes": round(elapsed_s / 60, 1),
    }


if __name__ == "__main__":
    main()
