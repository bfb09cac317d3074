"""`python -m benchmarks`, in the project's folder: what needs a laboratory, as `laminar bench` has what does not.

Exit codes as of `laminar`: 2 and one line on standard error for bad input.
"""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.catalog import ROWS
from laminar_py.bench.catalog import choose
from laminar_py.cli.bench import AsJson, Repeats, tell
from laminar_py.config.section import ConfigError

app = typer.Typer(
    name="python -m benchmarks",
    help="Compare parts with what one would use instead, and run whole emulated fleets.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command(epilog="Example: python -m benchmarks relay --only hosts --json")
def relay(
    as_json: AsJson = False,
    repeats: Repeats = 7,
    only: Annotated[str | None, typer.Option(help=" or ".join(ROWS["relay"]))] = None,
    shm: Annotated[
        Path, typer.Option(help="Shared memory for one host's part", exists=True, file_okay=False, writable=True)
    ] = Path("/dev/shm"),
) -> None:
    """The relay beside bare sockets, Ray, gloo and HTTP, on one host and over hosts with narrow links.

    The hosts are network namespaces, which need root and iproute2. Takes minutes.
    """
    parts = choose(ROWS, "relay", only)
    from benchmarks.relay.measure import rows
    from laminar_py.bench.report import show

    show("relay", rows(parts, repeats=repeats, tell=tell, shm=shm), as_json=as_json)


@app.command(epilog="Example: python -m benchmarks engine --repeats 5 --json")
def engine(
    as_json: AsJson = False,
    repeats: Repeats = 3,
    only: Annotated[str | None, typer.Option(help=" or ".join(ROWS["engine"]))] = None,
) -> None:
    """The embedded engine beside `generate` of Hugging Face transformers. Takes minutes."""
    choose(ROWS, "engine", only)
    from benchmarks.engines.huggingface import rows
    from laminar_py.bench.report import show

    show("engine", rows(repeats=repeats, tell=tell), as_json=as_json)


@app.command(epilog="Example: python -m benchmarks learner --only padded --json")
def learner(
    as_json: AsJson = False, only: Annotated[str | None, typer.Option(help=" or ".join(ROWS["learner"]))] = None
) -> None:
    """The learner beside both engines, single sequences, padded batches and whole logits. Takes ten minutes."""
    parts = choose(ROWS, "learner", only)
    from benchmarks.learner.measure import rows
    from laminar_py.bench.report import show

    show("learner", rows(parts, tell=tell), as_json=as_json)


@app.command(epilog="Example: python -m benchmarks repack --only workload --json")
def repack(
    as_json: AsJson = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the workload; figures are medians")] = 3,
    only: Annotated[str | None, typer.Option(help=" or ".join(ROWS["repack"]))] = None,
) -> None:
    """Repacking on 16 emulated replicas, and whole schedules at equal devices.

    The workload takes two minutes a run, four runs a seed; the schedules 15 minutes each for two length skews.
    """
    parts = choose(ROWS, "repack", only)
    from benchmarks.repack.measure import rows
    from laminar_py.bench.report import show

    show("repack", rows(parts, seeds=range(seeds), tell=tell), as_json=as_json)


if __name__ == "__main__":
    try:
        app()
    except ConfigError as error:
        tell(f"benchmarks: {error}")
        raise SystemExit(2) from None
