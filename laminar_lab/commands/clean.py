"""`laminar clean`: list and delete weights that stopped runs left in this host's shared memory.

A run that finished deletes its weights; a stopped run keeps them for `--resume`. Each folder of weights names its
run. `clean` deletes weights of a run that may still run only if the user says that the run's folder is gone for
good (`tests/doctor/test_clean.py`).
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from laminar_py.cli import print_line
from laminar_py.config import ConfigError
from laminar_py.ledger import RunFolder, run_of
from laminar_py.observe import folder_bytes

MOST_NAMED = 5  # runs in a line
app = typer.Typer()


@app.command(epilog="Example: laminar clean --free")
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
