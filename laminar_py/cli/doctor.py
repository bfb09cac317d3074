"""`laminar doctor`: what this machine, or a cluster, can run."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from laminar_py.cli.lines import console, say
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError

if TYPE_CHECKING:
    from laminar_py.runtime.cluster.placement import Node
    from laminar_py.runtime.preflight.doctor import Fit, PretendedCluster
    from laminar_py.runtime.preflight.memory import GpuMemory


def doctor(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run, to be placed on its cluster")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. rollout.replicas=4")] = None,
    gpu_gb: Annotated[
        float | None, typer.Option(help="Memory of a GPU in GB; default: what its node says, or 80")
    ] = None,
    pretend: Annotated[
        list[str] | None,
        typer.Option(help="Nodes of a cluster that is not there: 3x8xH100, 2x64xcpu (cores), 2x8xH200,1x8xA100"),
    ] = None,
) -> None:
    """Say what this machine can run and what to install for the rest; with a config, where its parts would go and
    how much memory they take on each GPU, on its cluster or on one that is not there (`--pretend`)."""
    from laminar_py.runtime.preflight.doctor import examine, fit, fit_pretended, pretended_cluster

    gpu_bytes = None if gpu_gb is None else gpu_gb * 1e9
    if pretend:
        if config is None:
            raise ConfigError(f"--pretend={','.join(pretend)}: needs a config to place; name its YAML file")
        cluster = pretended_cluster(pretend)
        _print_fit(fit_pretended(load_config(config, overrides or []), cluster, gpu_bytes=gpu_bytes), cluster)
        return
    if config is not None:
        _print_fit(fit(load_config(config, overrides or []), gpu_bytes=gpu_bytes))
        return
    table = Table("what", "here", "remedy")
    for finding in examine():
        style = None if finding.good else "yellow"
        table.add_row(finding.subject, escape(finding.state), escape(finding.remedy), style=style)
    console.print(table)


def _print_fit(fit: "Fit", pretended: "PretendedCluster | None" = None) -> None:
    parts = Table("part", "node", "GPUs")
    for row in fit.rows:
        parts.add_row(*row)
    console.print(_node_table(fit.nodes) if pretended is None else _group_table(pretended))
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
    if pretended is not None:
        say("every part has a place; what nodes have installed, and room for versions, only a real cluster tells")
        return
    say("every part has a place, and no node lacks what it needs; `laminar data` looks at problems and rewards")


def _node_table(nodes: Sequence["Node"]) -> Table:
    table = Table("node", "Ray id", "CPUs", "free GPUs")
    for node in nodes:
        table.add_row(node.ip, node.id[:8], str(node.cpus), str(node.gpus))
    return table


def _group_table(cluster: "PretendedCluster") -> Table:
    """Pretended nodes, with like neighbours as one row."""
    table = Table("nodes", "CPUs of each", "GPUs of each", "kind")

    def kind(node: "Node") -> tuple[int, int, str]:
        gpu = cluster.gpus.get(node.id)
        return node.cpus, node.gpus, "-" if gpu is None else gpu.name

    for (cpus, gpus, name), group in groupby(cluster.nodes, key=kind):
        names = [node.ip for node in group]
        table.add_row(names[0] + (f" to {names[-1]}" if len(names) > 1 else ""), str(cpus), str(gpus), name)
    return table


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
