"""`laminar doctor`: what this machine or a cluster can run; `laminar clean`: weights left in this host's shared
memory.

A run that finished deletes its weights; a stopped run keeps them for `--resume`. Each folder of weights names its
run. `clean` deletes weights of a run that may still run only if the user says that the run's folder is gone for
good (`tests/cli/test_doctor.py`).
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from laminar_py.cli.main import console, print_line
from laminar_py.config.loading import load_config
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import RunFolder, run_of
from laminar_py.observe.fleet import folder_bytes

if TYPE_CHECKING:
    from laminar_py.runtime.cluster.placement import Node
    from laminar_py.runtime.preflight.doctor import Fit, PretendedCluster
    from laminar_py.runtime.preflight.memory import GpuMemory

MOST_NAMED = 5  # runs in a line


def doctor(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run, to be placed on its cluster")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. rollout.replicas=4")] = None,
    gpu_gb: Annotated[
        float | None, typer.Option(help="Memory of a GPU in GB; default: as its node reports, or 80")
    ] = None,
    pretend: Annotated[
        list[str] | None,
        typer.Option(help="Nodes of an imagined cluster: 3x8xH100, 2x64xcpu (cores), 2x8xH200,1x8xA100"),
    ] = None,
) -> None:
    """Show what this machine can run, and what to install for the rest.

    With a config, show where its parts would run and how much memory they take on each GPU, on its cluster or on
    an imagined one (`--pretend`).
    """
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
    """Print where parts run, their memory, warnings and faults. Raises or exits with 2 if the run does not fit."""
    parts = Table("part", "node", "GPUs")
    for row in fit.rows:
        parts.add_row(*row)
    console.print(_node_table(fit.nodes) if pretended is None else _group_table(pretended))
    if fit.rows:
        console.print(parts)
    if fit.memory:
        console.print(_memory_table(fit.memory))
    for line in fit.warnings:
        print_line(f"warning: {line}", style="yellow")
    for line in fit.faults:
        print_line(line, style="red")
    if fit.unplaced is not None:
        raise fit.unplaced
    if fit.faults:
        raise typer.Exit(2)
    if pretended is not None:
        print_line(
            "every part has a place; only a real cluster shows the software and the free memory of its nodes"
        )
        return
    print_line("every part has a place, and no node lacks software; `laminar data` checks problems and rewards")


def _node_table(nodes: Sequence["Node"]) -> Table:
    table = Table("node", "Ray id", "CPUs", "free GPUs")
    for node in nodes:
        table.add_row(node.ip, node.id[:8], str(node.cpus), str(node.gpus))
    return table


def _group_table(cluster: "PretendedCluster") -> Table:
    """Imagined nodes, with equal neighbours as one row."""
    table = Table("nodes", "CPUs of each", "GPUs of each", "kind")

    def kind(node: "Node") -> tuple[int, int, str]:
        gpu = cluster.gpus.get(node.id)
        return node.cpus, node.gpus, "-" if gpu is None else gpu.name

    for (cpus, gpus, name), group in groupby(cluster.nodes, key=kind):
        names = [node.ip for node in group]
        table.add_row(names[0] + (f" to {names[-1]}" if len(names) > 1 else ""), str(cpus), str(gpus), name)
    return table


def _memory_table(columns: Sequence["GpuMemory"]) -> Table:
    """Peak GB by part, with a column for each kind of GPU; a part that takes no memory has no row."""
    table = Table("GB of a GPU, by formula", *(column.kind for column in columns))
    names = dict.fromkeys(name for column in columns for name, size in column.parts.items() if size)
    for name in names:
        table.add_row(
            name, *(f"{column.parts[name] / 1e9:.1f}" if name in column.parts else "-" for column in columns)
        )
    table.add_row("all", *(f"{column.total / 1e9:.1f}" for column in columns), style="bold")
    return table


def clean(
    only: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Folder of a run, e.g. runs/mine-1; default: all")
    ] = None,
    free: Annotated[bool, typer.Option("--free", help="Delete weights of stopped runs")] = False,
    gone: Annotated[
        bool, typer.Option("--gone", help="Delete weights of runs whose folder does not exist")
    ] = False,
    shm: Annotated[Path, typer.Option(help="Shared memory, as relay.shm")] = Path("/dev/shm"),
) -> None:
    """List weights that stopped runs keep in this host's shared memory; --free deletes them.

    A stopped run without them resumes from its checkpoint, and generates unfinished responses again. A folder that
    does not exist was deleted, or lies on a disk that is not mounted; --gone says that it was deleted.
    """
    found = list(_weight_folders(shm))
    folders = [entry for entry in found if only is None or entry[1].path == only.resolve()]
    if only is not None and not folders and not RunFolder(only).config.is_file():
        raise ConfigError(f"run={only}: no such run, and no weights of it in {shm}; {_choices(found)}")
    for folder, run in folders:
        size = f"{folder_bytes(folder) / 2**20:,.0f} MiB"
        is_there = os.path.isdir(run.path)
        locked = is_there and run.try_lock()  # so that no one resumes the run meanwhile
        state = "not there, deleted or not mounted" if not is_there else "stopped" if locked else "runs"
        if (free and locked) or (gone and not is_there):
            shutil.rmtree(folder, ignore_errors=True)  # a second `laminar clean` may delete it at the same time
            state = f"{state}; {'not freed' if folder.exists() else 'freed'}"
        if locked:
            run.unlock()
        print_line(f"{folder}: {size}, {run.path}: {state}")
    if not folders:
        print_line(f"no run has left anything in {shm}" if only is None else f"{only} has left nothing in {shm}")
    elif not (free or gone):
        print_line(
            "laminar clean --free deletes weights of stopped runs, --gone of runs whose folder is not there"
        )


def _choices(found: Sequence[tuple[Path, RunFolder]]) -> str:
    """End of a message that names the runs with weights."""
    if not found:
        return "no other run has left anything there either"
    more = f" and {len(found) - MOST_NAMED} more, which `laminar clean` lists" if len(found) > MOST_NAMED else ""
    return f"choose from {', '.join(str(run.path) for _, run in found[:MOST_NAMED])}{more}"


def _weight_folders(shm: Path) -> Iterator[tuple[Path, RunFolder]]:
    """Folders of weights that belong to this user, each with its run. A folder may vanish meanwhile."""
    for folder in sorted(shm.glob("laminar-*")):
        with contextlib.suppress(FileNotFoundError):
            status = folder.lstat()
            own = status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
            if own and (run := run_of(folder)) is not None:
                yield folder, run
