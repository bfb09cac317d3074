"""`laminar launch`: all runs of an experiment, from its file to a page that compares them."""

import asyncio
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from laminar_py.cli import console, print_line
from laminar_py.config import ConfigError

if TYPE_CHECKING:
    from laminar_lab.launcher.experiment import Experiment

WIDE = 160  # columns of a table that no terminal limits
app = typer.Typer()


@app.command(epilog="Example: laminar launch experiments/launcher --dry-run")
def launch(
    file: Annotated[Path, typer.Argument(help="YAML file of the experiment, or the folder of experiment.yaml")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would run, where, and how long; only data.prepare is run")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Write report.html of the runs so far, and run nothing")
    ] = False,
) -> None:
    """Run all runs of an experiment, as many at a time as there are GPUs for, and compare them.

    Run folders, logs and report.html are written beside FILE. After a stop or a crash the same command goes on.
    """
    from laminar_lab.launcher.experiment import check_existing_runs, describe_unknown_folders, read_experiment

    experiment = read_experiment(file / "experiment.yaml" if file.is_dir() else file)
    if report:
        _draw(experiment)
        return
    check_existing_runs(experiment)
    if strangers := describe_unknown_folders(experiment):
        print_line(strangers)
    if dry_run:
        _plan(experiment)
        return
    with _only_launcher(experiment):
        whole = _work(experiment)
        finished, every = _draw(experiment)
    if not whole:
        print_line(f"stopped; go on with: laminar launch {file}")
        raise typer.Exit(130)
    if finished < every:
        raise typer.Exit(1)


def _work(experiment: "Experiment") -> bool:
    """Run what has not finished; False if a signal stopped it."""
    from laminar_lab.launcher.board import Board
    from laminar_lab.launcher.plan import check_runs, make_slots
    from laminar_lab.launcher.queue import Queue, python, wait_for_other_processes
    from laminar_lab.launcher.standing import in_turn, read_standings

    if not in_turn(read_standings(experiment)):
        return True
    if any(run.config.relay.base_port for run in experiment.runs):  # begun runs have ports that are checked
        asyncio.run(wait_for_other_processes(experiment, Board(experiment, console).note))
    slots = make_slots(experiment)
    _print_busy_gpus(experiment)
    check_runs(experiment, at_once=len(slots))
    board = Board(experiment, console, slots=len(slots))
    queue = Queue(experiment, slots, train=[*python("laminar_py.cli"), "train"], board=board)
    return asyncio.run(queue.work())


def _plan(experiment: "Experiment") -> None:
    from laminar_lab.launcher.plan import check_runs, make_slots, plan_rows
    from laminar_lab.launcher.standing import read_standings

    slots = make_slots(experiment)
    _print_busy_gpus(experiment)
    if _is_led(experiment.lock):  # its runs have the ports and the memory that a check asks for
        told = "another launcher is at it: nothing was checked here, and no data prepared"
    else:
        scripts = ", ".join(map(str, check_runs(experiment, at_once=len(slots))))
        prepared = f"data was prepared by {scripts}" if scripts else "no data was prepared, since no script is set"
        told = f"checked: model, data, reward and engine of every variant with runs ahead; {prepared}"
    for row in plan_rows(experiment, read_standings(experiment), slots):
        console.print(row, soft_wrap=True)
    print_line(told)


def _print_busy_gpus(experiment: "Experiment") -> None:
    from laminar_lab.launcher.plan import busy_gpus

    if busy := busy_gpus(experiment):
        print_line(
            f"GPU {','.join(busy)}: no run gets it, others use its memory; CUDA_VISIBLE_DEVICES decides if set"
        )


def _draw(experiment: "Experiment") -> tuple[int, int]:
    """Table and page of what is there; the number of finished runs, and of all."""
    from laminar_lab.launcher.board import standing_table
    from laminar_lab.launcher.page import write_page
    from laminar_lab.launcher.standing import RunState, read_standings

    standings = read_standings(experiment)
    wide = console if console.is_terminal else Console(width=WIDE, highlight=False)
    wide.print(standing_table(standings, experiment, width=wide.width))
    finished = sum(one.state is RunState.FINISHED for one in standings)
    print_line(f"{finished} of {len(standings)} runs have finished; compared in {write_page(experiment)}")
    return finished, len(standings)


def _is_led(file: Path) -> bool:
    """True while a launcher holds the lock in this file."""
    if not file.is_file():
        return False
    with file.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@contextmanager
def _only_launcher(experiment: "Experiment") -> Iterator[None]:
    """Hold the runs against a second launcher. Raises `ConfigError` where one has them."""
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
