"""One visit to a GPU: the most valuable figures first, each in a process and a time of its own.

`python -m experiments.gpu.run --visit 1 --wheels wheels --out visit1.json` in the project's folder; a page is
beside the JSON, `visit1.md`. The machine needs torch and no network: wheels (`wheels.sh`) bring the other
libraries, so this file imports the standard library alone. A piece that fails or runs out of time costs only
itself, and both files are whole after each piece. A second call with the same `--out` runs the missing pieces.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from importlib import metadata
from pathlib import Path
from typing import IO

from experiments.gpu.visits import COMMAND_MIN, INSTALL_S, VISITS, Figure, Piece, Version

ROOT = Path(__file__).parents[2]
SITE = ROOT / ".cache/gpu-site"
WHEELS, PARTS = "wheels", ".part-"  # a wheel in pieces: NAME.whl.part-00, NAME.whl.part-01
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
SGLANG_VERSION = "from importlib.metadata import version; print(version('sglang'))"


class Status(StrEnum):
    """Ends of a piece."""

    DONE = "done"
    FAILED = "failed"
    OUT_OF_TIME = "out of time"
    NOT_BEGUN = "not begun"  # less of the budget was left than it may take
    NOT_RUN = "not run"  # this machine lacks something that it needs


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
    """The JSON that a visit writes."""

    visit: int
    dry: bool  # tiny sizes on a CPU
    machine: str
    gpus: list[str]
    versions: dict[str, str]
    rows: list[Figure] = field(default_factory=list)
    pieces: list[Outcome] = field(default_factory=list)


def join_parts(folder: Path) -> None:
    """Make whole wheels from the parts that `wheels.sh` split off, which stay."""
    for first in sorted(folder.glob(f"*{PARTS}00")):
        whole = first.with_name(first.name.removesuffix(f"{PARTS}00"))
        whole.write_bytes(b"".join(part.read_bytes() for part in sorted(folder.glob(f"{whole.name}{PARTS}*"))))


class Campaign:
    """Pieces one after the other within a budget, e.g. `Campaign(result, out=Path("r.json"), budget_s=1500)`."""

    def __init__(self, result: Result, *, out: Path, budget_s: float) -> None:
        self._result = result
        self._out = out
        self._end = time.monotonic() + budget_s + SLACK_S

    def install(self, wheels: Path) -> None:
        """Install all wheels of a folder for the pieces, without a network."""
        join_parts(wheels)
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
        ran = status not in (Status.NOT_BEGUN, Status.NOT_RUN)
        if not ran and piece.name in {outcome.name for outcome in self._result.pieces}:
            return
        outcome = Outcome(
            name=piece.name, status=status.value, seconds=round(seconds, 1), limit_s=piece.limit_s, log=log
        )
        self._result.pieces = [other for other in self._result.pieces if other.name != piece.name] + [outcome]
        ended = (
            f"{status.value} after {seconds:.0f} s" if ran else f"{status.value}: {log}" if log else status.value
        )
        print(f"{piece.name}: {ended}", file=sys.stderr, flush=True)
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
    """Write the JSON and the page, each whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    for path, text in ((out, json.dumps(asdict(result), indent=1) + "\n"), (out.with_suffix(".md"), page(result))):
        partial = path.with_name(f"{path.name}.new")
        partial.write_text(text)
        partial.replace(path)


def page(result: Result) -> str:
    """The result in Markdown: the machine, the pieces, and the figures with their conditions."""
    how = (
        "tiny sizes on a CPU, which measure nothing of a GPU" if result.dry else ", ".join(result.gpus) or "no GPU"
    )
    lines = [
        f"# Visit {result.visit}: {VISITS[result.visit].title}",
        "",
        f"{how}; {result.machine}; {', '.join(f'{name} {version}' for name, version in result.versions.items())}",
        "",
        "| piece | state | seconds | reason |",
        "|---|---|---|---|",
    ]
    for one in result.pieces:
        reason = "" if one.status == Status.DONE else one.log.strip().rpartition("\n")[2][-300:]
        lines.append(_cells(one.name, one.status, f"{one.seconds:.0f}", reason))
    lines += ["", "| piece | figure | value | unit | conditions |", "|---|---|---|---|---|"]
    for row in result.rows:
        value = "not measured" if row.value is None else f"{row.value:.4g}"
        lines.append(_cells(row.piece, row.name, value, row.unit, row.conditions))
    return "\n".join(lines) + "\n"


def _cells(*texts: str) -> str:
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def go_on(out: Path, result: Result) -> None:
    """Take over from an earlier call the outcomes of its pieces, and their figures.

    Exits in one line if the file is of another visit, or only one of both is dry.
    """
    if not out.exists():
        return
    earlier = json.loads(out.read_text())
    if (earlier["visit"], earlier["dry"]) != (result.visit, result.dry):
        kind = "dry" if earlier["dry"] else "whole"
        print(f"run.py: --out {out}: has a {kind} visit {earlier['visit']}; name another file", file=sys.stderr)
        sys.exit(2)
    result.pieces = [Outcome(**piece) for piece in earlier["pieces"] if piece["status"] != Status.NOT_RUN]
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


def sglang_version(python: Path) -> Version | None:
    """Version of the SGLang of an interpreter; None if it has none."""
    try:
        told = subprocess.run(
            [str(python), "-c", SGLANG_VERSION], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return tuple(int(number) for number in told.stdout.strip().split(".")[:3] if number.isdigit())


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="run.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    titles = "; ".join(f"{number}: {visit.title}" for number, visit in enumerate(VISITS))
    parser.add_argument("--visit", type=int, required=True, metavar="N", help=titles)
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install first, as `wheels.sh` makes it")
    parser.add_argument("--sglang", type=Path, metavar="PYTHON", help="interpreter of an environment with SGLang")
    parser.add_argument("--budget-min", type=float, default=COMMAND_MIN, help="minutes of this call")
    parser.add_argument(
        "--out", type=Path, required=True, help="the JSON; its pieces that are done do not run again"
    )
    parser.add_argument("--only", help="names of pieces, with commas between")
    parser.add_argument(
        "--dry", action="store_true", help="tiny sizes on a CPU; pieces that need a GPU do not run"
    )
    found = parser.parse_args(given)
    if not 0 <= found.visit < len(VISITS):
        parser.exit(2, f"run.py: --visit {found.visit}: no such visit; choose 0 to {len(VISITS) - 1}\n")
    names = [piece.name for piece in VISITS[found.visit].pieces]
    found.only = names if found.only is None else found.only.split(",")
    if unknown := set(found.only) - set(names):
        parser.exit(
            2, f"run.py: --only {','.join(sorted(unknown))}: no such piece; choose of {', '.join(names)}\n"
        )
    if found.sglang is not None and sglang_version(found.sglang) is None:
        parser.exit(
            2, f"run.py: --sglang {found.sglang}: has no SGLang; name the interpreter of its environment\n"
        )
    if not (found.dry or gpus()):
        parser.exit(2, "run.py: no GPU by nvidia-smi; run it on a machine with one, or with --dry\n")
    return found


def lacking(piece: Piece, *, dry: bool, sglang: Version | None) -> str:
    """Say what a piece needs and this call has not; "" if it can run."""
    if dry and piece.dry is None:
        return "needs a GPU"
    if piece.sglang is None or (dry and piece.embedded) or (sglang is not None and sglang >= piece.sglang):
        return ""
    found = f"this is {'.'.join(map(str, sglang))}" if sglang else "name its interpreter by --sglang"
    return f"needs SGLang {'.'.join(map(str, piece.sglang))} or newer; {found}"


def main(given: Sequence[str] | None = None) -> None:
    """Run the pieces that are asked for and are not done yet; exit code 1 if one is incomplete."""
    args = arguments(sys.argv[1:] if given is None else given)
    result = Result(visit=args.visit, dry=args.dry, machine=machine(), gpus=gpus(), versions=versions())
    go_on(args.out, result)
    campaign = Campaign(result, out=args.out, budget_s=60 * args.budget_min)
    done = {outcome.name for outcome in result.pieces if outcome.status == Status.DONE}
    if args.wheels is not None and not (WHEELS in done and SITE.is_dir()):
        campaign.install(args.wheels)
        result.versions = versions()
    sglang = None if args.sglang is None else sglang_version(args.sglang)
    if sglang is not None:
        result.versions["sglang"] = ".".join(map(str, sglang))
    for piece in VISITS[args.visit].pieces:
        if piece.name not in args.only or piece.name in done:
            continue
        if reason := lacking(piece, dry=args.dry, sglang=sglang):
            campaign.note(piece, Status.NOT_RUN, log=reason)
            continue
        further = (piece.dry or ()) if args.dry else ()
        if piece.sglang is not None and sglang is not None:
            further = (*further, "--sglang", str(args.sglang.absolute()))
        campaign.run(piece, further)
    good = {Status.DONE, Status.NOT_RUN}
    sys.exit(0 if all(outcome.status in good for outcome in result.pieces) else 1)


if __name__ == "__main__":
    main()
