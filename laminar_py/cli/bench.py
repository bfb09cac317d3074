"""`laminar bench`: measure a part on this machine."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from laminar_py.config.engine import EngineKind

bench = typer.Typer(help="Measure a part on this machine.", no_args_is_help=True)


class RelayBench(StrEnum):
    """What `laminar bench relay` measures."""

    HOST = "host"
    NETWORK = "network"


class RepackBench(StrEnum):
    """What `laminar bench repack` measures."""

    PLAN = "plan"
    WORKLOAD = "workload"
    SCHEDULES = "schedules"


@bench.command("engine", epilog="Example: laminar bench engine --only local --repeats 5 --json")
def bench_engine(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each comparison; figures are medians")] = 3,
    only: Annotated[EngineKind | None, typer.Option(help="The figures of one engine")] = None,
) -> None:
    """Compare the engines with what one would use instead; each round is told on stderr. Takes minutes."""
    from laminar_py.bench import engine_local, engine_sglang
    from laminar_py.bench.report import show as show_report

    if only is not EngineKind.LOCAL:
        engine_sglang.find_python()  # better now than after the minutes of the other
    measures = {EngineKind.LOCAL: engine_local.rows, EngineKind.SGLANG: engine_sglang.rows}
    rows = [
        row
        for kind, measure in measures.items()
        if only in (None, kind)
        for row in measure(repeats=repeats, tell=_tell)
    ]
    show_report("engine", rows, as_json=as_json)


@bench.command("packer", epilog="Example: laminar bench packer --json")
def bench_packer(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
) -> None:
    """Fill, balance over ranks and cost of packing finished trajectories. Takes about a minute."""
    from laminar_py.bench import packer
    from laminar_py.bench.report import show as show_report

    show_report("packer", packer.rows(tell=_tell), as_json=as_json)


@bench.command("ledger", epilog="Example: laminar bench ledger --trajectories 1000000 --json")
def bench_ledger(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
    trajectories: Annotated[int, typer.Option(min=1, help="So many are recorded; 4 kB of disk each")] = 100_000,
) -> None:
    """Cost of recording, size on disk, and cost of reading it back. Takes about a minute."""
    from laminar_py.bench import ledger
    from laminar_py.bench.report import show as show_report

    show_report("ledger", ledger.rows(trajectories=trajectories, tell=_tell), as_json=as_json)


@bench.command("learner", epilog="Example: laminar bench learner --json")
def bench_learner(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
) -> None:
    """Packed gradients against single ones, engine against learner, speed and memory. Takes about ten minutes."""
    from laminar_py.bench import learner
    from laminar_py.bench.report import show as show_report

    show_report("learner", learner.rows(tell=_tell), as_json=as_json)


@bench.command("repack", epilog="Example: laminar bench repack --only workload --json")
def bench_repack(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the workload; figures are medians")] = 3,
    only: Annotated[RepackBench | None, typer.Option(help="One part of it")] = None,
) -> None:
    """Repacking on 16 emulated replicas, and whole schedules at equal devices. Run it in the project's folder.

    The workload takes two minutes a run, four runs a seed; the schedules 15 minutes each for two length skews.
    """
    from laminar_py.bench import repack
    from laminar_py.bench.report import show as show_report

    parts = repack.PARTS if only is None else (only.value,)
    show_report("repack", repack.rows(seeds=range(seeds), parts=parts, tell=_tell), as_json=as_json)


@bench.command("relay", epilog="Example: laminar bench relay --only host --json")
def bench_relay(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each comparison; figures are medians")] = 7,
    only: Annotated[RelayBench | None, typer.Option(help="On one host, or over hosts with narrow links")] = None,
    shm: Annotated[
        Path, typer.Option(help="Shared memory for one host's part", exists=True, file_okay=False, writable=True)
    ] = Path("/dev/shm"),
) -> None:
    """Compare the relay with bare sockets and copies, and with what one would use instead. Takes minutes."""
    from laminar_py.bench import relay as one_host
    from laminar_py.bench import relay_hosts
    from laminar_py.bench.report import show as show_report
    from laminar_py.config.section import ConfigError

    rows = one_host.rows(repeats=repeats, tell=_tell, shm=shm) if only in (None, RelayBench.HOST) else []
    try:
        rows += relay_hosts.rows(repeats=min(repeats, 3), tell=_tell) if only is not RelayBench.HOST else []
    except ConfigError as error:
        if only is RelayBench.NETWORK:
            raise
        _tell(f"left out: {error}")
    show_report("relay", rows, as_json=as_json)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
