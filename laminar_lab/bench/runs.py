"""Harness of experiments: options, training runs over seeds, results that are kept on disk, curves.

A run is the command line in a process of its own; its results are read as typed records. A kept result is used
again only on the same machine, with the same settings, and with the same source of the three packages and of
the experiment (`tests/bench/test_runs.py::test_other_settings_or_another_source_are_measured_anew`).
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from laminar_lab.bench.report import Row, log_line, machine, show
from laminar_py.config import ConfigError
from laminar_py.ledger import read_rows
from laminar_py.observe import Summary
from laminar_py.records import StepRow
from laminar_py.records.metrics import FleetRow

LAMINAR = (sys.executable, "-c", "from laminar_py.cli import main; main()")
GRACE_S = 30.0  # between SIGTERM and SIGKILL


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """A run's folder, summary, steps, and the state of its replicas second by second."""

    folder: Path
    summary: Summary
    steps: list[StepRow]
    fleet: list[FleetRow]

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Seconds of RL and mean of each evaluation."""
        return [(one.rl_s, one.mean) for one in self.summary.evaluations]

    def trained_tokens_per_s(self, after: int) -> float:
        """Trained response tokens a second of RL, without the first `after` steps."""
        first, last = self.steps[after - 1], self.steps[-1]
        return (last.trained_tokens - first.trained_tokens) / (last.rl_s - first.rl_s)


def require_project_file(path: Path) -> None:
    """Raise `ConfigError` where a file of the project is missing, since this runs in another folder."""
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; run this in the project's folder")


def train(config: Path, settings: list[str], *, limit_s: float | None = None) -> FinishedRun:
    """Run `laminar train` with these settings, and read its run. Raises the errors of `call`."""
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
    """Run a command to its end, with its output on standard error.

    Raises `CalledProcessError` if it fails, and `TimeoutExpired` after `limit_s`, when it has ended the command.
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
    """Read the records of a finished run."""
    return FinishedRun(
        folder,
        msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary),
        list(read_rows(folder / "metrics.jsonl", StepRow)),
        list(read_rows(folder / "fleet.jsonl", FleetRow)),
    )


PROJECT = Path(__file__).parents[2]
PACKAGES = ("laminar_py", "laminar_lab", "laminar_contrib")
KEY_BYTES = 8

Result = TypeVar("Result")


class KeptResults:
    """Results of an experiment by name, e.g. `KeptResults(out, sources=[HERE], settings="120 steps")`.

    `sources` are files, and folders with Python files.
    """

    def __init__(self, out: Path, *, sources: Sequence[Path], settings: str) -> None:
        self._folder = out / _key([*(PROJECT / name for name in PACKAGES), *sources], f"{machine()}\n{settings}")

    def run(self, name: str, begin: Callable[[], FinishedRun]) -> FinishedRun:
        """Return the training run of that name; keeps its folder, and begins another run if that was deleted."""
        path = self._folder / f"{name}.json"
        if path.exists() and not Path(msgspec.json.decode(path.read_bytes(), type=str)).is_dir():
            path.unlink()
        return read_run(Path(self.get(name, str, lambda: str(begin().folder.absolute()))))

    def get(self, name: str, kind: type[Result], measure: Callable[[], Result]) -> Result:
        """Return the result of that name, or measure and keep it; an error of `measure` keeps nothing."""
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


def make_parser(about: str | None) -> argparse.ArgumentParser:
    """Make the parser of an experiment with the option `--json`; `about` is its module's docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    return parser


def measure_seeds(
    about: str | None,
    here: Path,
    *,
    learn: Callable[[int], Result],
    kind: type[Result],
    rows: Callable[[Sequence[Result]], list[Row]],
    draw: Callable[[Sequence[Result], Path], None] | None = None,
    seeds: int = 3,
) -> None:
    """Main function of an experiment in the folder `here` that repeats one measurement over seeds.

    Calls `learn` for each seed whose result is not kept in `.cache`, draws `out/curves.png`, and prints the rows.
    """
    parser = make_parser(about)
    parser.add_argument("--seeds", type=int, default=seeds, help="runs, with seeds 0, 1, ...")
    args = parser.parse_args()
    kept = KeptResults(Path(".cache") / here.name, sources=[here, here / f"{here.name}.yaml"], settings="")
    found = [kept.get(f"seed-{seed}", kind, partial(learn, seed)) for seed in range(args.seeds)]
    if draw is not None:
        draw(found, here / "out" / "curves.png")
    show(here.name, rows(found), as_json=args.json)


@contextmanager
def drawing(path: Path, *, columns: int = 1, size: tuple[float, float] = (6, 4)) -> Iterator[Any]:
    """Yield the axes of a figure, or a list of them, and save the figure at the end."""
    import matplotlib.pyplot as plt  # half a second that only a drawing needs

    figure, axes = plt.subplots(1, columns, figsize=size)
    yield axes
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
