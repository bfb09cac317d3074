"""`laminar clean`: weights that runs have left in the shared memory of this host, listed and deleted.

A run that finished has deleted its own; one that was stopped keeps them for `--resume`. Each folder names its run.
Invariant: weights of a run that may run are not deleted unless the user says that its folder is gone for good.
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from laminar_py.cli.lines import say
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import RunFolder, run_of
from laminar_py.observe.fleet import folder_bytes

MOST_TOLD = 5  # runs of a line


def clean(
    only: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="Folder of a run, e.g. runs/mine-1; default: all")
    ] = None,
    free: Annotated[bool, typer.Option("--free", help="Delete those of stopped runs")] = False,
    gone: Annotated[bool, typer.Option("--gone", help="Delete those of runs whose folder is not there")] = False,
    shm: Annotated[Path, typer.Option(help="Shared memory, as relay.shm")] = Path("/dev/shm"),
) -> None:
    """List what stopped runs keep in this host's shared memory; --free deletes it.

    A stopped run can be resumed all the same: from its checkpoint, with responses under way begun anew. A run
    whose folder is not there was deleted, or lies on a disk that is not mounted; --gone says that it was deleted.
    """
    found = list(_folders(shm))
    folders = [one for one in found if only is None or one[1].path == only.resolve()]
    if only is not None and not folders and not RunFolder(only).config.is_file():
        raise ConfigError(f"run={only}: no such run, and none that left anything in {shm}; {_tell_runs(found)}")
    for folder, run in folders:
        size = f"{folder_bytes(folder) / 2**20:,.0f} MiB"
        is_there = os.path.isdir(run.path)
        ours = is_there and run.try_lock()  # so that nobody resumes it meanwhile
        state = "not there, deleted or not mounted" if not is_there else "stopped" if ours else "runs"
        if (free and ours) or (gone and not is_there):
            shutil.rmtree(folder, ignore_errors=True)  # another call may be at it
            state = f"{state}; {'not freed' if folder.exists() else 'freed'}"
        if ours:
            run.unlock()
        say(f"{folder}: {size}, {run.path}: {state}")
    if not folders:
        say(f"no run has left anything in {shm}" if only is None else f"{only} has left nothing in {shm}")
    elif not (free or gone):
        say("laminar clean --free deletes those of stopped runs, --gone those of runs whose folder is not there")


def _tell_runs(found: Sequence[tuple[Path, RunFolder]]) -> str:
    """Words on the runs that left something, to choose from."""
    if not found:
        return "no other run has left anything there either"
    more = f" and {len(found) - MOST_TOLD} more, which `laminar clean` lists" if len(found) > MOST_TOLD else ""
    return f"choose from {', '.join(str(run.path) for _, run in found[:MOST_TOLD])}{more}"


def _folders(shm: Path) -> Iterator[tuple[Path, RunFolder]]:
    """Folders of this user's runs, each with its run; one that vanishes meanwhile is none."""
    for folder in sorted(shm.glob("laminar-*")):
        with contextlib.suppress(FileNotFoundError):
            status = folder.lstat()
            own = status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode)
            if own and (run := run_of(folder)) is not None:
                yield folder, run
