"""`laminar launch`: run all runs of an experiment, and compare them."""

import asyncio
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from laminar_py.cli import console, print_line
from laminar_py.config import ConfigError
from laminar_py.records.host import counted

if TYPE_CHECKING:
    from laminar_lab.launcher.experiment import Experiment
    from laminar_lab.launcher.loop import Slot

WIDE = 160  # columns of a table outside a terminal
app = typer.Typer()


@app.command(epilog="Example: laminar launch experiments/launcher --dry-run")
def launch(
    file: Annotated[Path, typer.Argument(help="YAML file of the experiment, or the folder of experiment.yaml")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, make the data and list the runs, but run nothing")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Print the table and the comparison so far, and run nothing")
    ] = False,
) -> None:
    """Run all runs of an experiment, as many at a time as there are GPUs for, and compare them.

    Run folders and logs are written beside FILE. After a stop or a crash the same command continues.
    """
    from laminar_lab.launcher.experiment import check_existing_runs, read_experiment

    experiment = read_experiment(file / "experiment.yaml" if file.is_dir() else file)
    if report:
        _report(experiment)
        return
    for line in check_existing_runs(experiment):
        print_line(line)
    if dry_run:
        _print_plan(experiment)
        return
    with _only_launcher(experiment):
        complete = run_all(experiment)
        finished = _report(experiment)
    if not complete:
        print_line(f"stopped; continue with: laminar launch {file}")
        raise typer.Exit(130)
    if finished < len(experiment.runs):
        raise typer.Exit(1)


def run_all(experiment: "Experiment") -> bool:
    """Run all unfinished runs; return False if a signal stopped them."""
    from laminar_lab.launcher.loop import (
        Launcher,
        check_variants,
        make_slots,
        module_command,
        wait_for_earlier_runs,
    )
    from laminar_lab.launcher.progress import unfinished_runs

    if not unfinished_runs(experiment):
        return True
    wait_for_earlier_runs(experiment, print_line)
    slots = make_slots(experiment)
    check_variants(experiment, slots=len(slots))
    train = [*module_command("laminar_py.cli"), "train"]
    return asyncio.run(Launcher(experiment, slots, train=train, log=print_line).run_all())


def _print_plan(experiment: "Experiment") -> None:
    """Check everything, and print every variant and run."""
    from laminar_lab.launcher.loop import check_variants, make_slots
    from laminar_lab.launcher.progress import progress_table, read_all_progress
    from laminar_py.config.loading import to_overrides

    slots = make_slots(experiment)
    scripts = check_variants(experiment, slots=len(slots))
    settings, config = experiment.settings, experiment.runs[0].config
    seeds = "" if len(settings.seeds) > 1 else " with ONE SEED each"
    print_line(
        f"{settings.name}: {counted(len(experiment.runs), 'run')} of"
        f" {counted(len(experiment.variants), 'variant')}{seeds},"
        f" {_describe_slots(slots, config.cluster.address)}; in {config.runs}"
    )
    common = to_overrides(settings.set)
    if common:
        print_line(f"every run: {settings.base} with {' '.join(common)}")
    variants = Table("variant", "settings", box=None, padding=(0, 2, 0, 0))
    for run in {run.variant: run for run in experiment.runs}.values():
        own = " ".join(override for override in run.overrides if override not in common)
        variants.add_row(Text(run.variant), Text(own or "-"))
    console.print(variants)
    console.print(progress_table(experiment, read_all_progress(experiment)))
    prepared = (
        f"data was prepared by {', '.join(scripts)}" if scripts else "no data was prepared: no script is set"
    )
    print_line(f"checked: model, data, reward and engine of every variant with unfinished runs; {prepared}")


def _describe_slots(slots: "list[Slot]", address: str | None) -> str:
    where = "on this machine" if address is None else f"on the Ray cluster {address}"
    gpus = " and ".join(f"GPU {','.join(slot)}" for slot in slots if slot)
    return f"{len(slots)} at a time {where}{f' ({gpus})' if gpus else ''}"


def _report(experiment: "Experiment") -> int:
    """Print the table of all runs and compare the finished runs; return their number."""
    from laminar_lab.compare import change_lines, compare, read_run, seed_warning, sets_table
    from laminar_lab.launcher.progress import RunState, progress_table, read_all_progress

    progress = read_all_progress(experiment)
    wide = console if console.is_terminal else Console(width=WIDE, highlight=False)
    wide.print(progress_table(experiment, progress))
    finished = [entry.run for entry in progress if entry.state is RunState.FINISHED]
    folders = [run.folder.path for run in finished if run.folder is not None]
    if len(folders) > 1:
        read = [read_run(folder) for folder in folders]
        comparison = compare(read)
        names = [finished[group.runs[0]].variant for group in comparison.groups]
        wide.print(sets_table(comparison, names, width=wide.width))
        for line in change_lines(read, [run.name for run in finished if run.folder is not None]):
            wide.print(line)
        if (warning := seed_warning(comparison, names)) is not None:
            wide.print(warning)
        print_line(f"two runs side by side: laminar compare {folders[0]} {folders[1]}")
    print_line(f"{len(finished)} of {counted(len(progress), 'run')} have finished")
    return len(finished)


@contextmanager
def _only_launcher(experiment: "Experiment") -> Iterator[None]:
    """Lock the runs against a second launcher. Raises `ConfigError` if a launcher has the lock."""
    folder = experiment.lock.parent
    try:
        folder.mkdir(exist_ok=True)
        lock = experiment.lock.open("w")
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error.strerror}); copy the experiment elsewhere"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another launcher runs there; wait for it, or end it first") from None
        except OSError as error:
            raise ConfigError(
                f"{folder}: its file system gives no locks ({error.strerror}); copy the experiment elsewhere"
            ) from None
        yield
