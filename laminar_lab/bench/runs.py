"""Training runs as an experiment starts them, and results that it keeps on disk.

A run is the command line in a process of its own; its results are read as typed records. Invariant: a kept
result is used again only on the same machine, with the same settings, and by the same source of this package and
experiment.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec

from laminar_lab.bench.report import log_line, machine
from laminar_py.config import ConfigError
from laminar_py.ledger import read_rows
from laminar_py.observe import Summary
from laminar_py.records import StepRow
from laminar_py.records.metrics import FleetRow

LAMINAR = (sys.executable, "-c", "from laminar_py.cli import main; main()")
GRACE_S = 30.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run's folder, summary, steps, and what its replicas did, second by second."""

    folder: Path
    summary: Summary
    steps: list[StepRow]
    fleet: list[FleetRow]


def require_project_file(path: Path) -> None:
    """Raise `ConfigError` where a file of the project is missing, since this runs in another folder."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; run this in the project's folder")


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


PACKAGE = Path(__file__).parents[1]
KEY_BYTES = 8

Result = TypeVar("Result")


class KeptResults:
    """Results of an experiment by name, e.g. `KeptResults(out, sources=[HERE], settings="120 steps")`.

    `sources` are files, and folders whose Python files count.
    """

    def __init__(self, out: Path, *, sources: Sequence[Path], settings: str) -> None:
        self._folder = out / _key([PACKAGE, *sources], f"{machine()}\n{settings}")

    def run(self, name: str, begin: Callable[[], FinishedRun]) -> FinishedRun:
        """Training run of that name; its folder is what is kept, and read anew, unless it was deleted."""
        path = self._folder / f"{name}.json"
        if path.exists() and not Path(msgspec.json.decode(path.read_bytes(), type=str)).is_dir():
            path.unlink()
        return read_run(Path(self.get(name, str, lambda: str(begin().folder.absolute()))))

    def get(self, name: str, kind: type[Result], measure: Callable[[], Result]) -> Result:
        """Result of that name, measured if there is none; what `measure` raises leaves none."""
        path = self._folder / f"{name}.json"
        if path.exists():
            log_line(f"{name} was measured before: {path}")
            return msgspec.json.decode(path.read_bytes(), type=kind)
        found = measure()
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".new")
        part.write_bytes(msgspec.json.encode(found))
        part.rename(path)
        return found


def _key(sources: Sequence[Path], settings: str) -> str:
    digest = blake2b(settings.encode(), digest_size=KEY_BYTES)
    for source in sources:
        for path in sorted(source.rglob("*.py")) if source.is_dir() else [source]:
            digest.update(blake2b(path.read_bytes()).digest())
    return digest.hexdigest()
