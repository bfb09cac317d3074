"""`laminar bench`: measure a part on this machine."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from laminar_py.bench.catalog import ROWS, choose

bench = typer.Typer(
    help="Measure a part on this machine. `python -m benchmarks` has what needs a laboratory.",
    no_args_is_help=True,
)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")]
Repeats = Annotated[int, typer.Option(min=1, help="Rounds of each figure; figures are medians")]


def tell(line: str) -> None:
    """Print a line of progress on standard error."""
    print(line, file=sys.stderr, flush=True)


@bench.command("engine", epilog="Example: laminar bench engine --only local --repeats 5 --json")
def bench_engine(
    as_json: AsJson = False,
    repeats: Repeats = 3,
    only: Annotated[str | None, typer.Option(help=" or ".join(ROWS["engine"]))] = None,
) -> None:
    """Rate of the embedded engine; SGLang's client and refreshes. Each round is told on stderr. Takes minutes."""
    parts = choose(ROWS, "engine", only)
    from laminar_py.bench.engines import local, sglang
    from laminar_py.bench.report import show

    if "sglang" in parts:
        sglang.find_python()  # better missed here than after the minutes of the other
    measures = {"local": local.rows, "sglang": sglang.rows}
    show("engine", [row for part in parts for row in measures[part](repeats=repeats, tell=tell)], as_json=as_json)


@bench.command("packer", epilog="Example: laminar bench packer --json")
def bench_packer(as_json: AsJson = False) -> None:
    """Fill, balance over ranks and cost of packing finished trajectories. Takes about a minute."""
    from laminar_py.bench import packer
    from laminar_py.bench.report import show

    show("packer", packer.rows(tell=tell), as_json=as_json)


@bench.command("ledger", epilog="Example: laminar bench ledger --trajectories 1000000 --json")
def bench_ledger(
    as_json: AsJson = False,
    trajectories: Annotated[int, typer.Option(min=1, help="Number to record; 4 kB of disk each")] = 100_000,
) -> None:
    """Cost of recording, size on disk, and cost of reading it back. Takes about a minute."""
    from laminar_py.bench.ledger.measure import rows
    from laminar_py.bench.report import show

    show("ledger", rows(trajectories=trajectories, tell=tell), as_json=as_json)


@bench.command("learner", epilog="Example: laminar bench learner --only speed --json")
def bench_learner(
    as_json: AsJson = False, only: Annotated[str | None, typer.Option(help=" or ".join(ROWS["learner"]))] = None
) -> None:
    """Speed on packed sequences, refreshes with adapters, use of a GPU. Takes minutes."""
    parts = choose(ROWS, "learner", only)
    from laminar_py.bench.learner.measure import rows
    from laminar_py.bench.report import show

    show("learner", rows(parts, tell=tell), as_json=as_json)


@bench.command("repack", epilog="Example: laminar bench repack --only plan --json")
def bench_repack(
    as_json: AsJson = False, only: Annotated[str | None, typer.Option(help=" or ".join(ROWS["repack"]))] = None
) -> None:
    """Time to plan a round for 8,192 trajectories on 256 replicas. Takes seconds."""
    choose(ROWS, "repack", only)
    from laminar_py.bench import repack
    from laminar_py.bench.report import show

    show("repack", repack.rows(), as_json=as_json)


@bench.command("relay", epilog="Example: laminar bench relay --only hop --json")
def bench_relay(
    as_json: AsJson = False,
    repeats: Repeats = 7,
    only: Annotated[str | None, typer.Option(help=" or ".join(ROWS["relay"]))] = None,
    shm: Annotated[
        Path, typer.Option(help="Shared memory for versions", exists=True, file_okay=False, writable=True)
    ] = Path("/dev/shm"),
) -> None:
    """Hops between processes, stall of a publish, bytes and speed of deltas. Takes minutes."""
    parts = choose(ROWS, "relay", only)
    from laminar_py.bench.relay.measure import rows
    from laminar_py.bench.report import show

    show("relay", rows(parts, repeats=repeats, tell=tell, shm=shm), as_json=as_json)
