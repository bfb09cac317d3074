"""`laminar train`, `laminar export` and `laminar eval`: runs, their summaries, and the figures of their models."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from laminar_py.cli.lines import console, say
from laminar_py.cli.report import print_limits
from laminar_py.config.loading import flatten, load_config, to_overrides
from laminar_py.config.section import ConfigError

if TYPE_CHECKING:
    from laminar_py.config.run import RunConfig
    from laminar_py.observe.summary import (
        CheckpointFigures,
        EvaluationFigures,
        RelayFigures,
        RepackFigures,
        Summary,
        UnscoredFigures,
    )


class ExportDtype(StrEnum):
    """Types that `laminar export` writes."""

    BF16 = "bf16"
    FP32 = "fp32"


WHOLE = 0.995  # share of a version's bytes from which on all of it travels
MOST_TOLD = 3  # settings of a line
FIXED = ("name", "runs", "model", "warm_start", "data.train", "data.chat", "learner.lora")  # of a run, for good
TOLD_CHARS = 40  # of a value
DTYPES = {ExportDtype.BF16: "bfloat16", ExportDtype.FP32: "float32"}


def train(
    config: Annotated[Path, typer.Argument(help="YAML file of the run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. learner.lr=1e-3")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest run of this name, with its own settings")
    ] = False,
    named: Annotated[
        Path | None, typer.Option("--run", help="Folder of the run to go on with, in place of the newest")
    ] = None,
) -> None:
    """Train a model; everything the run leaves is in runs/<name>-<n>/.

    With --resume a run goes on with the settings that it began with and those given as key=value; a line names
    what has changed in the file since.
    """
    changes = overrides or []
    settings = load_config(config, changes)
    if named is not None and not resume:
        raise ConfigError(f"--run={named}: names a run to go on with; add --resume, or leave it out")
    from laminar_py.ledger.run_folder import newest_run, run_at
    from laminar_py.ledger.scaling import fleet_on_record
    from laminar_py.runtime.orchestrator.launch import RunInterruptedError, launch

    run = (newest_run(settings) if named is None else run_at(named)) if resume else None
    if run is not None:
        given, settings = settings, load_config(run.config, [*fleet_on_record(run, changes), *changes])
        if passed_over := tell_passed_over(settings, given, file=config):
            say(f"{run.path} goes on with the settings that it began with; {passed_over}")
    try:
        summary = launch(settings, resume=run, console=console)
    except RunInterruptedError as stop:
        print_limits(Path(stop.summary.run))
        _say_unscored(stop.summary.unscored)
        which = [] if named is None else [f"--run {named}"]
        again = " ".join(["laminar train", str(config), *changes, "--resume", *which])
        say(f"{stop}; go on with: {again}")
        raise typer.Exit(130) from None
    _print_summary(summary)
    print_limits(Path(summary.run))
    _say_unscored(summary.unscored)


def tell_passed_over(recorded: "RunConfig", given: "RunConfig", *, file: Path) -> str:
    """Words on settings of a file that a run which goes on does not take; "" where it has the same ones.

    Those that a resume can change are offered as it takes them; of the others it says that they are for a new run.
    """
    then, now = flatten(recorded), flatten(given)
    keys = [key for key in now | then if now.get(key) != then.get(key)]
    fixed = [key for key in keys if _is_fixed(key)]
    free = [key for key in keys if key not in fixed]
    parts = []
    if free:
        again = [
            shlex.quote(one) for one in to_overrides({key: now[key] for key in free[:MOST_TOLD] if key in now})
        ]
        short = all(len(one) <= 2 * TOLD_CHARS for one in again) and again
        remedy = f"to have them, give them as {' '.join(again) if short else 'key=value'}"
        parts.append(f"of {file} these do not count: {_tell_changes(free, then, now)} ({remedy})")
    if fixed:
        of = "nor can these, which are" if free else f"of {file} these cannot count, which are"
        parts.append(f"{of} what a run is made of: {_tell_changes(fixed, then, now)} (start a new run for them)")
    return "; ".join(parts)


def _is_fixed(key: str) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in FIXED)


def _tell_changes(keys: Sequence[str], then: Mapping[str, object], now: Mapping[str, object]) -> str:
    told = [f"{key} {_cut(then.get(key))} -> {_cut(now.get(key))}" for key in keys[:MOST_TOLD]]
    return ", ".join(told) + (f" and {len(keys) - MOST_TOLD} more" if len(keys) > MOST_TOLD else "")


def _cut(value: object) -> str:
    told = value if isinstance(value, str) else "none" if value is None else json.dumps(value)
    return told if len(told) <= TOLD_CHARS else f"{told[:TOLD_CHARS]}..."


def export(
    source: Annotated[Path, typer.Argument(help="A run, for its newest checkpoint, or one of its checkpoints")],
    out: Annotated[Path, typer.Argument(help="New folder")],
    dtype: Annotated[ExportDtype | None, typer.Option(help="Of the weights; default: that of the model")] = None,
) -> None:
    """Write a plain Hugging Face folder of what a run has learned, also while it goes on."""
    from laminar_py.runtime.orchestrator.exports import export as export_run

    exported = export_run(source, out, dtype=None if dtype is None else DTYPES[dtype])
    say(f"{out}: {exported.checkpoint.name} of {source}")


def _print_summary(summary: "Summary") -> None:
    lengths, counts = summary.response_length, summary.trajectories
    drops = ", ".join(f"{reason} {count}" for reason, count in sorted(counts.dropped_by_reason.items()))
    rows = [
        *_evaluation_rows(summary.evaluations),
        ("RL", f"{summary.steps} steps in {summary.rl_seconds:.1f} s"),
        ("response tokens", f"p50 {lengths.p50}, p95 {lengths.p95}, p99 {lengths.p99}"),
        *_turn_rows(summary),
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
    console.print(table)


def _turn_rows(summary: "Summary") -> Iterator[tuple[str, str]]:
    """Row on turns, where environments answer."""
    if (turns := summary.turns).mean:
        times = f"p50 {turns.environment_p50_s:.2f} s, p95 {turns.environment_p95_s:.2f} s"
        yield "turns", f"mean {turns.mean:.2f} of the model; of its environment {times} a trajectory"


def _say_unscored(unscored: "UnscoredFigures") -> None:
    if unscored.count:
        say(f"{unscored.count} of {unscored.of} responses could not be scored; the first: {unscored.first}")


def tell_relay(relay: "RelayFigures") -> str:
    """Versions, stall, spread and bytes in one line."""
    words = [f"{relay.versions} versions"]
    if relay.stall_s is not None:
        words.append(f"the learner stood still {relay.stall_s * 1000:.1f} ms for one")
    if relay.spread_s is not None:
        words.append(f"{relay.spread_s:.2f} s until the last relay had it")
    if relay.wire_share is not None:
        words.append(tell_travel(relay.wire_share))
    return ", ".join(words)


def tell_travel(wire_share: float) -> str:
    """How much of a version travels to a relay, in a phrase; `wire_share` is of its bytes."""
    if wire_share >= WHOLE:
        return "whole versions travelled"
    return f"what travelled was {wire_share:.1%} of whole versions, the rest was as in the version before"


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


def _evaluation_rows(evaluations: "Sequence[EvaluationFigures]") -> Iterator[tuple[str, str]]:
    """First and last evaluation of each set."""
    for name in dict.fromkeys(one.set_name for one in evaluations):
        passes = [one for one in evaluations if one.set_name == name]
        accurate = all(one.figures.is_accuracy for one in passes)
        label = f"{name} {'accuracy' if accurate else 'mean reward'}"
        yield label, f"{passes[0].mean:.3f} -> {passes[-1].figures.mean.tell()}"


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
    from laminar_py.runtime.orchestrator.launch import EvalInterruptedError
    from laminar_py.runtime.orchestrator.launch import evaluate as evaluate_source
    from laminar_py.runtime.orchestrator.sources import EvalRequest

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
