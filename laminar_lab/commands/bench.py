"""`laminar bench`: measure a part of the system on this machine."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from laminar_lab.bench.registry import Measurement, find, measure
from laminar_lab.bench.report import show

bench = typer.Typer()


@bench.command(epilog="Example: laminar bench relay --only hop repeats=5 --json")
def measure_here(
    benchmark: Annotated[str | None, typer.Argument(help="What to measure; none: list all there is")] = None,
    settings: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. repeats=5")] = None,
    only: Annotated[str | None, typer.Option(help="One measurement of it")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
) -> None:
    """Measure a part on this machine: most take minutes, `plan` and `repack` hours.

    A measurement that this machine cannot make is left out, with a line on stderr. Some need a laboratory: root
    and iproute2 for hosts with narrow links, SGLang, a GPU, the project's folder.
    """
    if benchmark is None:
        Console().print(_list(find()))
        return
    show(benchmark, measure(find(benchmark, only), settings or []), as_json=as_json)


def _list(measurements: list[Measurement]) -> Table:
    table = Table("benchmark", "--only", "about")
    for one in measurements:
        table.add_row(one.benchmark, one.name, one.about)
    return table
