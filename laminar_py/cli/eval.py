"""`laminar eval`: figures of a checkpoint or a model on the sets of a config."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from laminar_py.cli.lines import console, say

if TYPE_CHECKING:
    from laminar_py.observe.summary import EvaluationFigures


def evaluate(
    source: Annotated[
        Path, typer.Argument(help="A run (its newest checkpoint), one of its checkpoints, or a model folder")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings, e.g. eval.sets.aime.samples=32 rollout.replicas=8")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with the sets; default: that of the run")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="A set to evaluate; default: all")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest evaluation of this source with these settings")
    ] = False,
) -> None:
    """Evaluate a checkpoint or a model; everything it leaves is in runs/eval-<name>-<n>/."""
    from laminar_py.runtime.orchestrator.eval_launch import EvalInterruptedError, EvalRequest
    from laminar_py.runtime.orchestrator.eval_launch import evaluate as evaluate_source

    request = EvalRequest(source=source, config=config, sets=sets or (), overrides=overrides or (), resume=resume)
    try:
        summary = evaluate_source(request, console=console)
    except EvalInterruptedError as stop:
        say(f"{stop} stopped; go on with --resume: what is answered stays")
        raise typer.Exit(130) from None
    console.print(evaluation_table(summary.evaluations))
    say(f"figures: {summary.run}/summary.json; texts: laminar samples {summary.run}")


def evaluation_table(evaluations: "Sequence[EvaluationFigures]") -> Table:
    """Figures by sets, each mean with its 95 % interval."""
    table = Table("", box=None, padding=(0, 2, 0, 0))
    for one in evaluations:
        table.add_column(Text(one.set_name))
    columns = [_rows(one) for one in evaluations]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "-") for column in columns))
    return table


def _rows(evaluation: "EvaluationFigures") -> dict[str, str]:
    """Figures of a set by name, in their order."""
    figures = evaluation.figures
    rows = {"problems x samples": f"{figures.problems} x {figures.samples}", figures.name: figures.mean.tell()}
    rows |= {f"pass@{k}": one.tell() for k, one in figures.pass_at.items() if k > 1}
    if figures.majority is not None:
        rows[f"maj@{figures.samples}"] = figures.majority.tell()
    rows["cut by a cap"] = figures.truncated.tell()
    rows["tokens p50 / p95"] = f"{figures.length_p50} / {figures.length_p95}"
    rows["not scored"] = f"{figures.unscored} of {figures.problems * figures.samples}"
    return rows
