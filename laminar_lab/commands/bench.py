"""The command `laminar bench`, which measures a part of the system on this machine."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from laminar_lab.bench.registry import Measurement, find, measure
from laminar_lab.bench.report import show

bench = typer.Typer()


@bench.command(epilog="Example: laminar bench relay --only hop repeats=5 --json")
def measure_here(
    benchmark: Annotated[str | None, typer.Argument(help="Benchmark to run; without one, list all")] = None,
    settings: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. repeats=5")] = None,
    only: Annotated[str | None, typer.Option(help="One measurement of it")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print only one JSON object on stdout")] = False,
) -> None:
    """Measure a part of the system on this machine. Most benchmarks take minutes, `plan` and `repack` an hour.

    A line on stderr names each measurement that this machine cannot make. Some measurements need SGLang, a GPU, or
    the project's folder.
    """
    if benchmark is None:
        Console().print(_list(find()))
        return
    show(benchmark, measure(find(benchmark, only), settings or []), as_json=as_json)


def _list(measurements: list[Measurement]) -> Table:
    table = Table("benchmark", "--only", "about")
    for measurement in measurements:
        table.add_row(measurement.benchmark, measurement.name, measurement.about)
    return table
