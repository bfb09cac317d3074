"""Training runs as an experiment starts them: the command line in a process of its own, its results typed."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laminar_py.ledger.row_files import read_rows
from laminar_py.records.metrics import FleetRow, StepRow
from laminar_py.telemetry.summary import Summary


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run's folder, summary, steps, and what its replicas did, second by second."""

    folder: Path
    summary: Summary
    steps: list[StepRow]
    fleet: list[FleetRow]


def train(config: Path, settings: list[str]) -> FinishedRun:
    """Run `laminar train`; its output goes to standard error. Raises `CalledProcessError`."""
    command = [sys.executable, "-c", "from laminar_py.cli import main; main()", "train", str(config), *settings]
    given = dict(setting.split("=", 1) for setting in settings)
    runs, pattern = Path(given.get("runs", "runs")), f"{given['name']}-*"
    before = set(runs.glob(pattern))
    subprocess.run(command, check=True, stdout=sys.stderr)
    (folder,) = set(runs.glob(pattern)) - before
    return read_run(folder)


def read_run(folder: Path) -> FinishedRun:
    """Read what a finished run left."""
    return FinishedRun(
        folder,
        msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary),
        list(read_rows(folder / "metrics.jsonl", StepRow)),
        list(read_rows(folder / "fleet.jsonl", FleetRow)),
    )
