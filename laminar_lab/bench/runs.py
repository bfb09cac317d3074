"""Training runs as an experiment starts them: the command line in a process of its own, its results typed."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from laminar_py.ledger.row_files import read_rows
from laminar_py.observe.summary import Summary
from laminar_py.records.metrics import FleetRow, StepRow

LAMINAR = (sys.executable, "-c", "from laminar_py.cli import main; main()")
GRACE_S = 30.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run's folder, summary, steps, and what its replicas did, second by second."""

    folder: Path
    summary: Summary
    steps: list[StepRow]
    fleet: list[FleetRow]


def train(config: Path, settings: list[str], *, limit_s: float | None = None) -> FinishedRun:
    """Run `laminar train`, as `call` does."""
    command = [*LAMINAR, "train", str(config), *settings]
    given = dict(setting.split("=", 1) for setting in settings)
    runs, pattern = Path(given.get("runs", "runs")), f"{given['name']}-*"
    before = set(runs.glob(pattern))
    call(command, limit_s=limit_s)
    (folder,) = set(runs.glob(pattern)) - before
    return read_run(folder)


def call(
    command: Sequence[str],
    *,
    limit_s: float | None = None,
    cwd: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a command to its end; its output goes to standard error.

    Raises `CalledProcessError` if it fails, and `TimeoutExpired` after `limit_s`, when it has been ended.
    """
    with subprocess.Popen(command, stdout=sys.stderr, cwd=cwd, env=environment) as process:
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def read_run(folder: Path) -> FinishedRun:
    """Read what a finished run left."""
    return FinishedRun(
        folder,
        msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary),
        list(read_rows(folder / "metrics.jsonl", StepRow)),
        list(read_rows(folder / "fleet.jsonl", FleetRow)),
    )
