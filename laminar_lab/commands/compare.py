"""`laminar compare`: runs side by side on the terminal, or as JSON."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from laminar_py.cli import console
from laminar_py.config import ConfigError

app = typer.Typer()


@app.command(epilog="Example: laminar compare runs/quickstart-1 runs/quickstart-2")
def compare(
    runs: Annotated[list[Path], typer.Argument(help="Folders of two runs or more, or of two evaluations or more")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone, as one object")] = False,
) -> None:
    """Compare runs by configs, held-out sets, quality over costs and speed; or compare evaluations."""
    from laminar_lab.compare import compare as make_comparison
    from laminar_lab.compare import comparison_tables, read_run
    from laminar_lab.compare_evaluations import are_evaluations, evaluation_tables, read_evaluation

    if len(runs) < 2:
        raise ConfigError(f"{runs[0]}: one run cannot be compared; name two runs or more")
    if are_evaluations(runs):
        evaluations = [read_evaluation(run) for run in runs]
        if as_json:
            print(msgspec.json.encode(evaluations).decode())
            return
        for table in evaluation_tables(evaluations, width=console.width):
            console.print(table)
        return
    read = [read_run(run) for run in runs]
    comparison = make_comparison(read)
    if as_json:
        print(msgspec.json.encode(comparison).decode())
        return
    for table in comparison_tables(read, comparison, width=console.width):
        console.print(table)
