"""`laminar doctor`: print what this machine or a cluster can run."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Column, Table

from laminar_py.cli import console, print_line
from laminar_py.config import ConfigError, load_config

if TYPE_CHECKING:
    from laminar_lab.doctor.checks import Fit, PretendedCluster
    from laminar_lab.doctor.cpu_memory import CpuMemory
    from laminar_lab.doctor.memory import GpuMemory
    from laminar_lab.doctor.trial_profile import ProfileField, SelfTest
    from laminar_lab.doctor.trial_rows import TriedRow
    from laminar_py.config import RunConfig
    from laminar_py.runtime.cluster import Node

app = typer.Typer()


@app.command(epilog="Example: laminar doctor experiments/math_long_cot/7b_8gpu.yaml")
def doctor(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run, to be placed on its cluster")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. rollout.replicas=4")] = None,
    gpu_gb: Annotated[
        float | None, typer.Option(help="Memory of a GPU in GB; default: as its node reports, or 80")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Size or name of a model that is not here, e.g. 7B, in place of model.path")
    ] = None,
    pretend: Annotated[
        list[str] | None,
        typer.Option(help="Nodes of an imagined cluster: 3x8xH100, 2x64xcpu (cores), 2x8xH200,1x8xA100"),
    ] = None,
    try_it: Annotated[
        bool, typer.Option("--try", help="Measure the machines, and run a few steps of the config on them")
    ] = False,
    seconds: Annotated[float, typer.Option(min=1, help="Limit of the steps of --try")] = 360,
    out: Annotated[
        Path | None, typer.Option(help="With --try: profile to write, as laminar calibrate does")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --try: one JSON object on stdout")] = False,
) -> None:
    """Show what this machine can run, and what to install for the rest.

    With a config, show where its parts would run and how much memory they take on each GPU, on its cluster or on
    an imagined one (`--pretend`). `--try` measures what these machines reach with it, in some minutes, and exits
    with 2 where a part fails; with `--pretend` it lists the measurements. `--out` writes these as a profile for
    `laminar plan`, `simulate` and `report`.
    """
    settings = _settings(config, overrides or [], model=model)
    gpu_bytes = None if gpu_gb is None else gpu_gb * 1e9
    _refuse_options(settings, pretend or [], try_it=try_it, out=out, as_json=as_json)
    if settings is None:
        _print_findings()
    elif pretend:
        _pretend(settings, pretend, gpu_bytes=gpu_bytes, try_it=try_it, as_json=as_json)
    elif try_it:
        _try(settings, seconds=seconds, out=out, as_json=as_json)
    else:
        from laminar_lab.doctor.checks import fit

        _print_fit(fit(settings, gpu_bytes=gpu_bytes))


def _refuse_options(
    settings: "RunConfig | None", pretend: list[str], *, try_it: bool, out: Path | None, as_json: bool
) -> None:
    """Raise `ConfigError` for options that need another, or a config."""
    for option, given in (("--json=true", as_json), (f"--out={out}", out is not None)):
        if given and not try_it:
            raise ConfigError(f"{option}: is for --try; add it, or leave this out")
    if settings is None:
        for option, value in (("--pretend", ",".join(pretend)), ("--try", "true" * try_it)):
            if value:
                raise ConfigError(f"{option}={value}: needs a config; name its YAML file")
    if out is not None and pretend:
        raise ConfigError(f"--out={out}: imagined nodes have no rates; leave out --out or --pretend")


def _settings(config: Path | None, changes: list[str], *, model: str | None) -> "RunConfig | None":
    """Read the config, with a model of that size or name; None without a config. Raises `ConfigError`."""
    if config is None:
        if model is not None:
            raise ConfigError(f"--model={model}: needs a config; laminar plan {model} --gpus 1x8xH100 needs none")
        return None
    if model is not None:
        from laminar_lab.plan.known_models import named_folder

        changes = [*changes, f"model.path={named_folder(model)}"]
    return load_config(config, changes)


def _pretend(
    settings: "RunConfig", nodes: list[str], *, gpu_bytes: float | None, try_it: bool, as_json: bool
) -> None:
    """Place a config on imagined nodes; with `try_it` list the measurements of real ones."""
    from laminar_lab.doctor.checks import fit_pretended, pretended_cluster
    from laminar_lab.doctor.self_test import planned_rows

    cluster = pretended_cluster(nodes)
    placed = fit_pretended(settings, cluster, gpu_bytes=gpu_bytes)
    if try_it:
        _print_tried(planned_rows(settings, placed), as_json=as_json)
    else:
        _print_fit(placed, cluster)


def _try(settings: "RunConfig", *, seconds: float, out: Path | None, as_json: bool) -> None:
    """Measure the machines of a config, and write their profile to `out`, unless a part failed."""
    from laminar_lab.calibration.profile import refuse_unwritable
    from laminar_lab.doctor.self_test import self_test
    from laminar_py.runtime.preflight import prepare

    if out is not None:
        refuse_unwritable(out)

    def show(part: str) -> None:
        if not as_json:
            print_line(part, style="dim")

    prepare(settings)
    found = self_test(settings, seconds=seconds, show=show)
    fields = [] if out is None or found.failed else _write_profile(settings, found, out)
    _print_tried(found.rows, fields, as_json=as_json)
    if not as_json and out is not None:
        print_line(
            f"{out} has the profile: laminar plan --profile {out}, laminar simulate --gpu KIND --profile {out},"
            f" laminar report RUN --profile {out}"
        )


def _write_profile(settings: "RunConfig", found: "SelfTest", out: Path) -> "list[ProfileField]":
    """Write the profile of a self-test below the sources of its fields, and return these. Raises `ConfigError`."""
    from datetime import UTC, datetime

    from laminar_lab.bench.report import machine
    from laminar_lab.calibration.profile import write_with_comment
    from laminar_lab.doctor.trial_profile import profile_of

    profile, fields = profile_of(settings, found)
    head = f"Of `laminar doctor --try` on {datetime.now(UTC):%Y-%m-%d}: {settings.name}, {found.gpu or machine()}"
    write_with_comment(profile, out, [head, *(f"{one.name}: {one.basis}, {one.how}" for one in fields)])
    return fields


def _print_findings() -> None:
    from laminar_lab.doctor.checks import examine

    table = Table("what", "here", "remedy")
    for finding in examine():
        style = None if finding.good else "yellow"
        table.add_row(finding.subject, escape(finding.state), escape(finding.remedy), style=style)
    console.print(table)


def _print_tried(rows: "Sequence[TriedRow]", fields: "Sequence[ProfileField]" = (), *, as_json: bool) -> None:
    """Print the tables of a self-test and of its profile. Exits with 2 if a row failed."""
    failed = any(row.verdict == "failed" for row in rows)
    if as_json:
        found = {"rows": [asdict(row) for row in rows], "failed": failed}
        print(json.dumps(found | ({"profile": [asdict(one) for one in fields]} if fields else {})))
    else:
        table = Table("what", "asked", "measured", "verdict", "remedy")
        styles = {"failed": "red", "slow": "yellow", "not run": "dim"}
        for row in rows:
            texts = (row.what, row.asked, row.measured, row.verdict, row.remedy)
            table.add_row(*map(escape, texts), style=styles.get(row.verdict))
        console.print(table)
        if fields:
            console.print(_profile_table(fields))
    if failed:
        raise typer.Exit(2)


def _profile_table(fields: "Sequence[ProfileField]") -> Table:
    table = Table(Column("field of the profile", overflow="fold"), "value", "basis", "from")
    styles = {"extrapolated": "yellow", "assumed": "dim"}
    for one in fields:
        table.add_row(one.name, f"{one.value:,.4g}", one.basis, escape(one.how), style=styles.get(one.basis))
    return table


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
    if fit.cpu_memory:
        console.print(_cpu_table(fit.cpu_memory))
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


def _cpu_table(columns: "Sequence[CpuMemory]") -> Table:
    """Make the table of peak GB by kind of process, against this machine's memory."""
    from laminar_lab.doctor.cpu_memory import memory_rows
    from laminar_lab.doctor.memory import host_memory

    table = Table("GB of memory, by formula", "of each", "all")
    for row in memory_rows(columns):
        table.add_row(*row)
    table.add_section()
    table.add_row("the run at its peak", "", f"{sum(one.total for one in columns) / 1e9:.1f}", style="bold")
    table.add_row("this machine, with its container's limit", "", f"{host_memory() / 1e9:.1f}")
    return table


def _memory_table(columns: Sequence["GpuMemory"]) -> Table:
    """Peak GB by part, with a column for each kind of GPU; a part that takes no memory has no row.

    Tokens are of a learner's microbatch, and of an engine's KV cache.
    """
    table = Table("GB of a GPU, by formula", *(column.kind for column in columns))
    names = dict.fromkeys(name for column in columns for name, size in column.parts.items() if size)
    for name in names:
        table.add_row(
            name, *(f"{column.parts[name] / 1e9:.1f}" if name in column.parts else "-" for column in columns)
        )
    table.add_row("all", *(f"{column.total / 1e9:.1f}" for column in columns), style="bold", end_section=True)
    if any(column.host for column in columns):
        hosts = (f"{column.host / 1e9:.1f}" if column.host else "-" for column in columns)
        table.add_row("beside it, in the host's memory", *hosts)
    table.add_row("tokens asked", *("all" if column.asked is None else f"{column.asked:,}" for column in columns))
    table.add_row("tokens that fit", *(f"{column.fitting:,}" for column in columns))
    return table
