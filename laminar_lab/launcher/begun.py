"""Runs that were begun and that another process still has: waiting for them, and the GPUs that they hold here.

Used by the queue, and by the command before a cluster's free GPUs are counted.
"""

import asyncio
import contextlib
import shutil
import socket
from collections.abc import Callable, Collection

import psutil

from laminar_lab.launcher.experiment import Experiment, PlannedRun
from laminar_lab.launcher.standing import RunState
from laminar_py.ledger import HeldError, RunFolder

LOOK_S = 1.0  # between two looks at a lock that another process has
STOPPING_S = 300.0  # after which a run that a killed launcher left has stopped, or is one that somebody wants
SEEN = "CUDA_VISIBLE_DEVICES"

Note = Callable[[PlannedRun, RunState, str], None]
"""Told what becomes of a run."""


async def wait_for_begun(experiment: Experiment, note: Note) -> None:
    """Wait until no process has any of the runs, but no longer than those need that a killed launcher left."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STOPPING_S):
            for run in experiment.runs:
                await freed(run, note)


async def freed(run: PlannedRun, note: Note) -> None:
    """Wait until no other process has the run, and clear away what it never began.

    Raises `ConfigError` or `OSError` for a folder that cannot be written.
    """
    held = False
    while (folder := run.folder) is not None:
        try:
            folder.lock()
        except HeldError as error:
            held = True
            note(run, RunState.HELD, _tell_holder(folder, str(error)))
            await asyncio.sleep(LOOK_S)
            continue
        if folder.is_unbegun:  # perhaps without a whole config
            folder.reap()
            shutil.rmtree(folder.path)
        folder.unlock()
        break
    if held:
        note(run, RunState.WAITING, "")


def held_gpus(run: PlannedRun, gpus: Collection[str]) -> set[str]:
    """GPUs of these, named as in CUDA_VISIBLE_DEVICES, that a process which has the run may use.

    All where nothing says which; none where it runs on another host.
    """
    folder = run.folder
    if folder is None or not folder.is_led:
        return set()
    try:
        host, pid = folder.holder or (socket.gethostname(), 0)
        seen = psutil.Process(pid).environ().get(SEEN) if pid and host == socket.gethostname() else None
    except (OSError, psutil.Error):
        return set(gpus)
    if host != socket.gethostname():
        return set()
    names = None if seen is None else set(seen.split(","))
    comparable = names is not None and {name.isdigit() for name in names} == {name.isdigit() for name in gpus}
    return set(gpus) & names if names is not None and comparable else set(gpus)


def _tell_holder(folder: RunFolder, complaint: str) -> str:
    with contextlib.suppress(OSError):
        if (holder := folder.holder) is not None:
            return f"process {holder[1]} on {holder[0]} has it"
    return complaint
