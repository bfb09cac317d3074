"""The command line. Owns arguments, exit codes and what is printed; all work is done elsewhere.

Exit codes: 0 done, 1 a law is broken or the run failed, 2 bad input (one line on standard error), 130 stopped by
Ctrl-C with a checkpoint to go on from.
"""

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from laminar_py.cli_audit import audit
from laminar_py.cli_dashboard import dashboard
from laminar_py.cli_report import print_limits, report
from laminar_py.config import EngineKind
from laminar_py.config_file import load_config

if TYPE_CHECKING:
    from laminar_py.runtime.doctor import Fit
    from laminar_py.runtime.summary import CheckpointFigures, RelayFigures, RepackFigures, Summary

app = typer.Typer(
    name="laminar",
    help="Trajectory-level asynchronous RL post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(audit, name="audit")
bench = typer.Typer(help="Measure a part on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")
relay = typer.Typer(help="The tree that carries weights, by itself.", no_args_is_help=True)
app.add_typer(relay, name="relay")
app.command(epilog="Example: laminar report runs/quickstart-1")(report)
app.command(epilog="Example: laminar dashboard runs/quickstart-1 --port 8400")(dashboard)
console = Console()


class RelayBench(StrEnum):
    """What `laminar bench relay` measures."""

    HOST = "host"
    NETWORK = "network"


class RepackBench(StrEnum):
    """What `laminar bench repack` measures."""

    PLAN = "plan"
    WORKLOAD = "workload"
    SCHEDULES = "schedules"


class ExportDtype(StrEnum):
    """Types that `laminar export` writes."""

    BF16 = "bf16"
    FP32 = "fp32"


DTYPES = {ExportDtype.BF16: "bfloat16", ExportDtype.FP32: "float32"}


@app.command(epilog="Example: laminar train configs/quickstart.yaml seed=1 steps=60")
def train(
    config: Annotated[Path, typer.Argument(help="YAML file of the run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. learner.lr=1e-3")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the newest run of this name")] = False,
) -> None:
    """Train a model; everything the run leaves is in runs/<name>-<n>/."""
    changes = overrides or []
    settings = load_config(config, changes)
    from laminar_py.runtime.launch import RunInterruptedError, launch  # takes a second: after what may be refused
    from laminar_py.runtime.run_folder import newest_run

    run = newest_run(settings) if resume else None
    if run is not None:
        settings = load_config(run.config, changes)
    try:
        summary = launch(settings, resume=run, console=console)
    except RunInterruptedError as stop:
        print_limits(Path(stop.summary.run))
        again = " ".join(["laminar train", str(config), *changes, "--resume"])
        console.print(f"{stop}; go on with: {again}", soft_wrap=True, highlight=False)
        raise typer.Exit(130) from None
    _print_summary(summary)
    print_limits(Path(summary.run))


@app.command(epilog="Example: laminar export runs/quickstart-1 out/quickstart --dtype bf16")
def export(
    source: Annotated[Path, typer.Argument(help="A run, for its newest checkpoint, or one of its checkpoints")],
    out: Annotated[Path, typer.Argument(help="New folder")],
    dtype: Annotated[ExportDtype | None, typer.Option(help="Of the weights; default: that of the model")] = None,
) -> None:
    """Write a plain Hugging Face folder of what a run has learned, also while it goes on."""
    from laminar_py.runtime.exports import export as export_run

    checkpoint = export_run(source, out, dtype=None if dtype is None else DTYPES[dtype])
    console.print(f"{out}: {checkpoint.name} of {source}", highlight=False, soft_wrap=True)


@app.command(epilog="Example: laminar doctor configs/math_7b_8gpu_tp1.yaml")
def doctor(
    config: Annotated[Path | None, typer.Argument(help="YAML file of a run: place it on its cluster")] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. rollout.replicas=4")] = None,
) -> None:
    """Say what this machine can run and what to install for the rest; with a config, where its parts would go."""
    from laminar_py.runtime.doctor import examine, fit

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


@bench.command("engine", epilog="Example: laminar bench engine --only local --repeats 5 --json")
def bench_engine(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each comparison; figures are medians")] = 3,
    only: Annotated[EngineKind | None, typer.Option(help="The figures of one engine")] = None,
) -> None:
    """Compare the engines with what one would use instead; each round is told on stderr. Takes minutes."""
    from laminar_py.bench import engine_local, engine_sglang
    from laminar_py.bench.report import show as show_report

    if only is not EngineKind.LOCAL:
        engine_sglang.find_python()  # better now than after the minutes of the other
    measures = {EngineKind.LOCAL: engine_local.rows, EngineKind.SGLANG: engine_sglang.rows}
    rows = [
        row
        for kind, measure in measures.items()
        if only in (None, kind)
        for row in measure(repeats=repeats, tell=_tell)
    ]
    show_report("engine", rows, as_json=as_json)


@bench.command("packer", epilog="Example: laminar bench packer --json")
def bench_packer(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
) -> None:
    """Fill, balance over ranks and cost of packing finished trajectories. Takes about a minute."""
    from laminar_py.bench import packer
    from laminar_py.bench.report import show as show_report

    show_report("packer", packer.rows(tell=_tell), as_json=as_json)


@bench.command("ledger", epilog="Example: laminar bench ledger --trajectories 1000000 --json")
def bench_ledger(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
    trajectories: Annotated[int, typer.Option(min=1, help="So many are recorded; 4 kB of disk each")] = 100_000,
) -> None:
    """Cost of recording, size on disk, and cost of reading it back. Takes about a minute."""
    from laminar_py.bench import ledger
    from laminar_py.bench.report import show as show_report

    show_report("ledger", ledger.rows(trajectories=trajectories, tell=_tell), as_json=as_json)


@bench.command("learner", epilog="Example: laminar bench learner --json")
def bench_learner(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
) -> None:
    """Packed gradients against single ones, engine against learner, speed and memory. Takes about ten minutes."""
    from laminar_py.bench import learner
    from laminar_py.bench.report import show as show_report

    show_report("learner", learner.rows(tell=_tell), as_json=as_json)


@bench.command("repack", epilog="Example: laminar bench repack --only workload --json")
def bench_repack(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the workload; figures are medians")] = 3,
    only: Annotated[RepackBench | None, typer.Option(help="One part of it")] = None,
) -> None:
    """Repacking on 16 emulated replicas, and whole schedules at equal devices. Run it in the project's folder.

    The workload takes two minutes a run, four runs a seed; the schedules 15 minutes each for two length skews.
    """
    from laminar_py.bench import repack
    from laminar_py.bench.report import show as show_report

    parts = repack.PARTS if only is None else (only.value,)
    show_report("repack", repack.rows(seeds=range(seeds), parts=parts, tell=_tell), as_json=as_json)


@bench.command("relay", epilog="Example: laminar bench relay --only host --json")
def bench_relay(
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object, and nothing else, on stdout")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds of each comparison; figures are medians")] = 7,
    only: Annotated[RelayBench | None, typer.Option(help="On one host, or over hosts with narrow links")] = None,
    shm: Annotated[
        Path, typer.Option(help="Shared memory for one host's part", exists=True, file_okay=False, writable=True)
    ] = Path("/dev/shm"),
) -> None:
    """Compare the relay with bare sockets and copies, and with what one would use instead. Takes minutes."""
    from laminar_py.bench import relay as one_host
    from laminar_py.bench import relay_hosts
    from laminar_py.bench.report import show as show_report
    from laminar_py.section import ConfigError

    rows = one_host.rows(repeats=repeats, tell=_tell, shm=shm) if only in (None, RelayBench.HOST) else []
    try:
        rows += relay_hosts.rows(repeats=min(repeats, 3), tell=_tell) if only is not RelayBench.HOST else []
    except ConfigError as error:
        if only is RelayBench.NETWORK:
            raise
        _tell(f"left out: {error}")
    show_report("relay", rows, as_json=as_json)


@relay.command("keys", epilog="Example: laminar relay keys relay.keys")
def relay_keys(path: Annotated[Path, typer.Argument(help="New file, which all hosts of a tree get")]) -> None:
    """Make the keys of a tree; whoever has the file is let in."""
    from laminar_py.relay.serve import write_keys

    write_keys(path)


@relay.command("serve", epilog="Example: laminar relay serve b --keys relay.keys --parent tcp://10.0.0.4:7000")
def relay_serve(
    name: Annotated[str, typer.Argument(help="Its name in the tree")],
    keys: Annotated[Path, typer.Option(help="File of `laminar relay keys`")],
    parent: Annotated[
        list[str] | None, typer.Option(help="Nearest first, root last; none: it is the root")
    ] = None,
    store: Annotated[Path, typer.Option(help="Folder in shared memory for its versions")] = Path(
        "/dev/shm/laminar-relay"
    ),
    host: Annotated[str, typer.Option(help="Interface, or an ipc:// address")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one")] = 0,
    keep_versions: Annotated[int, typer.Option(min=1)] = 2,
    chunk_bytes: Annotated[int, typer.Option(min=4096, help="Largest that a publisher may cut")] = 16 * 2**20,
    max_bytes_per_s: Annotated[
        float | None, typer.Option(min=1, help="Weights that it sends on, at most; none: no cap")
    ] = None,
) -> None:
    """Run one node of a tree by hand, until Ctrl-C."""
    from laminar_py.relay.serve import read_keys, serve

    serve(
        name,
        store=store,
        keys=read_keys(keys),
        parents=parent or [],
        host=host,
        port=port,
        keep_versions=keep_versions,
        chunk_bytes=chunk_bytes,
        max_bytes_per_s=max_bytes_per_s,
        tell=lambda line: console.print(line, highlight=False, soft_wrap=True),
    )


@relay.command("plan", epilog="Example: laminar relay plan configs/relay/rack.yaml parameters=70B shm_gib=2048")
def relay_plan(
    config: Annotated[Path, typer.Argument(help="YAML file of hosts and links, e.g. configs/relay/rack.yaml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. parameters=70B")] = None,
) -> None:
    """Draw the tree of a fleet with its predicted times and memory; what does not fit is refused."""
    from laminar_py.relay.plan import make_relay_plan, read_spec, tell

    for line in tell(make_relay_plan(read_spec(config, overrides or []))):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _print_summary(summary: "Summary") -> None:
    lengths, counts = summary.response_length, summary.trajectories
    drops = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.dropped_by_reason.items()))
    rows = [
        ("held-out accuracy", f"{_share(summary.accuracy_start)} -> {_share(summary.accuracy_end)}"),
        ("RL", f"{summary.steps} steps in {summary.rl_seconds:.1f} s"),
        ("response tokens", f"p50 {lengths.p50}, p95 {lengths.p95}, p99 {lengths.p99}"),
        ("tokens", f"{summary.tokens.generated:,} generated, {summary.tokens.trained:,} trained"),
        ("trained", f"{summary.trained_tokens_per_s:,.0f} tokens/s"),
        (
            "trajectories",
            f"{counts.issued} issued = {counts.consumed} consumed + {counts.dropped} dropped + {counts.live} live",
        ),
        ("dropped", drops or "none"),
        ("staleness", f"mean {summary.staleness.mean:.2f}, max {summary.staleness.max}"),
        ("versions alive", f"{summary.versions_alive_max} at most"),
        ("relay", tell_relay(summary.relay)),
        ("checkpoints", tell_checkpoints(summary.checkpoints)),
        ("replicas", tell_repack(summary.repack, summary.kv_use)),
        (
            "learner",
            f"waited {summary.learner_waiting_share:.0%}; {summary.overlap_share:.0%} of its work overlapped"
            " generation",
        ),
        ("memory", f"{summary.peak_memory_bytes / 2**30:.2f} GiB at the peak, all processes"),
        ("restarts", ", ".join(f"{part} {count}" for part, count in summary.restarts.items()) or "none"),
    ]
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    console.print(table, highlight=False)


def tell_relay(relay: "RelayFigures") -> str:
    """Versions, stall, spread and bytes in one line."""
    words = [f"{relay.versions} versions"]
    if relay.stall_s is not None:
        words.append(f"the learner stood still {relay.stall_s * 1000:.1f} ms for one")
    if relay.spread_s is not None:
        words.append(f"{relay.spread_s:.2f} s until the last relay had it")
    if relay.wire_share is not None:
        words.append(f"{relay.wire_share:.1%} of the bytes over the wire")
    return ", ".join(words)


def tell_checkpoints(checkpoints: "CheckpointFigures") -> str:
    """Number, stall and duration in one line."""
    if checkpoints.stall_s is None or checkpoints.elapsed_s is None:
        return "none"
    stall_ms = checkpoints.stall_s * 1000
    on_disk = f"{checkpoints.elapsed_s:.2f} s until it was on disk"
    return f"{checkpoints.count}, the learner stood still {stall_ms:.1f} ms for one, {on_disk}"


def tell_repack(repack: "RepackFigures", kv_use: float) -> str:
    """Use of KV caches, and what was moved, in one line."""
    words = [f"{kv_use:.0%} of their KV caches in use"]
    if repack.rounds:
        words.append(
            f"{repack.running} trajectories moved in {repack.rounds} rounds, and {repack.waiting} that waited"
        )
    return ", ".join(words)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def main() -> None:
    """Entry point: faults of input become one line and exit code 2, a failed run one line and 1."""
    from laminar_py.runtime.errors import RunFailedError

    try:
        app()
    except ValueError as error:
        print(f"laminar: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except RunFailedError as error:
        print(f"laminar: {error}", file=sys.stderr)
        raise SystemExit(1) from None
