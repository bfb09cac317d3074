"""Visits to a GPU: each is a list of pieces, which `run.py` runs one after the other.

A piece is a process with a time of its own. Visit 0 has the figures of one rank; visits 1 to 7 are in the order of
their worth. This file imports the standard library alone, as `run.py` does.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

Version = tuple[int, ...]

COMMAND_MIN = 9.5  # minutes of one command; a further command continues the visit
VISIT_MIN = 25.0
INSTALL_S = 60.0
OLDER, TESTED = (0, 5, 15), (0, 5, 23)  # SGLang: the newest for torch 2.11, and the version of our tests
DRY = ("--dry",)
TESTS = ("tests/gpu", "tests/relay/test_publisher_cuda.py")
LAMINAR = ("-c", "from laminar_py.cli import main; main()")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A row of the result, e.g. `Figure(piece="hop", name="hop_GBps", value=2.1, unit="GB/s", conditions="")`."""

    piece: str
    name: str
    value: float | None  # None: not measured, and `conditions` say why
    unit: str
    conditions: str


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A measurement, e.g. `Piece(name="hop", arguments=("-m", "a.module"), limit_s=50)`."""

    name: str
    arguments: tuple[str, ...]  # of the interpreter
    limit_s: float
    dry: tuple[str, ...] | None = DRY  # further arguments with `--dry`; None: it needs a GPU
    sglang: Version | None = None  # the oldest SGLang that fits, if it needs one; `--sglang PYTHON` names it
    embedded: bool = False  # with `--dry` the embedded engine stands in for a missing SGLang
    read: Callable[[str, str], Iterable[Figure]] = read_reports  # of its name and output; ValueError if broken


@dataclass(frozen=True, slots=True)
class Visit:
    """Pieces in the order of their worth, e.g. `Visit("loads", (piece, other))`."""

    title: str
    pieces: tuple[Piece, ...]


def ours(module: str, *arguments: str) -> tuple[str, ...]:
    """Arguments that run a module of this folder."""
    return ("-m", f"experiments.gpu.{module}", *arguments)


def learner_piece(way: str, limit_s: float, *, dry: tuple[str, ...] | None = None) -> Piece:
    """Steps of the learner in one way."""
    return Piece(name=f"learner_{way}", arguments=ours("learner", way), limit_s=limit_s, dry=dry)


ONE_RANK = Visit(
    "figures of one rank at 1.5B parameters",
    (
        learner_piece("selective", 140, dry=DRY),
        Piece(name="publish", arguments=ours("publish"), limit_s=240),
        Piece(
            name="tests",
            arguments=("-m", "pytest", "-m", "gpu", *TESTS, "-p", "no:cacheprovider", "-rf"),
            limit_s=190,
            dry=None,
            read=read_tests,
        ),
        Piece(name="quickstart", arguments=ours("quickstart"), limit_s=230, dry=None),
        Piece(name="step_profile", arguments=ours("step_profile", "selective"), limit_s=80),
        learner_piece("all", 90),
        Piece(name="hop", arguments=(*LAMINAR, "bench", "relay", "--json"), limit_s=50, dry=("repeats=1",)),
        learner_piece("selective_compiled", 120),
        learner_piece("all_compiled", 110),
        learner_piece("offload", 150),
        learner_piece("offload_whole", 150),
    ),
)
TWO_RANKS = Visit(
    "two ranks on one GPU train as one rank does",
    (
        Piece(name="dense", arguments=ours("two_ranks", "probe", "dense"), limit_s=240),
        Piece(name="mixture_offload", arguments=ours("two_ranks", "mixture", "offload"), limit_s=400),
    ),
)
COLD = Visit(
    "a cold launch by `laminar train`, and a launch without a compiler",
    (
        Piece(name="cold", arguments=ours("cold", "launch"), limit_s=500, sglang=TESTED),
        Piece(name="no_compiler", arguments=ours("cold", "no_compiler"), limit_s=120, dry=None, sglang=TESTED),
    ),
)
LOADS = Visit(
    "loads of 3 and 15 GB",
    (
        Piece(name="files_3GB", arguments=ours("loads", "files", "3"), limit_s=150),
        Piece(name="sglang_3GB", arguments=ours("loads", "sglang", "3"), limit_s=240, sglang=OLDER),
        Piece(name="files_15GB", arguments=ours("loads", "files", "15"), limit_s=300),
        Piece(name="sglang_15GB", arguments=ours("loads", "sglang", "15"), limit_s=480, sglang=OLDER),
    ),
)
ATTENTION = Visit(
    "attention kernels against float32 SDPA",
    (
        Piece(name="heads_28_4", arguments=ours("kernels", "28/4"), limit_s=240),
        Piece(name="heads_64_8", arguments=ours("kernels", "64/8"), limit_s=300),
        Piece(name="padding", arguments=ours("kernels", "padding"), limit_s=30, dry=None),
    ),
)
WIDTHS = Visit(
    "real widths with few layers, rows of 32k tokens",
    tuple(
        Piece(name=f"width_{model}", arguments=ours("learner", "selective", "--model", model), limit_s=360)
        for model in ("7b_10_layers", "32b_6_layers", "30b_a3b_8_layers")
    ),
)
ON_NEW_WEIGHTS = Visit(
    "ways to take new weights under 256 streams",
    tuple(
        Piece(name=policy, arguments=ours("sglang_run", policy), limit_s=420, sglang=least)
        for policy, least in (("in_place", TESTED), ("retract", TESTED), ("resume", OLDER))
    ),
)
CURVE = Visit(
    "SmolLM2-135M learns, undisturbed and with kill -9 of server, learner and controller",
    (
        Piece(
            name="undisturbed", arguments=ours("curve", "undisturbed"), limit_s=480, sglang=OLDER, embedded=True
        ),
        Piece(name="killed", arguments=ours("curve", "killed"), limit_s=500, sglang=OLDER, embedded=True),
        Piece(name="trl", arguments=ours("curve", "trl"), limit_s=30, dry=None),
    ),
)
VISITS = (ONE_RANK, TWO_RANKS, COLD, LOADS, ATTENTION, WIDTHS, ON_NEW_WEIGHTS, CURVE)
