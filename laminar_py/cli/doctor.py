"""`laminar doctor`: what this machine, or a cluster, can run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from laminar_py.cli.lines import console, say
from laminar_py.config.loading import load_config

if TYPE_CHECKING:
    from laminar_py.preflight.doctor import Fit
    from laminar_py.preflight.memory import GpuMemory


def doctor(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run, to be placed on its cluster")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. rollout.replicas=4")] = None,
    gpu_gb: Annotated[
        float | None, typer.Option(help="Memory of a GPU in GB; default: what its node says, or 80")
    ] = None,
) -> None:
    """Say what this machine can run and what to install for the rest; with a config, where its parts would go and
    how much memory they take on each GPU."""
    from laminar_py.preflight.doctor import examine, fit

    if config is not None:
        found = fit(load_config(config, overrides or []), gpu_bytes=None if gpu_gb is None else gpu_gb * 1e9)
        _print_fit(found)
        return
    table = Table("what", "here", "remedy")
    for finding in examine():
        style = None if finding.good else "yellow"
        table.add_row(finding.subject, escape(finding.state), escape(finding.remedy), style=style)
    console.print(table)


def _print_fit(fit: "Fit") -> None:
    nodes = Table("node", "Ray id", "CPUs", "free GPUs")
    for node in fit.nodes:
        nodes.add_row(node.ip, node.id[:8], str(node.cpus), str(node.gpus))
    parts = Table("part", "node", "GPUs")
    for row in fit.rows:
        parts.add_row(*row)
    console.print(nodes)
    if fit.rows:
        console.print(parts)
    if fit.memory:
        console.print(_memory_table(fit.memory))
    for line in fit.warnings:
        say(f"warning: {line}", style="yellow")
    for line in fit.faults:
        say(line, style="red")
    if fit.unplaced is not None:
        raise fit.unplaced
    if fit.faults:
        raise typer.Exit(2)
    say("every part has a place, and no node lacks what it needs; `laminar data` looks at problems and rewards")


def _memory_table(columns: Sequence["GpuMemory"]) -> Table:
    """GB at the peak by part, a column for each kind of GPU; a part that takes nothing has no row."""
    table = Table("GB of a GPU, by formula", *(column.kind for column in columns))
    names = dict.fromkeys(name for column in columns for name, size in column.parts.items() if size)
    for name in names:
        table.add_row(
            name, *(f"{column.parts[name] / 1e9:.1f}" if name in column.parts else "-" for column in columns)
        )
    table.add_row("all", *(f"{column.total / 1e9:.1f}" for column in columns), style="bold")
    return table
