"""A campaign on one GPU: the most valuable figures first, each in a process and a time of its own, one JSON.

`python experiments/gpu/run.py --wheels wheels --out result.json` in the project's folder. The machine needs torch,
and no network: what else the package imports comes as wheels (`wheels.sh`), so this file imports the standard
library alone. A piece that fails or runs out of time costs only itself, and the JSON is whole after each
piece. Called again with the same `--out`, it runs the pieces without figures.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".cache/gpu-site"
BUDGET_MIN = 28.0
WHEELS, INSTALL_S = "wheels", 60.0
SLACK_S = 5.0  # for what is between pieces that each take all their time
GRACE_S = 15.0  # between SIGTERM and SIGKILL
LOG_CHARS = 4000  # of a piece, its end
LIBRARIES = (
    "torch",
    "triton",
    "transformers",
    "numpy",
    "ray",
    "pyzmq",
    "msgspec",
    "blake3",
    "zstandard",
    "pydantic",
)
TESTS = ("tests/gpu", "tests/relay/test_publisher_cuda.py")
LAMINAR = ("-c", "from laminar_py.cli import main; main()")


class Status(StrEnum):
    """Ends of a piece."""

    DONE = "done"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"
    NOT_BEGUN = "not begun"  # less of the budget was left than it may take
    PLANNED = "planned"  # it needs a GPU, and there is none; or nothing was to run


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A row of the result, e.g. `Figure(piece="hop", name="hop_GBps", value=2.1, unit="GB/s", conditions="")`."""

    piece: str
    name: str
    value: float | None
    unit: str
    conditions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A measurement, e.g. `Piece(name="hop", arguments=("-m", "a.module"), limit_s=50, read=read_reports)`."""

    name: str
    arguments: tuple[str, ...]  # of the interpreter
    limit_s: float
    on_cpu: tuple[str, ...] | None = None  # further arguments with `--cpu`; None: it needs a GPU
    read: Callable[[str, str], Iterable[Figure]]  # of its name and its output; ends in ValueError if broken


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """An end of a piece, e.g. `Outcome(name="hop", status="done", seconds=31.0, limit_s=50)`."""

    name: str
    status: str
    seconds: float
    limit_s: float
    log: str = ""  # the end of what it said, if it did not do all


@dataclass(slots=True, kw_only=True)
class Result:
    """The JSON that a campaign writes."""

    campaign: str = "gpu"
    conditions: str
    machine: str
    gpus: list[str]
    versions: dict[str, str]
    rows: list[Figure] = field(default_factory=list)
    pieces: list[Outcome] = field(default_factory=list)


def read_reports(piece: str, output: str) -> Iterator[Figure]:
    """Rows of the reports of `laminar_lab.bench.report` among the lines of an output, but for broken lines.

    Raises `ValueError` after the last if there was one.
    """
    broken = []
    for line in output.split("\n"):
        if line.startswith('{"bench"'):
            try:
                rows = [Figure(piece=piece, **row) for row in json.loads(line)["rows"]]
            except (ValueError, KeyError, TypeError) as error:
                broken.append(f"{error!r} in {line}")
            else:
                yield from rows
    if broken:
        raise ValueError(f"{len(broken)} broken lines among the reports: {broken[0]:.200}")


def read_tests(piece: str, output: str) -> list[Figure]:
    """Counts of the last line of pytest."""
    last = output.strip().rpartition("\n")[2]
    return [
        Figure(piece=piece, name=f"tests_{word}", value=float(count), unit="tests", conditions="pytest -m gpu")
        for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)
    ]


def learner_piece(way: str, limit_s: float, *, on_cpu: bool = False) -> Piece:
    """Steps of the learner in one way."""
    return Piece(
        name=f"learner_{way}",
        arguments=("-m", "experiments.gpu.learner", way),
        limit_s=limit_s,
        on_cpu=("--cpu",) if on_cpu else None,
        read=read_reports,
    )


PIECES = (
    learner_piece("selective", 140, on_cpu=True),
    Piece(
        name="publish",
        arguments=("-m", "experiments.gpu.publish"),
        limit_s=240,
        on_cpu=("--cpu",),
        read=read_reports,
    ),
    Piece(
        name="tests",
        arguments=("-m", "pytest", "-m", "gpu", *TESTS, "-p", "no:cacheprovider", "-rf"),
        limit_s=190,
        read=read_tests,
    ),
    Piece(name="quickstart", arguments=("-m", "experiments.gpu.quickstart"), limit_s=230, read=read_reports),
    Piece(
        name="step_profile",
        arguments=("-m", "experiments.gpu.step_profile", "selective"),
        limit_s=80,
        on_cpu=("--cpu",),
        read=read_reports,
    ),
    learner_piece("all", 90),
    Piece(
        name="hop",
        arguments=(*LAMINAR, "bench", "relay", "--json"),
        limit_s=50,
        on_cpu=("repeats=1",),
        read=read_reports,
    ),
    learner_piece("selective_compiled", 120),
    learner_piece("all_compiled", 110),
    learner_piece("offload", 150),
    learner_piece("offload_whole", 150),
    learner_piece("attention", 30),
)


class Campaign:
    """Pieces one after the other within a budget, e.g. `Campaign(result, out=Path("r.json"), budget_s=1500)`."""

    def __init__(self, result: Result, *, out: Path, budget_s: float) -> None:
        self._result = result
        self._out = out
        self._end = time.monotonic() + budget_s + SLACK_S

    def install(self, wheels: Path) -> None:
        """Install all wheels of a folder for the pieces, without a network."""
        files = [str(path) for path in sorted(wheels.glob("*.whl"))]
        options = ("--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(SITE))
        pip = ("-m", "pip", "install", "--disable-pip-version-check", *options, *files)
        self.run(Piece(name=WHEELS, arguments=pip, limit_s=INSTALL_S, read=lambda _name, _output: []), ())

    def run(self, piece: Piece, further: tuple[str, ...]) -> None:
        """Run a piece if all its time is left, and write what came of it."""
        began = time.monotonic()
        if began + piece.limit_s > self._end:
            self.note(piece, Status.NOT_BEGUN)
            return
        with _said() as output, _said() as errors:
            process = subprocess.Popen(
                [sys.executable, *piece.arguments, *further],
                cwd=ROOT,
                env=environment(),
                stdout=output,
                stderr=errors,
                start_new_session=True,
            )
            try:
                status = Status.FAILED if process.wait(piece.limit_s) else Status.DONE
            except subprocess.TimeoutExpired:
                status = Status.OUT_OF_TIME
            finally:
                end(process)
            told, complaints = (_all_of(file) for file in (output, errors))
        self._result.rows = [row for row in self._result.rows if row.piece != piece.name]
        try:
            self._result.rows.extend(piece.read(piece.name, told))
        except ValueError as error:
            complaints += f"\n{error}"
            status = Status.FAILED if status is Status.DONE else status
        ends = (text[-LOG_CHARS // 2 :] for text in (told, complaints))
        log = "" if status is Status.DONE else "\n".join(ends).replace(str(ROOT), ".")
        self.note(piece, status, seconds=time.monotonic() - began, log=log)

    def note(self, piece: Piece, status: Status, *, seconds: float = 0.0, log: str = "") -> None:
        """Write down an outcome, in place of an earlier one unless nothing was run."""
        ran = status not in (Status.NOT_BEGUN, Status.PLANNED)
        if not ran and piece.name in {outcome.name for outcome in self._result.pieces}:
            return
        outcome = Outcome(
            name=piece.name, status=status.value, seconds=round(seconds, 1), limit_s=piece.limit_s, log=log
        )
        self._result.pieces = [other for other in self._result.pieces if other.name != piece.name] + [outcome]
        print(f"{piece.name}: {status.value} after {seconds:.0f} s", file=sys.stderr, flush=True)
        write(self._out, self._result)


def _said() -> IO[str]:
    """A file for what a process says, which need not be UTF-8."""
    return tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")


def _all_of(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process and the group that it leads."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, how)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def environment() -> dict[str, str]:
    """Environment of a piece: its imports from the wheels, then from here; its lines at once."""
    paths = (str(SITE), str(ROOT), os.environ.get("PYTHONPATH", ""))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def write(out: Path, result: Result) -> None:
    """Write the JSON, whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.new")
    partial.write_text(json.dumps(asdict(result), indent=1) + "\n")
    partial.replace(out)


def go_on(out: Path, result: Result) -> None:
    """Take over from an earlier call what became of its pieces, and their figures."""
    if not out.exists():
        return
    earlier = json.loads(out.read_text())
    result.pieces = [Outcome(**piece) for piece in earlier["pieces"] if piece["status"] != Status.PLANNED]
    result.rows = [Figure(**row) for row in earlier["rows"]]


def gpus() -> list[str]:
    """GPUs by name, driver and memory; none where nvidia-smi does not answer."""
    asked = ("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return told.strip().splitlines()


def machine() -> str:
    """Processor, cores and memory."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = names[0].partition(":")[2].strip() if names else os.uname().machine
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{processor}, {os.cpu_count()} cores, {memory:.0f} GiB"


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries, those of the wheels first."""
    found = {"python": sys.version.partition(" ")[0]}
    for name in LIBRARIES:
        installed = next(iter(metadata.distributions(name=name, path=[str(SITE), *sys.path])), None)
        if installed is not None:
            found[name] = installed.version
    return found


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, as `wheels.sh` makes it")
    parser.add_argument("--budget-min", type=float, default=BUDGET_MIN, help="minutes of this call")
    parser.add_argument("--out", type=Path, required=True, help="the JSON; what it has is not measured again")
    parser.add_argument("--only", help="names of pieces, with commas between")
    parser.add_argument("--cpu", action="store_true", help="tiny sizes on a CPU; what needs a GPU is only planned")
    parser.add_argument("--dry-run", action="store_true", help="run nothing, and write the plan")
    found = parser.parse_args(given)
    names = [piece.name for piece in PIECES]
    found.only = names if found.only is None else found.only.split(",")
    if unknown := set(found.only) - set(names):
        parser.exit(
            2, f"run.py: --only {','.join(sorted(unknown))}: no such piece; choose of {', '.join(names)}\n"
        )
    if not (found.cpu or found.dry_run or gpus()):
        parser.exit(2, "run.py: no GPU by nvidia-smi; run it on a machine with one, or with --cpu or --dry-run\n")
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Run the pieces that are asked for and have no figures yet; exit code 1 if one did not do all."""
    args = arguments(sys.argv[1:] if given is None else given)
    how = "planned alone" if args.dry_run else "tiny sizes on a CPU" if args.cpu else "whole"
    result = Result(
        conditions=f"{how}; budget of {args.budget_min:g} min", machine=machine(), gpus=gpus(), versions=versions()
    )
    go_on(args.out, result)
    campaign = Campaign(result, out=args.out, budget_s=60 * args.budget_min)
    done = {outcome.name for outcome in result.pieces if outcome.status == Status.DONE}
    if args.wheels is not None and not args.dry_run and not (WHEELS in done and SITE.is_dir()):
        campaign.install(args.wheels)
        result.versions = versions()
    for piece in PIECES:
        if piece.name not in args.only or piece.name in done:
            continue
        if args.dry_run or (args.cpu and piece.on_cpu is None):
            campaign.note(piece, Status.PLANNED)
        else:
            campaign.run(piece, (piece.on_cpu or ()) if args.cpu else ())
    good = {Status.DONE, Status.PLANNED}
    sys.exit(0 if all(outcome.status in good for outcome in result.pieces) else 1)


if __name__ == "__main__":
    main()
