"""`laminar train`, `laminar export` and `laminar eval`: start runs and evaluations, print their summaries."""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from laminar_py.cli.command import console, print_line
from laminar_py.config.loading import flatten, load_config
from laminar_py.config.registry import installed_points
from laminar_py.config.section import ConfigError
from laminar_py.records.host import counted

if TYPE_CHECKING:
    from laminar_py.config.run import RunConfig
    from laminar_py.observe.summary import EvaluationFigures, Summary

# entry points: functions (summary, interrupted) of installed packages, called when a run ends
ENDINGS = "laminar_py.run_endings"


class ExportDtype(StrEnum):
    """Types of weights that `laminar export` writes."""

    BF16 = "bf16"
    FP32 = "fp32"


MOST_NAMED = 3  # ignored settings that a resume prints
DTYPES = {ExportDtype.BF16: "bfloat16", ExportDtype.FP32: "float32"}


def train(
    config: Annotated[Path, typer.Argument(help="YAML file of the run")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings, e.g. learner.lr=1e-3")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the newest run of this name, with its own settings")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("--run", help="Folder of the run to resume, instead of the newest")
    ] = None,
) -> None:
    """Train a model; all files of the run are in runs/<name>-<n>/.

    With --resume a run continues with its own settings and with those given as key=value, which it keeps in its
    config.yaml. A line names settings of the file that have changed since and are ignored.
    """
    changes = overrides or []
    settings = load_config(config, changes)
    if folder is not None and not resume:
        raise ConfigError(f"--run={folder}: names a run to resume; add --resume, or leave it out")
    from laminar_py.ledger.requests import rounding_on_record, settings_on_record
    from laminar_py.ledger.run_folder import newest_run, run_at
    from laminar_py.runtime.orchestrator.launch import launch

    run = (newest_run(settings) if folder is None else run_at(folder)) if resume else None
    if run is not None:
        load_config(run.config, changes)  # it is what `config.yaml` will say
        kept = [*settings_on_record(run, changes), *changes, *rounding_on_record(run, changes)]
        in_file, settings = settings, load_config(run.config, kept)
        if ignored := ignored_settings(settings, in_file, file=config, alone=_load_alone(config) or in_file):
            print_line(f"{run.path} resumes with its own settings; {ignored}")
    summary = launch(settings, resume=run, overrides=changes, console=console)
    _print_end(summary)
    if not summary.finished:
        which = [] if folder is None else [f"--run {folder}"]
        again = " ".join(["laminar train", str(config), *changes, "--resume", *which])
        last = ", its last; its evaluation is left" if summary.steps >= settings.steps else ""
        print_line(f"{summary.run} stopped at step {summary.steps}{last}; resume with: {again}")
        raise typer.Exit(130)


def _load_alone(file: Path) -> "RunConfig | None":
    """Return the config of a file without overrides; None if it needs them to be one."""
    try:
        return load_config(file, [])
    except ConfigError:
        return None


def ignored_settings(recorded: "RunConfig", in_file: "RunConfig", *, file: Path, alone: "RunConfig") -> str:
    """Return a line on settings of `file` that a resumed run ignores; "" where the file has the run's settings.

    `in_file` has the overrides, and `alone` has none: where the file alone has the run's value, only an override
    of another setting made it differ.
    """
    then, now, before = flatten(recorded), flatten(in_file), flatten(alone)
    keys = [key for key in now | then if then.get(key) not in (now.get(key), before.get(key))]
    if not keys:
        return ""
    shown = ", ".join(f"{key} {then.get(key)} -> {now.get(key)}" for key in keys[:MOST_NAMED])
    more = f" and {len(keys) - MOST_NAMED} more" if len(keys) > MOST_NAMED else ""
    return f"it ignores these changes in {file}: {shown}{more}; add them as key=value, or start a new run"


def _print_end(summary: "Summary") -> None:
    """Call the `ENDINGS` of installed packages, which print the summary; print how many responses lack a score."""
    for ending in installed_points(ENDINGS):
        ending.load()(summary, not summary.finished)
    unscored = summary.unscored
    if unscored.count:
        of = counted(unscored.of, "response")
        print_line(f"{unscored.count} of {of} could not be scored; the first: {unscored.first}")


def export(
    source: Annotated[Path, typer.Argument(help="Folder of a run (its newest checkpoint) or of a checkpoint")],
    out: Annotated[Path, typer.Argument(help="New folder")],
    dtype: Annotated[ExportDtype | None, typer.Option(help="Type of the weights; default: as the model")] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the LoRA adapters, as peft and engines read them")
    ] = False,
) -> None:
    """Write the trained model as a plain Hugging Face folder, also while the run runs.

    LoRA adapters are merged into their base, or with --adapter written alone.
    """
    from laminar_py.runtime.orchestrator.exports import export as export_run

    exported = export_run(source, out, dtype=None if dtype is None else DTYPES[dtype], adapter=adapter)
    what = "" if exported.base is None else f"adapters for the base {exported.base}, from "
    print_line(f"{out}: {what}{exported.checkpoint.name} of {source}")


def evaluate(
    source: Annotated[
        Path, typer.Argument(help="Folder of a run (its newest checkpoint), of a checkpoint, or of a model")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings, e.g. eval.sets.aime.samples=32 rollout.replicas=8")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with the sets; default: the run's")] = None,
    sets: Annotated[list[str] | None, typer.Option("--set", help="A set to evaluate; default: all")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the newest evaluation of this source with these settings")
    ] = False,
) -> None:
    """Evaluate a checkpoint or a model; all files of the evaluation are in runs/eval-<name>-<n>/."""
    from laminar_py.runtime.orchestrator.launch import evaluate as evaluate_source
    from laminar_py.runtime.orchestrator.sources import EvalRequest

    request = EvalRequest(source=source, config=config, sets=sets or (), overrides=overrides or (), resume=resume)
    summary = evaluate_source(request, console=console)
    if not summary.finished:
        print_line(f"{summary.run} stopped; --resume continues it and keeps its answers")
        raise typer.Exit(130)
    console.print(evaluation_table(summary.evaluations))
    print_line(f"figures: {summary.run}/summary.json; texts: laminar samples {summary.run}")


def evaluation_table(evaluations: "Sequence[EvaluationFigures]") -> Table:
    """Return a table of figures with a column for each set, each mean with its 95 % interval."""
    table = Table("", box=None, padding=(0, 2, 0, 0))
    for evaluation in evaluations:
        table.add_column(Text(evaluation.set_name))
    columns = [evaluation.figures.rows for evaluation in evaluations]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(column.get(name, "-") for column in columns))
    return table
