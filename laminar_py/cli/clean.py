"""`laminar clean`: weights that runs have left in the shared memory of this host, listed and deleted.

A run that finished has deleted its own; one that was stopped keeps them for `--resume`. Each folder names its run.
"""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from laminar_py.cli.lines import say
from laminar_py.config.section import ConfigError
from laminar_py.ledger.run_folder import RunFolder, run_of
from laminar_py.telemetry.memory import folder_bytes


def clean(
    free: Annotated[bool, typer.Option("--free", help="Delete those that no running run uses")] = False,
    shm: Annotated[Path, typer.Option(help="Shared memory, as relay.shm")] = Path("/dev/shm"),
) -> None:
    """List what stopped runs keep in this host's shared memory; --free deletes it.

    A stopped run can be resumed all the same: from its checkpoint, and responses under way begin anew.
    """
    own = [folder for folder in sorted(shm.glob("laminar-*")) if folder.lstat().st_uid == os.getuid()]
    folders = [(folder, run) for folder in own if not folder.is_symlink() and (run := run_of(folder)) is not None]
    for folder, run in folders:
        size = f"{folder_bytes(folder) / 2**20:,.0f} MiB"
        gone = not run.path.is_dir()
        ours = not gone and _lock(run)  # so that nobody resumes it meanwhile
        state = "its run is gone" if gone else "stopped" if ours else "runs"
        if free and (gone or ours):
            shutil.rmtree(folder)
            state = f"{state}; deleted"
        if ours:
            run.unlock()
        say(f"{folder}: {size}, {run.path}: {state}")
    if not folders:
        say(f"no run has left anything in {shm}")
    elif not free:
        say("laminar clean --free deletes those that no running run uses")


def _lock(run: RunFolder) -> bool:
    """True if the run was nobody's, and is this process's now."""
    try:
        run.lock()
    except ConfigError:
        return False
    return True
