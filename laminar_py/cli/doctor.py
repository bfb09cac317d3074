"""`laminar doctor`: what this machine, or a cluster, can run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from laminar_py.config.loading import load_config

if TYPE_CHECKING:
    from laminar_py.preflight.doctor import Fit

console = Console()


def doctor(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run: place it on its cluster")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. rollout.replicas=4")] = None,
) -> None:
    """Say what this machine can run and what to install for the rest; with a config, where its parts would go."""
    from laminar_py.preflight.doctor import examine, fit

    if config is not None:
        _print_fit(fit(load_config(config, overrides or [])))
        return
    table = Table("what", "here", "remedy")
    for finding in examine():
        style = None if finding.good else "yellow"
        table.add_row(finding.subject, finding.state, finding.remedy, style=style)
    console.print(table)


def _print_fit(fit: "Fit") -> None:
    nodes = Table("node", "Ray id", "CPUs", "free GPUs")
    for node in fit.nodes:
        nodes.add_row(node.ip, node.id[:8], str(node.cpus), str(node.gpus))
    parts = Table("part", "node", "GPUs")
    for row in fit.rows:
        parts.add_row(*row)
    console.print(nodes, parts)
    for line in fit.warnings:
        console.print(f"warning: {line}", style="yellow", highlight=False, soft_wrap=True)
    for line in fit.faults:
        console.print(line, style="red", highlight=False, soft_wrap=True)
    if fit.faults:
        raise typer.Exit(2)
