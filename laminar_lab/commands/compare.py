"""`laminar compare`: runs side by side on the terminal, or as JSON."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from laminar_py.cli import console, print_line
from laminar_py.config import ConfigError

if TYPE_CHECKING:
    from laminar_lab.compare import ComparedRun, Comparison

app = typer.Typer()


@app.command(epilog="Example: laminar compare runs/quickstart-1 runs/quickstart-2")
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of two runs or more, or of two evaluations or more")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone, as one object")] = False,
    html: Annotated[
        Path | None, typer.Option(help="Draw the curves of runs, with bands over seeds, into this file")
    ] = None,
) -> None:
    """Say which runs are better at equal seconds, tokens and device-hours, and compare configs, sets and speed.

    Runs that differ only in their seeds count as one. Evaluations are compared by their sets.
    """
    from laminar_lab.compare import compare as make_comparison
    from laminar_lab.compare import comparison_tables, read_run
    from laminar_lab.compare_evaluations import are_evaluations, evaluation_tables, read_evaluation

    if len(runs) < 2:
        raise ConfigError(f"{runs[0]}: one run cannot be compared; name two runs or more")
    if are_evaluations(runs):
        if html is not None:
            raise ConfigError(f"--html={html}: evaluations have no curves; name runs, or leave it out")
        evaluations = [read_evaluation(run) for run in runs]
        if as_json:
            print(msgspec.json.encode(evaluations).decode())
            return
        for table in evaluation_tables(evaluations, width=console.width):
            console.print(table)
        return
    read = [read_run(run) for run in runs]
    comparison = make_comparison(read)
    if html is not None:
        _draw(html, read, comparison)
    if as_json:
        print(msgspec.json.encode(comparison).decode())
        return
    for table in comparison_tables(read, comparison, width=console.width):
        console.print(table)
    if html is not None:
        print_line(f"\nin pictures: {html}")


def _draw(path: Path, runs: "list[ComparedRun]", comparison: "Comparison") -> None:
    """Write the page of a comparison. Raises `ConfigError` where the file cannot be written."""
    from laminar_lab.compare_page import render_comparison

    try:
        path.write_text(render_comparison(runs, comparison), "utf-8")
    except OSError as error:
        raise ConfigError(f"--html={path}: cannot be written ({error.strerror}); name another file") from None
